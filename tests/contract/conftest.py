"""Fixtures of the contract tests."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny(checkpoint: Callable[..., Path]) -> Path:
    """A tiny GLM-5.x checkpoint."""
    return checkpoint("bf16")

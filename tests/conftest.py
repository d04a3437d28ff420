"""What every folder of tests shares: the platform, and small checkpoints, made once a session."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

# Tests send signals to what they start. A script's background job starts with these ignored, and would hand that down.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) == signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The reference platform serves, whatever this machine has, unless only tests that need a GPU run."""
    if any(item.get_closest_marker("gpu") is None for item in session.items):
        os.environ.setdefault("GLM_SGLANG_PLATFORM", "reference")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint("float32", "--layers", "2")`: the folder of a tiny model with these flags; made once a session."""
    from glm_sglang.tiny_model.__main__ import main

    made: dict[tuple[str, ...], Path] = {}

    def make(dtype: str, *flags: str) -> Path:
        key = (dtype, *flags)
        if key not in made:
            folder = tmp_path_factory.mktemp("checkpoint") / dtype
            assert main([str(folder), "--dtype", dtype, *flags]) == 0
            made[key] = folder
        return made[key]

    return make

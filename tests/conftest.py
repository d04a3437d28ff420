"""Fixtures that every folder of tests may use: small checkpoints, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


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

"""Writes the checkpoint's directory, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from glm_sglang.tiny_model import tokenizer
from glm_sglang.tiny_model.shape import DTYPES, Shape, ShapeError, generation_config, hf_config

# Says that the directory is ours to replace, and what it was made from.
MARKER = "tiny_model.json"


class OutputError(RuntimeError):
    """The output path holds something that is not a tiny-model checkpoint."""


def _spec(shape: Shape, dtype: str) -> dict[str, Any]:
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        source.update(path.read_bytes())
    return {"source": source.hexdigest(), "dtype": dtype, "shape": asdict(shape)}


def is_current(out: Path, shape: Shape, dtype: str) -> bool:
    """Whether `out` already holds exactly this checkpoint (by its marker, which is written last)."""
    try:
        found = json.loads((out / MARKER).read_text())
        return bool(found["made_from"] == _spec(shape, dtype)) and all(
            (out / name).stat().st_size == size for name, size in found["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def check_output(out: Path, force: bool) -> None:
    """Raises OutputError when `out` holds files that we did not write, unless `force`."""
    if out.exists() and not out.is_dir():
        raise OutputError(
            f"OUT is {out}, a file; it must be a directory to create or an earlier tiny-model checkpoint"
        )
    if not force and out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_file():
        raise OutputError(
            f"OUT is {out}, which has no {MARKER}; it must be absent, empty or an earlier tiny-model"
            " checkpoint (--force replaces the directory and all it holds)"
        )


def write(out: Path, shape: Shape, dtype: str, *, force: bool = False) -> dict[str, Any]:
    """Writes the checkpoint to `out` and returns {"tensors", "parameters", "bytes", "written"}.

    The files appear together: they are written beside `out` and renamed. A directory that already holds this
    checkpoint is left as it is unless `force` ("written" is then False). Raises OutputError (see
    `check_output`) and ShapeError for an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ShapeError("--dtype", dtype, f"one of {', '.join(DTYPES)}")
    out = out.resolve()
    check_output(out, force)
    if not force and is_current(out, shape, dtype):
        return {**json.loads((out / MARKER).read_text())["about"], "written": False}
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = out.parent / f".{out.name}.{os.getpid()}.tmp"
    retired = out.parent / f".{out.name}.{os.getpid()}.old"
    try:
        about = _write_files(staging, shape, dtype)
        if out.exists():
            out.rename(retired)
        try:
            staging.rename(out)
        except OSError:
            # Another process writing the same checkpoint was faster.
            if not is_current(out, shape, dtype):
                raise
            return {**about, "written": False}
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(retired, ignore_errors=True)
    return {**about, "written": True}


def _write_files(folder: Path, shape: Shape, dtype: str) -> dict[str, Any]:
    from safetensors.torch import save_file

    from glm_sglang.tiny_model.weights import state_dict

    folder.mkdir()
    state = state_dict(shape, dtype)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it private to the user
    texts = {
        "config.json": _json(hf_config(shape, dtype)),
        "generation_config.json": _json(generation_config()),
        "tokenizer.json": tokenizer.tokenizer_json(),
        "tokenizer_config.json": _json(tokenizer.tokenizer_config(shape.max_position)),
        "chat_template.jinja": tokenizer.CHAT_TEMPLATE,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    about = {
        "tensors": len(state),
        "parameters": sum(t.numel() for name, t in state.items() if not name.endswith("_scale_inv")),
        "bytes": sum(t.numel() * t.element_size() for t in state.values()),
    }
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / MARKER).write_text(_json({"made_from": _spec(shape, dtype), "about": about, "files": files}))
    return about


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"

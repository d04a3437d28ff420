"""What a server on this platform runs with where the user gave no flag. Imports nothing heavy: `--help` stays fast."""

from __future__ import annotations

import json
import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from glm_sglang import offline

ATTENTION_BACKEND = "glm_reference"


def server_args_defaults() -> dict[str, Any]:
    """Values by ServerArgs field name. Page 64 is what the DSA pool's index pages are made for."""
    return {
        "device": "cpu",
        "attention_backend": ATTENTION_BACKEND,
        "page_size": 64,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "max_total_tokens": 65536,
        "max_running_requests": 32,
        "chunked_prefill_size": 2048,
        "sleep_on_idle": True,
    }


#: OpenMP threads sleep when they wait. Several servers share few cores here, and a thread that spins for its partner
#: keeps the partner from running: passive waiting made matrix products 2 to 4 times faster on two busy cores.
THREADS = {"OMP_WAIT_POLICY": "passive"}


def set_thread_defaults(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """How a server's processes wait, where the user has not said; returns what was set. Before torch is imported."""
    return offline.fill(THREADS, environ)


def checkpoint_config(model_path: str) -> dict[str, Any]:
    """config.json of a local checkpoint; empty where there is none to read."""
    try:
        config = json.loads((Path(model_path) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def exact_dtype(model_path: str) -> str | None:
    """`float32` for a float32 checkpoint, else None: SGLang's choice stands.

    UPSTREAM: model_config._get_and_verify_dtype turns `auto` into float16 for such a checkpoint.
    """
    config = checkpoint_config(model_path)
    return "float32" if config.get("dtype", config.get("torch_dtype")) == "float32" else None

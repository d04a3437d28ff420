"""What a server on this platform runs with where the user gave no flag. Imports nothing, so that `--help` stays fast."""

from __future__ import annotations

from typing import Any

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

"""What the launcher fills in where the user gave no flag, each value with its reason."""

from dataclasses import dataclass
from typing import Any

from glm_sglang import own_flags
from glm_sglang.command_line import Request
from glm_sglang.platform_choice import PlatformName


@dataclass(frozen=True, slots=True)
class Filled:
    """One value that the launcher gives SGLang, by ServerArgs field."""

    field: str
    value: Any
    why: str


def prefill_defaults(request: Request) -> list[Filled]:
    """What a GLM-5.x prefill node wants. Sizes and parallelism stay the user's and SGLang's business.

    The KV dtype, too, stays SGLang's choice: a stock decode server makes the same one, and the two must
    agree.
    """
    filled = [
        Filled(
            "disaggregation_transfer_backend",
            "nixl",
            "the transfer that moves both main KV and index keys here",
        ),
        Filled(
            "page_size", 64, "the page of GLM-5.x's index keys, and the unit that prefill and decode agree on"
        ),
        Filled("enable_metrics", True, "what this fork does is counted on /metrics"),
    ]
    if request.get("enable_prefill_cp", False):
        why = "zigzag rewrites --moe-a2a-backend to deepep"  # UPSTREAM: model_overrides/deepseek_v2.py
        filled.append(Filled("cp_strategy", "interleave", why))
    return filled


def fill(request: Request, platform: PlatformName) -> list[Filled]:
    """The values to fill in for this request: what it did not set, on the command line or in --config."""
    if request.has(own_flags.NO_DEFAULTS):
        return []
    wanted: dict[str, Filled] = {}
    if request.get("disaggregation_mode", "null") == "prefill":
        wanted.update({filled.field: filled for filled in prefill_defaults(request)})
    if platform == "reference":
        from glm_sglang.reference_platform.defaults import exact_dtype, server_args_defaults

        for name, value in server_args_defaults().items():
            wanted[name] = Filled(name, value, "the reference platform")
        if exact := exact_dtype(str(request.get("model_path", ""))):
            wanted["dtype"] = Filled("dtype", exact, "the checkpoint's own; SGLang's auto would take float16")
    return [filled for name, filled in wanted.items() if name not in request.given]

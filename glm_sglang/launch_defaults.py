"""What the launcher fills in where the user gave no flag, each value with its reason."""

from dataclasses import dataclass
from typing import Any

from glm_sglang import own_flags
from glm_sglang.cache import launch as cache_launch
from glm_sglang.command_line import Request
from glm_sglang.moe.choice import MEGAMOE, Decision
from glm_sglang.platform_choice import PlatformName
from glm_sglang.prefill_graph import options as graph_options


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


def megamoe(moe: Decision | None) -> list[Filled]:
    """What MegaMoE needs of SGLang's flags."""
    if moe is None or moe.path != MEGAMOE:
        return []
    return [
        Filled("moe_a2a_backend", MEGAMOE, moe.reason),
        Filled("disable_shared_experts_fusion", True, "MegaMoE runs routed experts only"),
    ]


def fill(request: Request, platform: PlatformName, moe: Decision | None = None) -> list[Filled]:
    """The values to fill in for this request: what it did not set, on the command line or in --config.

    `--glm-no-defaults` leaves only what explicit --glm-moe and --glm-cache-url mean. Raises UsageError for a
    cache that cannot go with the other flags, and for graphs that must be where none can be.
    """
    graph_options.judge(platform)
    cache = [Filled(name, value, why) for name, (value, why) in cache_launch.fields(request).items()]
    wanted = {filled.field: filled for filled in megamoe(moe)}
    if request.has(own_flags.NO_DEFAULTS):
        explicit = request.get(own_flags.MOE.dest, None) == MEGAMOE
        kept = [filled for filled in wanted.values() if explicit and filled.field not in request.given]
        return kept + cache
    if request.get("disaggregation_mode", "null") == "prefill":
        wanted.update({filled.field: filled for filled in prefill_defaults(request)})
    if platform == "reference":
        from glm_sglang.reference_platform.defaults import exact_dtype, server_args_defaults

        for name, value in server_args_defaults().items():
            wanted[name] = Filled(name, value, "the reference platform")
        if exact := exact_dtype(str(request.get("model_path", ""))):
            wanted["dtype"] = Filled("dtype", exact, "the checkpoint's own; SGLang's auto would take float16")
    return [filled for name, filled in wanted.items() if name not in request.given] + cache

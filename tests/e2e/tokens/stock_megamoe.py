"""SGLang's own `--moe-a2a-backend megamoe` on the reference platform: its decisions, stand-ins for its kernels.

`python -m tests.e2e.tokens.stock_megamoe` is our launcher without the MoE room. What decides stays upstream's: when a
layer runs MegaMoE, what it falls back to, what its dispatcher keeps, and which sum its layer boundary believes complete.
Two things that only CUDA has are replaced: the kernel, by the exact reference over gloo, and the question whether its
weights are built, by yes (as on SM90).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from glm_kernels.mega_moe import Arithmetic, ExpertWeights, mega_moe_reference

from glm_sglang.moe import hooks as moe
from glm_sglang.moe.choice import cap
from glm_sglang.moe.entry import accept
from glm_sglang.upstream import rooms
from glm_sglang.upstream.hooks import Hook, Registration

NAME = "tests.e2e.tokens.stock_megamoe"
if NAME not in rooms.ROOMS:
    rooms.ROOMS = (*(room for room in rooms.ROOMS if room != moe.__name__), NAME)


def built(experts: Any) -> bool:
    """For is_mega_moe_experts_ready."""
    return True


def one_call(
    experts: Any,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    num_tokens: int,
    routed_scaling_factor: float,
    **_: Any,
) -> torch.Tensor:
    """For run_mega_routed_experts: one call of the kernel, which holds no more than the cap."""
    from sglang.srt.runtime_context import get_parallel

    if num_tokens > cap():
        raise AssertionError(f"{num_tokens} tokens in a call that holds {cap()}")
    return mega_moe_reference(
        hidden_states,
        topk_ids,
        topk_weights,
        ExpertWeights(experts.w13_weight.data, experts.w2_weight.data),
        arithmetic=Arithmetic.EXACT,
        routed_scaling_factor=routed_scaling_factor,
        group=get_parallel().moe_ep_group.device_group,
    )


def register() -> None:
    """Keeps upstream's check of the device away, and nothing else."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_mega_moe")(accept)


def registered() -> bool:
    """Whether `register` is in effect."""
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS

    return accept in _HOOKS.get("handle_mega_moe", ())


def _stand_in(name: str, function: str) -> Hook:
    return Hook(
        target=f"sglang.srt.layers.moe.mega_moe.{name}",
        kind="replace",
        function=f"{NAME}:{function}",
        why="a stand-in for CUDA",
        remove_when="never: this is a test",
        platform="reference",
    )


HOOKS = (
    *(hook for hook in moe.HOOKS if hook.platform == "reference"),
    _stand_in("is_mega_moe_experts_ready", "built"),
    _stand_in("run_mega_routed_experts", "one_call"),
)
REGISTRATIONS = (
    Registration(
        function=f"{NAME}:register",
        verify=f"{NAME}:registered",
        why="a stand-in for CUDA",
        platform="reference",
    ),
)

if __name__ == "__main__":
    from glm_sglang.launch_server import main

    sys.exit(main())

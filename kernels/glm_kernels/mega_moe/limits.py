"""What the pinned MegaMoE kernels accept, to be checked before weights load.

UPSTREAM: the host checks of sgl-deep-gemm 0.2.5 (hidden % 512, intermediate % 256 and <= 4096, 32 ranks on
SM90; SGLang's check_mega_moe_shapes on SM100) and the kernels' static asserts (top-k <= 32). The bound on
hidden is 0.2.3.post2's documented one: no larger model is at hand.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Arch(enum.Enum):
    """Kernel families; SM100 serves compute capability 10.0 and 10.3."""

    SM90 = 90
    SM100 = 100


@dataclass(frozen=True)
class Limits:
    """Divisors and maxima of one kernel family."""

    hidden_multiple: int
    intermediate_multiple: int
    max_hidden: int
    max_intermediate: int | None
    max_ranks: int
    max_top_k: int = 32


LIMITS = {
    Arch.SM90: Limits(512, 256, 8192, 4096, 32),
    Arch.SM100: Limits(512, 128, 8192, None, 72),  # UPSTREAM: layout::kNumMaxRanks
}


def check_shape(arch: Arch, *, hidden: int, intermediate: int, experts: int, ranks: int, top_k: int) -> None:
    """Raises ValueError naming the configuration key or flag, the value found and what is allowed."""
    limits = LIMITS[arch]
    for name, value, multiple, largest in (
        ("hidden_size", hidden, limits.hidden_multiple, limits.max_hidden),
        ("moe_intermediate_size", intermediate, limits.intermediate_multiple, limits.max_intermediate),
    ):
        if value < 1 or value % multiple or (largest is not None and value > largest):
            most = "" if largest is None else f" up to {largest}"
            raise ValueError(
                f"{name} is {value}; MegaMoE on {arch.name} takes multiples of {multiple}{most}: "
                "use --glm-moe stock"
            )
    if not 1 <= ranks <= limits.max_ranks:
        raise ValueError(f"--ep-size is {ranks}; MegaMoE on {arch.name} takes 1 to {limits.max_ranks} ranks")
    if experts < 1 or experts % ranks:
        raise ValueError(f"n_routed_experts is {experts}; it must be a multiple of --ep-size, {ranks}")
    if not 1 <= top_k <= min(limits.max_top_k, experts):
        raise ValueError(
            f"num_experts_per_tok is {top_k}; MegaMoE takes 1 to {min(limits.max_top_k, experts)}"
        )

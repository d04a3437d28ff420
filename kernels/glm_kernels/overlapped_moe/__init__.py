"""One MoE layer over an EP group as grouped FP8 GEMMs with the communication and the row kernels under them.

Where `mega_moe` is one persistent kernel, this is a schedule: chunks of rows whose GEMMs run one after the other on
most SMs, while copy engines bring the next tokens and a few SMs place, activate and reduce the neighbours' rows. Names
load on first use: a plan is made and a path is picked without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm_kernels.overlapped_moe.backend import Options
    from glm_kernels.overlapped_moe.crossover import Crossover, Measured, Path
    from glm_kernels.overlapped_moe.layer import OverlappedMoe
    from glm_kernels.overlapped_moe.plan import Geometry, Plan, exact_plan, worst_case_plan
    from glm_kernels.overlapped_moe.transport import Collective, Symmetric

_MODULES = {
    "Collective": "transport",
    "Crossover": "crossover",
    "Geometry": "plan",
    "Measured": "crossover",
    "Options": "backend",
    "OverlappedMoe": "layer",
    "Path": "crossover",
    "Plan": "plan",
    "Symmetric": "transport",
    "exact_plan": "plan",
    "worst_case_plan": "plan",
}

__all__ = [
    "Collective",
    "Crossover",
    "Geometry",
    "Measured",
    "Options",
    "OverlappedMoe",
    "Path",
    "Plan",
    "Symmetric",
    "exact_plan",
    "worst_case_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)

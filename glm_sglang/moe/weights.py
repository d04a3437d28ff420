"""Routed experts in the layout that the kernel reads: arranged after every load, in the parameters' own memory.

UPSTREAM: Fp8MoEMethod.process_weights_after_loading_block_quant, which SGLang calls after each load and each weight
update. It arranges SM90 weights once for all (so a second load stays as it came) and SM100 weights never.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from glm_kernels.mega_moe.interleave import deinterleave_gate_up, gate_up_parts, prepare_sm90_
from glm_kernels.mega_moe.limits import Arch
from glm_kernels.mega_moe.reload import PartState, TransformState, fingerprints
from glm_kernels.mega_moe.scales import mend_zero_scales_
from glm_kernels.mega_moe.weights_sm100 import Sm100Weights, allocate, prepare_sm100_

ATTRIBUTE = "glm_moe_weights"
_NAMES = ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv")

logger = logging.getLogger(__name__)
_Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Arranged:
    """One layer's experts for the kernel: (codes, scales) of both GEMMs. Kept on the layer, as long as it lives.

    The tensors are the layer's parameters themselves (SM100: their codes beside scales of our own), so that a loader
    that writes parameters writes here, and graphs that captured the addresses stay valid.
    """

    l1: _Pair
    l2: _Pair
    state: TransformState = field(default_factory=TransformState)
    sm100: Sm100Weights | None = None


def arrange(experts: Any, arch: Arch) -> int:
    """Arranges what was loaded since the last call; returns how many experts that were.

    experts: SGLang's FusedMoE with E4M3 parameters w13_weight [E, 2I, H] and w2_weight [E, H, I] and fp32 block scales
    `*_weight_scale_inv`. Raises ValueError for damaged scales and for experts of which only a part was loaded again.
    """
    w13, s13, w2, s2 = (getattr(experts, name).data for name in _NAMES)
    found = getattr(experts, ATTRIBUTE, None)
    if found is None or found.l1[0].data_ptr() != w13.data_ptr():
        found = _first(arch, w13, s13, w2, s2)
        setattr(experts, ATTRIBUTE, found)
    if arch is Arch.SM100:
        assert found.sm100 is not None
        return prepare_sm100_(found.sm100, s13, s2, found.state)
    _restore_order_(w13, s13, found.state)
    mended = mend_zero_scales_(w13, s13) + mend_zero_scales_(w2, s2)
    if mended:
        logger.warning("MegaMoE: %d weight blocks had a scale of 0; they count as zero weights", mended)
    return prepare_sm90_(w13, found.state)


def _restore_order_(w13: torch.Tensor, s13: torch.Tensor, state: TransformState) -> None:
    """Codes [E, 2I, H] of experts that got a block scale of 0 without them: from the kernel's order into the scales'.

    A block of a scale counts rows as the checkpoint has them. `prepare_sm90_` then arranges these experts once more.
    Raises ValueError where only a part of such codes was loaded, and leaves them as they are.
    """
    unusable = (s13 < torch.finfo(s13.dtype).tiny).flatten(1).any(1)
    for expert in unusable.nonzero().flatten().tolist():
        rows = w13[expert].view(torch.uint8)
        if state.classify(expert, fingerprints(gate_up_parts(rows))) is PartState.TRANSFORMED:
            rows.copy_(deinterleave_gate_up(rows))
            del state.records[expert]


def _first(arch: Arch, w13: torch.Tensor, s13: torch.Tensor, w2: torch.Tensor, s2: torch.Tensor) -> Arranged:
    if arch is Arch.SM90:
        return Arranged((w13, s13), (w2, s2))
    ours = allocate(w13, w2)
    return Arranged((ours.l1.codes, ours.l1.scales), (ours.l2.codes, ours.l2.scales), sm100=ours)

"""One MoE layer's routed experts, in as many kernel calls as every EP rank makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from glm_kernels.mega_moe.chunks import plan_chunks

from glm_sglang.moe.counters import Counters
from glm_sglang.moe.kernels import Kernel, Rows
from glm_sglang.moe.rows import Attention, agreed


@dataclass
class RoutedExperts:
    """What every MoE layer of this process shares: the kernel with its buffer, and how to know the other ranks' rows.

    global_tokens: every DP rank's tokens in this pass, padded as SGLang padded them; asked under attention DP only.
    """

    kernel: Kernel
    capacity: int
    attention: Attention
    global_tokens: Callable[[], Sequence[int] | None]
    counters: Counters = field(default_factory=Counters)

    def __call__(
        self,
        experts: Any,
        x: torch.Tensor,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        *,
        top_k: int,
        scaling: float,
        clamp: float | None,
    ) -> torch.Tensor:
        """x [T, H] of this rank, ids [T, K] global expert ids (−1: padding) and weights [T, K], None where T is 0.

        Returns [T, H] like x: the sum over each row's slots, complete (no rank owes another anything), routing weights
        multiplied by `scaling`. Collective: each EP rank makes the same number of kernel calls.
        """
        count = x.shape[0]
        tokens = self.global_tokens() if self.attention.dp > 1 else None
        plan = plan_chunks(agreed(count, attention=self.attention, global_tokens=tokens), self.capacity)
        rows = _rows(x, ids, weights, top_k)
        out = torch.empty_like(rows.x)
        for chunk in range(plan.count):
            part = plan.rows(count, chunk)
            share = Rows(rows.x[part], rows.ids[part], rows.weights[part])
            self.kernel(experts, share, out[part], bound=plan.bound, scaling=scaling, clamp=clamp)
        self.counters.layer(rows=count, chunks=plan.count)
        return out


def _rows(x: torch.Tensor, ids: torch.Tensor | None, weights: torch.Tensor | None, top_k: int) -> Rows:
    if ids is None or weights is None:
        if x.shape[0]:
            raise RuntimeError(f"{x.shape[0]} rows without routing")
        return Rows(
            x, x.new_empty((0, top_k), dtype=torch.int32), x.new_empty((0, top_k), dtype=torch.float32)
        )
    if ids.shape != (x.shape[0], top_k):
        raise RuntimeError(
            f"routing of shape {tuple(ids.shape)} for {x.shape[0]} rows and top-{top_k}: a fused shared expert? "
            "(--disable-shared-experts-fusion)"
        )
    return Rows(x.contiguous(), ids.to(torch.int32).contiguous(), weights.to(torch.float32).contiguous())

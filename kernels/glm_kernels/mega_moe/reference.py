"""The MegaMoE layer in plain PyTorch: dispatch, the rank's experts, combine; on one rank or over a process
group.

It serves the machine without a GPU and judges the kernel on machines with one. Work is one pass per active
expert; no loop runs over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from glm_kernels.mega_moe.experts import Arithmetic, ExpertWeights, expert_rows

MASKED = -1
"""Expert id of a slot that must contribute nothing. UPSTREAM: both pre-dispatch kernels pad with it."""

_REFUSED = -1  # stands in the exchanged counts for "this rank refused its routing"


def mega_moe_reference(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    *,
    arithmetic: Arithmetic = Arithmetic.SM90,
    routed_scaling_factor: float = 1.0,
    activation_clamp: float | None = None,
    group: dist.ProcessGroup | None = None,
    expert_offset: int | None = None,
) -> torch.Tensor:
    """Sum over a token's slots of its experts' outputs, in ascending slot order in fp32, cast to x's dtype.

    x: [T, H], bf16 (any float dtype for EXACT); topk_ids: [T, K] integer global expert ids, -1 masked;
    topk_weights: [T, K]. T may be 0 and may differ between ranks. Returns [T, H] like x; a token whose slots
    are all masked gets zeros, whatever its row or its weights hold.

    With `group`, rank r holds experts [r * E, (r + 1) * E) of `weights` (E each) and every rank must call, in
    the same order: rows travel to the owner and come back, so the result is complete. Without it, ids must
    lie in [0, E), unless `expert_offset` says which global id expert 0 has: then the other ids belong to
    other ranks and contribute nothing here, and the caller adds the ranks' results.

    Raises ValueError for shapes that don't fit or ids out of range; over a group, on every rank if any rank
    refuses. RuntimeError on CUDA with TF32 products, which would not be a reference.
    """
    _check_operands(x, topk_ids, topk_weights, weights)
    weights.check(arithmetic, x.dtype)
    if group is not None and expert_offset is not None:
        raise ValueError(
            "give `group` or `expert_offset`, not both: over a group the ranks' order gives the offsets"
        )
    slots = topk_ids.flatten().long()
    routing = topk_weights.flatten().float() * routed_scaling_factor
    token = torch.arange(x.shape[0], device=x.device).repeat_interleave(topk_ids.shape[1])
    experts = _Experts(weights, arithmetic, activation_clamp)
    if group is None:
        local = _local_ids(slots, weights.num_experts, expert_offset)
        pairs = (local != MASKED).nonzero().flatten()
        out = experts(x[token[pairs]], routing[pairs], local[pairs])
    else:
        pairs, out = _over_group(x, slots, routing, token, experts, group)
    return _combine(out, pairs, x, topk_ids.shape[1])


@dataclass(frozen=True)
class _Experts:
    """This rank's experts applied to (row, routing weight, local expert) triples in any order."""

    weights: ExpertWeights
    arithmetic: Arithmetic
    activation_clamp: float | None

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.arithmetic is Arithmetic.EXACT else torch.bfloat16

    def __call__(self, rows: torch.Tensor, routing: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """rows [P, H], routing [P] fp32, local [P] in [0, E) -> [P, H] in `out_dtype`, same order."""
        out = rows.new_empty((rows.shape[0], self.weights.hidden), dtype=self.out_dtype)
        order = torch.argsort(local, stable=True)
        ends = torch.bincount(local, minlength=self.weights.num_experts).cumsum(0).tolist()
        start = 0
        for expert, end in enumerate(ends):
            if end > start:
                mine = order[start:end]
                out[mine] = expert_rows(
                    rows[mine], routing[mine], self.weights, expert, self.arithmetic, self.activation_clamp
                )
            start = end
        return out


def _combine(out: torch.Tensor, pairs: torch.Tensor, x: torch.Tensor, top_k: int) -> torch.Tensor:
    """out [P, H] belongs to flat slots `pairs` [P] of [T * K]; the sum runs over ascending slots.

    UPSTREAM: combine_one_token (SM90), the combine loop of sm100_fp8_fp4_mega_moe_impl.
    """
    per_slot = out.new_zeros((x.shape[0], top_k, x.shape[1]))
    per_slot.flatten(0, 1)[pairs] = out
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for slot in range(top_k):
        total += per_slot[:, slot]
    return total.to(x.dtype)


def _over_group(
    x: torch.Tensor,
    slots: torch.Tensor,
    routing: torch.Tensor,
    token: torch.Tensor,
    experts: _Experts,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends each slot's row to the rank of its expert and brings the outputs home: three all-to-alls."""
    per_rank, ranks = experts.weights.num_experts, dist.get_world_size(group)
    known = (slots >= MASKED) & (slots < per_rank * ranks)
    refusal = None if bool(known.all()) else _range_error(slots, 0, per_rank * ranks)
    order = torch.argsort(slots, stable=True)  # by owner, expert, token: the order one rank would use
    pairs = order[slots[order] != MASKED]
    send = torch.bincount(slots[pairs].clamp(0, per_rank * ranks - 1) // per_rank, minlength=ranks)
    if refusal is not None:
        send = torch.full_like(send, _REFUSED)
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=group)
    if refusal is not None:
        raise refusal
    sizes_in, sizes_out = send.tolist(), receive.tolist()
    if _REFUSED in sizes_out:
        raise ValueError(
            f"rank {sizes_out.index(_REFUSED)} of the EP group refused its routing: see that rank's error"
        )

    local = (slots[pairs] % per_rank).int()
    columns = (x[token[pairs]], routing[pairs].unsqueeze(-1), local.unsqueeze(-1))
    arrived = _exchange(torch.cat([_bytes(c) for c in columns], dim=1), sizes_in, sizes_out, group)
    widths = [c.shape[1] * c.element_size() for c in columns]
    rows, weight, local = (
        # cloned, not made contiguous: an empty slice would keep its offset, which a wider dtype refuses
        part.clone(memory_format=torch.contiguous_format).view(c.dtype)
        for part, c in zip(torch.split(arrived, widths, dim=1), columns, strict=True)
    )
    done = _bytes(experts(rows, weight.squeeze(-1), local.squeeze(-1).long()))
    back = _exchange(done, sizes_out, sizes_in, group)
    return pairs, back.view(experts.out_dtype)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """[P, N] of any dtype as [P, N * itemsize] uint8: gloo moves bytes for every dtype alike."""
    return t.contiguous().view(torch.uint8)


def _exchange(
    parcels: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Sends the rows of `parcels` [sum(send), B]; returns this rank's [sum(receive), B], by source."""
    arrived = parcels.new_empty((sum(receive), parcels.shape[1]))
    dist.all_to_all_single(arrived, parcels, output_split_sizes=receive, input_split_sizes=send, group=group)
    return arrived


def _local_ids(slots: torch.Tensor, experts: int, offset: int | None) -> torch.Tensor:
    """Global ids as ids of this rank's experts; MASKED where masked or, with an offset, owned elsewhere."""
    if offset is None:
        if bool(((slots < MASKED) | (slots >= experts)).any()):
            raise _range_error(slots, 0, experts)
        return slots
    inside = (slots >= offset) & (slots < offset + experts)
    return torch.where(inside, slots - offset, MASKED)


def _range_error(slots: torch.Tensor, low: int, high: int) -> ValueError:
    return ValueError(
        f"expert ids span [{int(slots.min())}, {int(slots.max())}]; allowed are {MASKED} (masked) "
        f"and [{low}, {high})"
    )


def _check_operands(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, weights: ExpertWeights
) -> None:
    if x.dim() != 2 or x.shape[1] != weights.hidden:
        raise ValueError(f"x is {tuple(x.shape)}; these experts take [T, {weights.hidden}]")
    if topk_ids.dim() != 2 or topk_ids.shape != topk_weights.shape or topk_ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"topk_ids {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)} must both be "
            f"[{x.shape[0]}, K]"
        )
    if x.is_cuda and torch.get_float32_matmul_precision() != "highest":
        raise RuntimeError(
            "the reference needs full fp32 products: torch.set_float32_matmul_precision('highest'), found "
            f"{torch.get_float32_matmul_precision()!r}"
        )

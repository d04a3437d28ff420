"""One launch that writes k = [k_nope | k_pe of the token, for every head].

Bytes: reads T·H·Dn·2 out of kv_b_proj's output, where each head's values follow its keys, and T·Dr·2; writes
T·H·(Dn + Dr)·2. At T 2,048, H 64, 192 + 64: 50 + 67 MB, 25 µs at an H200's 4.8 TB/s. GLM-5.x does it once a layer.

A program owns HEADS heads of one token: 16 KB of output at GLM's width, a head a warp, 16 bytes a thread, eight loads
of each thread under way before its first store.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm_kernels.concat_mha_k.reference import refuse

_ELEMENTS = 8192  # of k a program, at most, but for a head that is wider
_WARPS = 4
_VECTOR = 8  # elements in 16 bytes


# Strides come in units of UNIT elements and unspecialised: one variant a layout, whatever T, none compiled for T = 1.
@triton.jit(do_not_specialize=["nope_token", "nope_head", "pe_token"])  # type: ignore[untyped-decorator]
def _concat(  # type: ignore[no-untyped-def]
    k, k_nope, k_pe, nope_token, nope_head, pe_token,
    H: tl.constexpr, DN: tl.constexpr, DR: tl.constexpr,
    UNIT: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """WIDE is the power of two not below DN + DR."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, WIDE)[None, :]
    inside = (head < H) & (column < DN + DR)
    from_nope = inside & (column < DN)
    from_pe = inside & (column >= DN)
    at = token * (nope_token * UNIT) + head.to(tl.int64) * (nope_head * UNIT) + column
    nope = tl.load(k_nope + at, mask=from_nope, other=0.0)
    pe = tl.load(k_pe + token * (pe_token * UNIT) + (column - DN) + head * 0, mask=from_pe, other=0.0)
    tl.store(
        k + token * (H * (DN + DR)) + head * (DN + DR) + column, tl.where(column < DN, nope, pe), mask=inside
    )


def concat_mha_k(k_nope: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """k_nope [T, H, Dn], k_pe [T, 1, Dr], both bf16 on CUDA, any strides but 1 within a head; T may be 0, Dn and Dr are
    multiples of 8. Returns a contiguous [T, H, Dn + Dr], bit for bit `concat_mha_k_reference`'s.

    On the current stream, without host synchronisation; allocates the result and nothing else, so it can be captured
    once it has run with this layout (Triton compiles then). Accesses are of 16 bytes where token and head strides are
    multiples of 8 and addresses of 16 bytes, as SGLang's are. Raises ValueError for anything else.
    """
    if reason := refuse(k_nope, k_pe):
        raise ValueError(f"concat_mha_k: {reason}")
    tokens, heads, nope = k_nope.shape
    width = nope + k_pe.shape[2]
    k = k_nope.new_empty(tokens, heads, width)
    if k.numel():
        strides = (k_nope.stride(0), k_nope.stride(1), k_pe.stride(0))
        unit = 1 if any(stride % _VECTOR for stride in strides) else _VECTOR
        wide = triton.next_power_of_2(width)
        block = min(max(1, _ELEMENTS // wide), triton.next_power_of_2(heads))
        _concat[(tokens, triton.cdiv(heads, block))](
            k, k_nope, k_pe, *(stride // unit for stride in strides),
            H=heads, DN=nope, DR=width - nope, UNIT=unit, HEADS=block, WIDE=wide, num_warps=_WARPS,
        )  # fmt: skip
    return k

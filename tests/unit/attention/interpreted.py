"""Run by test_concat_mha_k with TRITON_INTERPRET=1: the kernel itself, on a CPU, against the reference."""

from __future__ import annotations

import itertools

import torch
from glm_kernels.concat_mha_k import concat_mha_k, concat_mha_k_reference

# heads, nope, rope: powers of two, GLM's widths, more heads than a program owns, widths of a sum that is no power of two
SIZES = ((1, 8, 8), (3, 24, 16), (4, 192, 64), (40, 192, 64), (5, 200, 72))


def parts(tokens: int, heads: int, nope: int, rope: int, gap: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As in forward_normal_prepare: k_nope of kv_b_proj's output, k_pe of the latent cache, `gap` elements besides."""
    kv = torch.randint(-32768, 32767, (tokens, heads, nope + gap), dtype=torch.int16).view(torch.bfloat16)
    latent = torch.randint(-32768, 32767, (tokens, 1, gap + rope), dtype=torch.int16).view(torch.bfloat16)
    return kv[..., :nope], latent[..., gap:]


def main() -> None:
    torch.manual_seed(0)
    checked = 0
    for sizes, tokens, gap in itertools.product(SIZES, (0, 1, 63, 64), (0, 8, 5)):  # 5: not of 16 bytes
        k_nope, k_pe = parts(tokens, *sizes, gap)
        got, want = concat_mha_k(k_nope, k_pe), concat_mha_k_reference(k_nope, k_pe)
        assert got.shape == (tokens, sizes[0], sizes[1] + sizes[2])
        assert got.is_contiguous()
        assert torch.equal(got.view(torch.int16), want.view(torch.int16)), (sizes, tokens, gap)
        checked += 1
    k_nope, k_pe = parts(2048, 2, 24, 8, 8)
    assert torch.equal(
        concat_mha_k(k_nope, k_pe).view(torch.int16), concat_mha_k_reference(k_nope, k_pe).view(torch.int16)
    )
    # Heads outermost, and one row of k_pe for all tokens.
    k_nope, k_pe = torch.randn(6, 7, 16).bfloat16().transpose(0, 1), torch.randn(1, 1, 8).bfloat16()
    k_pe = k_pe.expand(7, 1, 8)
    assert torch.equal(concat_mha_k(k_nope, k_pe), concat_mha_k_reference(k_nope, k_pe))
    hook_equals_upstream()
    print(checked + 2, "and the hook")


def hook_equals_upstream() -> None:
    """SGLang's own method takes its last branch without a GPU, whatever the widths."""
    from types import SimpleNamespace

    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha import (
        DeepseekMHAForwardMixin,
    )

    from glm_sglang.attention import keys

    original = DeepseekMHAForwardMixin._concat_and_cast_mha_k

    def refused(*args: object) -> None:
        raise AssertionError("the original was called")

    for tokens, (heads, nope, rope) in itertools.product((0, 1, 65), SIZES[1:]):
        of = SimpleNamespace(
            num_local_heads=heads,
            qk_nope_head_dim=nope,
            qk_rope_head_dim=rope,
            qk_head_dim=nope + rope,
        )
        k_nope, k_pe = parts(tokens, heads, nope, rope, 8)
        k_nope, k_pe = (part.nan_to_num() for part in (k_nope, k_pe))  # copies may change a NaN's bits
        want = original(of, k_nope, k_pe, None)
        got = keys.concat_mha_k(refused, of, k_nope, k_pe, None)
        assert got.stride() == want.stride()
        assert got.dtype == want.dtype
        assert torch.equal(got.view(torch.int16), want.view(torch.int16)), (tokens, heads, nope, rope)


if __name__ == "__main__":
    main()

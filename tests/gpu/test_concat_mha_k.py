"""Keys of dense attention on a GPU: the kernel equals the reference bit for bit, also replayed from a graph."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from glm_kernels.concat_mha_k import concat_mha_k, concat_mha_k_reference

from glm_sglang.attention import keys

pytestmark = pytest.mark.gpu
HEADS, NOPE, ROPE, VALUES, LATENT = 64, 192, 64, 256, 512


@pytest.fixture(autouse=True)
def waits_are_errors() -> Iterator[None]:
    """Tests switch it on around what must not wait for the device."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def projections(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """kv_b_proj's output [T, H, 192 + 256] and the latent cache's rows [T, 1, 512 + 64]; every bit pattern occurs."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = (tokens, HEADS, NOPE + VALUES), (tokens, 1, LATENT + ROPE)
    kv, latent = (
        torch.randint(-32768, 32768, shape, device="cuda", dtype=torch.int16, generator=generator).view(
            torch.bfloat16
        )
        for shape in shapes
    )
    return kv, latent


@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 2048, 16384])
def test_views_into_projections(tokens: int) -> None:
    kv, latent = projections(tokens, 1)
    k_nope, k_pe = kv[..., :NOPE], latent[..., LATENT:]
    concat_mha_k(*(part[:0] for part in (k_nope, k_pe)))
    got = concat_mha_k(k_nope, k_pe)
    assert got.shape == (tokens, HEADS, NOPE + ROPE)
    assert got.is_contiguous()
    assert torch.equal(bits(got), bits(concat_mha_k_reference(k_nope, k_pe)))


@pytest.mark.parametrize(
    ("heads", "nope", "rope", "gap"), [(8, 192, 64, 0), (40, 192, 64, 8), (5, 200, 72, 8), (64, 192, 64, 5)]
)
def test_other_sizes_and_strides(heads: int, nope: int, rope: int, gap: int) -> None:
    kv = torch.randn(130, heads, nope + gap, device="cuda").bfloat16()
    latent = torch.randn(130, 1, gap + rope, device="cuda").bfloat16()
    k_nope, k_pe = kv[..., :nope], latent[..., gap:]
    want = concat_mha_k_reference(k_nope, k_pe)
    assert torch.equal(bits(concat_mha_k(k_nope, k_pe)), bits(want))


@pytest.mark.parametrize("tokens", [1, 2048])
def test_in_a_graph_it_waits_for_nothing_and_reads_what_is_there_at_replay(tokens: int) -> None:
    """Through the hook, as SGLang captures it: after a run on the same layout."""
    of = SimpleNamespace(num_local_heads=HEADS, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE)
    kv, latent = projections(tokens, 2)

    def refused(*args: object) -> None:
        raise AssertionError("SGLang's copies were called")

    def step() -> torch.Tensor:
        made: torch.Tensor = keys.concat_mha_k(refused, of, kv[..., :NOPE], latent[..., LATENT:], None)
        return made

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step()
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()
    for seed in (3, 4):
        for mine, new in zip((kv, latent), projections(tokens, seed), strict=True):
            mine.copy_(new)
        held.zero_()
        graph.replay()
        torch.cuda.synchronize()
        want = concat_mha_k_reference(kv[..., :NOPE], latent[..., LATENT:])
        assert torch.equal(bits(held), bits(want))


def test_one_variant_serves_every_number_of_tokens() -> None:
    """None is compiled while a server serves, as one for a single token would be."""
    from glm_kernels.concat_mha_k.kernel import _concat

    def variants() -> int:
        return len(_concat.device_caches[torch.cuda.current_device()][0])

    seen = []
    for tokens in (2048, 1, 2, 16, 100):
        kv, latent = projections(tokens, 5)
        concat_mha_k(kv[..., :NOPE], latent[..., LATENT:])
        seen.append(variants())
    assert len(set(seen)) == 1

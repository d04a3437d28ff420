"""SGLang's own breaks own nothing where all that they read is known, and only there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm_sglang.prefill_graph import lifetime, options, stock
from glm_sglang.prefill_graph.eligibility import Facts
from glm_sglang.prefill_graph.options import Options

FP8 = Facts(backend="DeepseekSparseAttnBackend", impl="flashmla_kv", ragged=True)


class Backend:
    """An attention backend."""


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, ""),
        ({"impl": "trtllm"}, ""),
        ({"dp_size": 8}, ""),
        ({"draft": True}, ""),
        ({"topk": "torch", "fused": False, "fusion": False}, ""),
        ({"backend": "HybridAttnBackend"}, "HybridAttnBackend"),
        ({"cp_size": 2}, "context parallelism"),
        ({"dcp_size": 2}, "decode context parallelism"),
        ({"kpool": 4}, "pools 4 keys"),
        ({"sharded_kv": True}, "sharded"),
        ({"unified": True}, "--enable-unified-memory"),
        ({"hisparse": True}, "HiSparse"),
    ],
)
def test_what_is_known(changes: dict[str, Any], word: str) -> None:
    found = stock.why_keeping(replace(FP8, **changes))
    assert word in found
    assert bool(found) is bool(word)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`scene(…)`: a batch, in a bucket's capture on a known backend, unless something else is said."""
    from sglang.srt.distributed.device_communicators import pynccl_allocator
    from sglang.srt.model_executor import forward_context
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import context
    from sglang.srt.model_executor.runner_utils import forward_batch, prefill_graph

    def make(
        mode: Any = "auto",
        captured: bool = True,
        scope: bool = True,
        step: str = "EXTEND",
        shared: Any = None,
        facts: Facts | None = FP8,
        symmetric: bool = False,
    ) -> Any:
        backend = Backend()
        if facts is not None:
            stock.note(backend, facts)
        monkeypatch.setattr(options, "current", lambda: Options(mode=mode))
        monkeypatch.setattr(forward_context, "get_attn_backend", lambda: backend)
        monkeypatch.setattr(context, "is_in_breakable_cuda_graph", lambda: captured)
        monkeypatch.setattr(prefill_graph, "is_in_prefill_graph_scope", lambda: scope)
        monkeypatch.setattr(pynccl_allocator, "is_symmetric_memory_enabled", lambda: symmetric)
        batch = SimpleNamespace(forward_mode=ForwardMode[step], attn_cp_metadata=shared, mha_return_lse=False)
        monkeypatch.setattr(forward_batch, "get_forward_batch", lambda: batch)
        return batch

    return make


@pytest.mark.parametrize(
    ("changes", "exempt"),
    [
        ({}, True),
        ({"mode": "off"}, False),
        ({"captured": False}, False),
        ({"scope": False}, False),
        ({"step": "TARGET_VERIFY"}, False),
        ({"shared": object()}, False),
        ({"facts": None}, False),  # its runner has an arena, or another owner
        ({"facts": replace(FP8, hisparse=True)}, False),
        ({"symmetric": True}, False),
    ],
)
def test_only_known_breaks_of_a_capture_are_exempt(scene: Any, changes: dict[str, Any], exempt: bool) -> None:
    with stock.a_break(scene(**changes)):
        assert lifetime.kept().exempt is exempt
    assert not lifetime.kept().exempt


@pytest.mark.parametrize(
    ("inputs", "exempt"),
    [
        ({"topk_indices": 1, "q_rope": 1, "k_rope": 1}, True),
        ({"topk_indices": 1, "q_rope": 1, "k_rope": 1, "cos_sin_cache": 1, "is_neox": False}, True),
        ({"topk_indices": 1, "attn_sink": None}, True),
        ({"topk_indices": 1, "attn_sink": 1}, False),
        ({"topk_indices": 1, "llama_4_scaling": 1}, False),
        ({"q_rope": 1}, False),  # dense attention
    ],
)
def test_only_known_inputs_of_attention_are_exempt(scene: Any, inputs: dict[str, Any], exempt: bool) -> None:
    with stock.attention_break(scene(), inputs):
        assert lifetime.kept().exempt is exempt


@pytest.mark.parametrize("scaling", [None, torch.ones(2)])
def test_the_absorbed_product_runs_as_it_did_and_is_known_without_a_scaling(scene: Any, scaling: Any) -> None:
    """Through SGLang's registry, on SGLang's own break, which outside a capture runs at once."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla import (
        DeepseekMLAForwardMixin,
    )
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    scene()
    exempt: list[bool] = []
    attended: list[Any] = []

    def run_eager(q: Any, *args: Any, **kwargs: Any) -> None:
        exempt.append(lifetime.kept().exempt)
        attended.append((q.clone(), kwargs["topk_indices"]))

    attention = type(
        "Attention",
        (),
        {
            "_eager_bmm_attention": _wrap_fn(
                DeepseekMLAForwardMixin._eager_bmm_attention, stock.bmm_attention, HookType.AROUND
            ),
            "attn_mqa": SimpleNamespace(_eager_attention=SimpleNamespace(run_eager=run_eager)),
        },
    )()
    q, w, out = torch.randn(2, 3, 4), torch.randn(2, 4, 5), torch.empty(2, 3, 5)
    attention._eager_bmm_attention(
        q, w, out, out, None, None, True, None, None, llama_4_scaling=scaling, topk_indices="slots"
    )
    assert exempt == [scaling is None]
    torch.testing.assert_close(attended[0][0], torch.einsum("hrd,hdk->hrk", q, w))
    assert attended[0][1] == "slots"

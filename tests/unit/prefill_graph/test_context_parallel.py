"""A shared layer's KV gather under interleaved CP: outside the segment, with the step's sizes, never the capture's."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm_sglang.prefill_graph import context_parallel, lifetime, options, whole
from glm_sglang.prefill_graph.options import Options
from tests.unit.prefill_graph import fake_graph

RANKS, WIDTH = 2, 3


class Strategy:
    """The collective: this rank's rows and its peers', in the order of the sequence (rank r has tokens r, r + 2, …)."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.asked: list[int] = []

    def gather_kv_cache(self, local: torch.Tensor, batch: Any) -> torch.Tensor:
        self.asked.append(local.shape[0])
        full = torch.full((self.tokens, WIDTH), -1.0)
        full[0::RANKS] = local
        return full


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`step(tokens)`: a step of so many tokens is at hand on rank 0 of 2."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.cp import base
    from sglang.srt.model_executor.runner_backend_utils import tc_piecewise_cuda_graph

    def begin(tokens: int) -> Strategy:
        strategy = Strategy(tokens)
        mine = -(-tokens // RANKS)
        metadata = SimpleNamespace(per_rank_logical_token=[mine, tokens - mine])
        batch = SimpleNamespace(extend_seq_lens_cpu=[tokens], attn_cp_metadata=metadata)
        context = SimpleNamespace(forward_batch=batch)
        monkeypatch.setattr(tc_piecewise_cuda_graph, "get_tc_piecewise_forward_context", lambda: context)
        monkeypatch.setattr(base, "get_cp_strategy", lambda: strategy)
        monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(attn_cp_rank=0))
        return strategy

    return begin


@pytest.mark.parametrize("tokens", [1, 5, 7, 8])
def test_only_the_steps_rows_take_part_and_the_rest_is_zero(step: Any, tokens: int) -> None:
    strategy = step(tokens)
    local = torch.arange(4 * WIDTH, dtype=torch.float32).view(4, WIDTH) + 1
    full = torch.full((8, WIDTH), 99.0)
    context_parallel.gather(local, full)
    mine = -(-tokens // RANKS)
    assert strategy.asked == [mine]
    assert torch.equal(full[0:tokens:RANKS], local[:mine])
    assert (full[1:tokens:RANKS] == -1).all()
    assert (full[tokens:] == 0).all()


def test_a_collective_that_brings_other_rows_is_an_error(step: Any) -> None:
    step(6).tokens = 5
    with pytest.raises(ValueError, match="brought 5 rows, the step has 6 of 8"):
        context_parallel.gather(torch.zeros(4, WIDTH), torch.zeros(8, WIDTH))


def overlap(**changes: Any) -> Any:
    fields = {
        "attention": SimpleNamespace(kv_lora_rank=2),
        "forward_batch": SimpleNamespace(extend_num_tokens=8),
        "_deferred": None,
        "_kv": None,
    }
    return SimpleNamespace(**(fields | changes))


def original(*args: Any, **kwargs: Any) -> str:
    return "upstream's"


@pytest.mark.parametrize(
    ("mode", "in_graph", "changes", "ours"),
    [
        ("auto", True, {}, True),
        ("off", True, {}, False),
        ("auto", False, {}, False),
        ("auto", True, {"_deferred": {}}, False),  # it selects: SGLang gathers at its break
        ("auto", True, {"_kv": object()}, False),
    ],
)
def test_only_shared_layers_in_a_graph_are_changed(
    monkeypatch: pytest.MonkeyPatch, mode: Any, in_graph: bool, changes: dict[str, Any], ours: bool
) -> None:
    from sglang.srt.layers.cp import interleave
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import context

    monkeypatch.setattr(options, "current", lambda: Options(mode=mode))
    monkeypatch.setattr(context, "is_in_breakable_cuda_graph", lambda: in_graph)
    monkeypatch.setattr(interleave, "is_interleave_extend", lambda batch: True)
    gathered: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        context_parallel,
        "_gather_break",
        lambda: lambda local, full: gathered.append((*local.shape, *full.shape)),
    )
    rows = torch.zeros(4, 1, 2), torch.zeros(4, 1, 1)
    found = context_parallel.prepare_qkv(
        original, overlap(**changes), "q", "rope", *rows, "topk", defer_materialization=False
    )
    if ours:
        assert gathered == [(4, 3, 8, 3)]
        q, rope, latent, k_rope, topk = found
        assert (q, rope, topk) == ("q", "rope", "topk")
        assert (latent.shape, k_rope.shape) == ((8, 1, 2), (8, 1, 1))
    else:
        assert found == "upstream's"


KNOWN = {"q_rope": 1, "k_rope": 1, "topk_indices": 1}


@pytest.mark.parametrize(
    ("changes", "owns"),
    [
        ({}, False),
        ({"inputs": KNOWN | {"cos_sin_cache": None}}, False),
        ({"inputs": KNOWN | {"cos_sin_cache": 1}}, True),  # a tensor that nobody has looked at
        ({"inputs": {}}, True),  # attention that selects nothing
        ({"lse": True}, True),
        ({"interleave": False}, True),
        ({"in_graph": False}, True),
        ({"symmetric": True}, True),  # its pool is not the graphs' alone
    ],
)
def test_attentions_break_owns_its_inputs_unless_all_of_them_are_known(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], owns: bool
) -> None:
    from sglang.srt.distributed.device_communicators import pynccl_allocator
    from sglang.srt.layers.cp import interleave
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import context

    case = {"inputs": KNOWN, "lse": False, "interleave": True, "in_graph": True, "symmetric": False} | changes
    monkeypatch.setattr(options, "current", lambda: Options(mode="auto"))
    monkeypatch.setattr(context, "is_in_breakable_cuda_graph", lambda: case["in_graph"])
    monkeypatch.setattr(interleave, "is_interleave_extend", lambda batch: case["interleave"])
    monkeypatch.setattr(pynccl_allocator, "is_symmetric_memory_enabled", lambda: case["symmetric"])
    layer, argument = SimpleNamespace(), object()

    def forward(*args: Any, **kwargs: Any) -> Any:
        return lifetime.keep(lambda _: "weak", argument)

    monkeypatch.setattr(whole, "_active", lambda batch: None)
    batch = SimpleNamespace(mha_return_lse=case["lse"])
    kept = whole.attention_forward(forward, layer, "q", "k", "v", batch, **case["inputs"])
    assert kept is argument if owns else kept == "weak"


@pytest.mark.parametrize("symmetric", [False, True])
def test_indexers_break_owns_nothing_but_where_memory_is_symmetric(
    monkeypatch: pytest.MonkeyPatch, symmetric: bool
) -> None:
    from sglang.srt.distributed.device_communicators import pynccl_allocator

    monkeypatch.setattr(options, "current", lambda: Options(mode="auto"))
    monkeypatch.setattr(pynccl_allocator, "is_symmetric_memory_enabled", lambda: symmetric)
    kept = context_parallel.indexer_with_kv(lambda given: lifetime.keep(lambda _: "weak", given), 7)
    assert kept == (7 if symmetric else "weak")


def test_the_gather_is_a_break_and_runs_at_every_replay(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = fake_graph.install(monkeypatch)
    context_parallel._gather_break.cache_clear()
    with contextlib.ExitStack() as stack:
        stack.callback(context_parallel._gather_break.cache_clear)
        full = torch.full((8, WIDTH), 99.0)
        with fake_graph.captured(module) as graph:
            context_parallel._gather_break()(torch.ones(4, WIDTH), full)
        assert (full == 0).all(), "a capture takes part in no collective"
        for tokens in (8, 3):
            strategy = step(tokens)
            graph.replay()
            assert strategy.asked == [-(-tokens // RANKS)]
            assert (full[tokens:] == 0).all()


@pytest.mark.parametrize(
    ("mode", "upstream", "architecture", "cp", "dp", "expected"),
    [
        ("strict", False, "GlmMoeDsaForCausalLM", 8, 1, True),
        ("auto", False, "GlmMoeDsaForCausalLM", 8, 1, False),  # never measured on several GPUs
        ("off", False, "GlmMoeDsaForCausalLM", 8, 1, False),
        ("strict", False, "GlmMoeDsaForCausalLM", 1, 1, False),
        ("strict", False, "GlmMoeDsaForCausalLM", 8, 2, False),
        ("strict", False, "OtherForCausalLM", 8, 1, False),
        ("off", True, "OtherForCausalLM", 8, 1, True),
    ],
)
def test_glm_is_captured_under_cp_where_graphs_are_required(
    monkeypatch: pytest.MonkeyPatch,
    mode: Any,
    upstream: bool,
    architecture: str,
    cp: int,
    dp: int,
    expected: bool,
) -> None:
    from sglang.srt.arg_groups import overrides

    monkeypatch.setattr(options, "current", lambda: Options(mode=mode))
    view = SimpleNamespace(dp_size=dp, speculative_algorithm=None)
    monkeypatch.setattr(overrides, "resolving_view", lambda arguments: view)
    monkeypatch.setattr(overrides, "resolved_view", lambda arguments: SimpleNamespace(attn_cp_size=cp))
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    monkeypatch.setattr(overrides, "model_config_of", lambda arguments: config)
    assert context_parallel.supports(lambda arguments: upstream, object()) is expected
    view.speculative_algorithm = "NEXTN"
    assert context_parallel.supports(lambda arguments: upstream, object()) is upstream


@pytest.mark.parametrize(("capture", "slots"), [(False, 5), (True, 8)])
def test_a_padded_steps_slots_end_with_its_tokens(
    monkeypatch: pytest.MonkeyPatch, capture: bool, slots: int
) -> None:
    """The store of index keys takes as many keys as slots (SGLang's kernel: "expected 1024 but got 1152")."""
    monkeypatch.setattr(options, "current", lambda: Options(mode="strict"))
    static = torch.arange(8)
    # With MegaMoE or expert parallelism SGLang pads a step to its bucket and says so in extend_num_tokens.
    batch = SimpleNamespace(out_cache_loc=static, extend_num_tokens=8, extend_seq_lens_cpu=[2, 3])
    context_parallel.prepare(None, object(), object(), batch, static_num_tokens=8, capture=capture)
    assert batch.out_cache_loc.tolist() == list(range(slots))
    assert batch.out_cache_loc.data_ptr() == static.data_ptr()  # segments hold the address


def test_without_our_graphs_the_slots_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "current", lambda: Options(mode="off"))
    batch = SimpleNamespace(out_cache_loc=torch.arange(8), extend_seq_lens_cpu=[5])
    context_parallel.prepare(None, object(), object(), batch, static_num_tokens=8, capture=False)
    assert batch.out_cache_loc.numel() == 8

"""The planned buckets go into SGLang's configuration, before and after it chooses a chunk; strict refuses no graphs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from glm_sglang.errors import UsageError
from glm_sglang.prefill_graph import buckets, footprint, options, resolution
from glm_sglang.prefill_graph.options import Options

H200_MIB = 143_771.0
GLM = SimpleNamespace(
    hidden_size=6144,
    num_attention_heads=64,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    kv_lora_rank=512,
    v_head_dim=256,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    q_lora_rank=2048,
    index_topk=2048,
    num_hidden_layers=78,
    num_nextn_predict_layers=1,
    indexer_rope_interleave=True,
    architectures=["GlmMoeDsaForCausalLM"],
)


class Arguments:
    """SGLang's ServerArgs while they are resolved: fields, and the graph flags that the user gave."""

    def __init__(self, locked: set[tuple[str, str]] | None = None, **fields: Any) -> None:
        from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig

        config = CudaGraphConfig()
        config.prefill = replace(config.prefill, backend="breakable")
        self._cuda_graph_config_locked = locked or set()
        self.view = SimpleNamespace(
            **{
                "cuda_graph_config": config,
                "chunked_prefill_size": 16384,
                "max_prefill_tokens": 16384,
                "max_total_tokens": None,
                "enable_prefill_cp": False,
                "attn_cp_size": 1,
                "tp_size": 1,
                "ep_size": 1,
                "attn_dp_size": 1,
                "moe_a2a_backend": "none",
                "enable_symm_mem": False,
                "dsa_prefill_backend": None,
                "dsa_decode_backend": None,
                "device": "cuda",
                "kv_cache_dtype": "auto",
                "attention_backend": None,
                "prefill_attention_backend": None,
                "decode_attention_backend": None,
                "dsa_topk_backend": "sgl-kernel",
                "dcp_size": 1,
                "dp_size": 1,
                "pp_size": 1,
                "enable_kv_cache_sharding": False,
                "enable_dsa_cache_layer_split": False,
                "enable_unified_memory": False,
                "enable_hisparse": False,
                "speculative_algorithm": None,
                **fields,
            }
        )

    @property
    def resolved(self) -> Any:
        """With what SGLang derives: the CP size."""
        return SimpleNamespace(**(vars(self.view) | {"attn_cp_size": resolution.cp_size(self.view)}))

    @property
    def prefill(self) -> Any:
        return self.view.cuda_graph_config.prefill


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`chosen(mode="auto")` sets the options, on arguments that need no model."""
    from sglang.srt.arg_groups import overrides
    from sglang.srt.utils import common

    arguments_memory: list[float | None] = [H200_MIB]

    def declare(arguments: Arguments, source: str, **values: Any) -> None:
        for name, value in values.items():
            setattr(arguments.view, name, value)

    monkeypatch.setattr(overrides, "declare_resolution", declare)
    monkeypatch.setattr(overrides, "resolving_view", lambda arguments: arguments.view)
    monkeypatch.setattr(overrides, "resolved_view", lambda arguments: arguments.resolved)
    monkeypatch.setattr(overrides, "model_config_of", lambda arguments: SimpleNamespace(hf_config=GLM))
    monkeypatch.setattr(common, "get_device_memory_capacity", lambda device: arguments_memory[0])

    def choose(memory: float | None = H200_MIB, capability: int | None = 9, **values: Any) -> None:
        arguments_memory[0] = memory
        monkeypatch.setattr(resolution, "_capability", lambda: capability)
        monkeypatch.setattr(options, "current", lambda: Options(**values))

    return choose


def nothing(arguments: Any) -> None:
    return


def resolve(arguments: Arguments, **later: Any) -> None:
    """Both steps, as SGLang runs them; in between it chooses `later`."""
    resolution.set_buckets(arguments, nothing)
    vars(arguments.view).update(later)
    resolution.settle(arguments, nothing)


def test_buckets_reach_the_chunk(chosen: Any) -> None:
    chosen(mode="auto")
    arguments = Arguments()
    resolution.set_buckets(arguments, nothing)
    assert arguments.prefill.bs == list(buckets.plan(16384, dense=2048).buckets)
    assert arguments.prefill.max_bs == 16384


def test_under_context_parallelism_every_rank_gets_whole_tiles(chosen: Any) -> None:
    chosen(memory=None, mode="auto")
    arguments = Arguments(enable_prefill_cp=True, tp_size=8)
    resolution.set_buckets(arguments, nothing)
    assert arguments.prefill.max_bs == 16384
    assert all(bucket % 512 == 0 for bucket in arguments.prefill.bs if bucket > 256)


def test_memory_is_sized_for_them_and_a_chunk_that_sglang_chooses_counts(chosen: Any) -> None:
    chosen(mode="auto")
    seen: list[Any] = []

    def memory_settings(arguments: Any) -> None:
        seen.append(arguments.prefill.bs)
        arguments.view.chunked_prefill_size = 8192

    known, unknown = Arguments(chunked_prefill_size=4096), Arguments(chunked_prefill_size=None)
    resolution.set_buckets(known, memory_settings)
    resolution.set_buckets(unknown, memory_settings)
    assert max(seen[0]) == 4096, "SGLang sizes memory with the buckets in place"
    assert seen[1] is None
    assert unknown.prefill.max_bs == 8192


def test_our_flag_wins_and_sglangs_own_is_left_alone(chosen: Any) -> None:
    chosen(mode="auto", buckets=(100, 200))
    locked = Arguments(locked={("prefill", "bs")})
    resolution.set_buckets(locked, nothing)
    assert locked.prefill.bs == [100, 200]
    chosen(mode="auto")
    theirs = Arguments(locked={("prefill", "max_bs")})
    resolution.set_buckets(theirs, nothing)
    assert theirs.prefill.bs is None


def test_off_changes_nothing(chosen: Any) -> None:
    chosen(mode="off", buckets=(100,))
    arguments = Arguments()
    resolution.set_buckets(arguments, nothing)
    assert arguments.prefill.bs is None


def test_strict_refuses_to_start_without_graphs(chosen: Any) -> None:
    arguments = Arguments()
    arguments.prefill.backend = "disabled"
    chosen(mode="auto")
    resolution.settle(arguments, nothing)
    chosen(mode="strict")
    with pytest.raises(UsageError, match=r"--glm-prefill-graph is strict.*--cuda-graph-backend-prefill"):
        resolution.settle(arguments, nothing)
    arguments.prefill.backend = "breakable"
    resolution.settle(arguments, nothing)


def test_under_context_parallelism_auto_says_that_steps_run_eagerly(
    chosen: Any, caplog: pytest.LogCaptureFixture
) -> None:
    chosen(mode="auto")
    arguments = Arguments(enable_prefill_cp=True, tp_size=8)
    arguments.prefill.backend = "disabled"
    resolution.settle(arguments, nothing)
    assert "--glm-prefill-graph strict captures them" in caplog.text


def test_what_would_take_too_much_memory_runs_eagerly_and_is_said(
    chosen: Any, caplog: pytest.LogCaptureFixture
) -> None:
    chosen(memory=24_000.0, mode="auto")
    arguments = Arguments()
    resolve(arguments)
    assert 0 < arguments.prefill.max_bs < 16384
    assert f"more than {arguments.prefill.max_bs} tokens run eagerly" in caplog.text
    chosen(memory=None, mode="auto")
    resolve(arguments)
    assert arguments.prefill.max_bs == 16384


def test_the_footprint_of_true_widths_is_what_was_measured() -> None:
    # SGLang's graphs of 512 to 8,192 rows held 3.5 GiB on one H200 (five buckets, eight layers).
    sizes = footprint.Sizes.of(GLM, attention_tp=1, moe_tp=1)
    held = footprint.memory(sizes, 0).of([512, 1024, 2048, 4096, 8192])
    assert held == pytest.approx(3.5 * 2**30, rel=0.15)


@pytest.mark.parametrize(("layers", "rows", "measured_gib"), [(8, (576, 2048), 3.39), (5, (256, 2048), 1.93)])
def test_what_breaks_that_own_their_inputs_keep_is_what_was_measured(
    layers: int, rows: tuple[int, ...], measured_gib: float
) -> None:
    """Two H200, CP2, every break owning its inputs: "break inputs hold … GiB". Counted too high rather than too low."""
    sizes = footprint.Sizes.of(GLM, attention_tp=1, moe_tp=1)
    kept = footprint.memory(sizes, 0, keeping=layers, cp_size=2).row_kept * sum(rows) / 2**30
    assert measured_gib <= kept <= 1.1 * measured_gib


@pytest.mark.parametrize("moe", ["none", "megamoe"])
def test_under_context_parallelism_buckets_reach_the_chunk(
    chosen: Any, caplog: pytest.LogCaptureFixture, moe: str
) -> None:
    chosen(memory=H200_MIB, mode="strict")
    arguments = Arguments(
        enable_prefill_cp=True, tp_size=8, ep_size=8, chunked_prefill_size=32768, moe_a2a_backend=moe
    )
    arguments.view.max_prefill_tokens = 32768
    resolve(arguments)
    assert arguments.prefill.bs == list(buckets.plan(32768, cp_size=8).buckets)
    assert buckets.local_rows(arguments.prefill.max_bs, 8) == 4096
    assert "run eagerly" not in caplog.text


@pytest.mark.parametrize(
    "unknown",
    [{"moe_a2a_backend": "deepep"}, {"enable_symm_mem": True}, {"dsa_prefill_backend": "trtllm"}],
)
def test_where_breaks_may_own_their_inputs_the_plan_counts_what_every_layer_keeps(
    chosen: Any, caplog: pytest.LogCaptureFixture, unknown: dict[str, Any]
) -> None:
    chosen(memory=H200_MIB, mode="strict")
    arguments = Arguments(enable_prefill_cp=True, tp_size=8, ep_size=8, **unknown)
    resolve(arguments)
    sizes = footprint.Sizes.of(GLM, attention_tp=1, moe_tp=1)
    rows = sum(buckets.local_rows(bucket, 8) for bucket in arguments.prefill.bs)
    assert 0 < rows * 78 * footprint.kept_row_bytes(sizes, 8) < H200_MIB * 2**20 / 8
    assert "run eagerly" in caplog.text


# TP8 without context parallelism, on H200s. `later`: what SGLang resolves behind its memory settings.
FP8 = {"kv_cache_dtype": "fp8_e4m3"}
KNOWN: tuple[tuple[dict[str, Any], dict[str, Any], int | None], ...] = (
    ({}, {}, 9),
    (FP8, {"dsa_prefill_backend": "flashmla_kv", "dsa_decode_backend": "flashmla_kv"}, 9),
    ({}, {**FP8, "dsa_prefill_backend": "trtllm", "dsa_decode_backend": "trtllm"}, 10),
    ({}, {}, None),
    ({"dsa_prefill_backend": "fa3"}, {}, 9),
    ({"attn_dp_size": 8}, {}, 9),
    ({"moe_a2a_backend": "megamoe"}, {}, 9),
    ({"enable_symm_mem": True}, {}, 9),  # attention is captured, and its one break is given nothing
    ({"speculative_algorithm": "EAGLE"}, {}, 9),
)
OWNING: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    ({"attention_backend": "triton"}, {}, "attention backend is triton"),
    ({"decode_attention_backend": "trtllm_mla"}, {}, "attention backend is trtllm_mla"),
    ({"moe_a2a_backend": "deepep"}, {}, "--moe-a2a-backend deepep"),
    ({**FP8, "enable_symm_mem": True}, {}, "--enable-symm-mem"),
    ({"enable_symm_mem": True}, FP8, "--enable-symm-mem"),
    ({"enable_hisparse": True}, {}, "HiSparse"),
    ({"enable_unified_memory": True}, {}, "--enable-unified-memory"),
    ({"enable_kv_cache_sharding": True}, {}, "sharded"),
    ({"dcp_size": 2}, {}, "decode context parallelism"),
)


def tensor_parallel(given: dict[str, Any]) -> Arguments:
    return Arguments(**({"tp_size": 8, "ep_size": 8} | given))


@pytest.mark.parametrize(("given", "later", "capability"), KNOWN)
def test_where_breaks_own_nothing_buckets_reach_the_chunk(
    chosen: Any,
    caplog: pytest.LogCaptureFixture,
    given: dict[str, Any],
    later: dict[str, Any],
    capability: int | None,
) -> None:
    chosen(capability=capability, mode="auto")
    arguments = tensor_parallel(given)
    resolve(arguments, **later)
    assert arguments.prefill.bs == list(buckets.plan(16384, dense=2048).buckets)
    assert "run eagerly" not in caplog.text


@pytest.mark.parametrize(("given", "later", "word"), OWNING)
def test_where_breaks_may_own_the_plan_counts_what_every_layer_keeps(
    chosen: Any,
    caplog: pytest.LogCaptureFixture,
    given: dict[str, Any],
    later: dict[str, Any],
    word: str,
) -> None:
    chosen(mode="auto")
    arguments = tensor_parallel(given)
    resolve(arguments, **later)
    kept = footprint.kept_row_bytes(footprint.Sizes.of(GLM, attention_tp=8, moe_tp=1), 1)
    assert 0 < sum(arguments.prefill.bs) * 78 * kept < H200_MIB * 2**20 / 8
    assert "run eagerly" in caplog.text
    assert word in caplog.text


def test_a_draft_models_breaks_are_counted_where_they_may_own(chosen: Any) -> None:
    """It never has an arena."""
    chosen(mode="auto")
    alone = Arguments(enable_symm_mem=True)
    draft = Arguments(enable_symm_mem=True, speculative_algorithm="EAGLE")
    resolve(alone)
    resolve(draft)
    kept = footprint.kept_row_bytes(footprint.Sizes.of(GLM, attention_tp=1, moe_tp=1), 1)
    assert alone.prefill.max_bs == 16384
    assert 0 < sum(draft.prefill.bs) * kept < H200_MIB * 2**20 / 8 < sum(alone.prefill.bs) * kept


def test_what_sglang_chooses_behind_its_memory_settings_takes_buckets_away(chosen: Any) -> None:
    chosen(memory=H200_MIB, mode="strict")
    arguments = Arguments(enable_prefill_cp=True, tp_size=8, ep_size=8)
    resolution.set_buckets(arguments, nothing)
    assert arguments.prefill.max_bs == 16384
    before = list(arguments.prefill.bs)
    vars(arguments.view).update(dsa_decode_backend="trtllm")
    resolution.settle(arguments, nothing)
    assert arguments.prefill.bs == before[: len(arguments.prefill.bs)]
    assert arguments.prefill.max_bs == max(arguments.prefill.bs) < 16384
    assert arguments._glm_left_out == len(before) - len(arguments.prefill.bs)


def test_a_plan_that_memory_leaves_empty_turns_graphs_off(
    chosen: Any, caplog: pytest.LogCaptureFixture
) -> None:
    chosen(memory=100.0, mode="auto")
    arguments = Arguments()
    resolve(arguments)
    assert arguments.prefill.backend == "disabled"
    assert "--glm-prefill-graph-buckets captures" in caplog.text
    chosen(memory=100.0, mode="strict")
    with pytest.raises(UsageError, match=r"--glm-prefill-graph is strict.*an eighth of the GPU"):
        resolve(Arguments())


def test_strict_under_context_parallelism_names_the_draft_model(
    chosen: Any, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = Arguments(enable_prefill_cp=True, tp_size=8, speculative_algorithm="EAGLE")
    arguments.prefill.backend = "disabled"
    chosen(mode="strict")
    with pytest.raises(UsageError, match="leave out --speculative-algorithm EAGLE"):
        resolution.settle(arguments, nothing)
    chosen(mode="auto")
    resolution.settle(arguments, nothing)
    assert "--speculative-algorithm EAGLE" in caplog.text
    assert "strict captures" not in caplog.text, "for it would not"


@pytest.mark.parametrize(
    ("fields", "backend", "word"),
    [
        ({}, "disabled", "has no graphs to compare.*--cuda-graph-backend-prefill"),
        (
            {"enable_prefill_cp": True, "tp_size": 8},
            "disabled",
            "has no graphs to compare.*context parallelism",
        ),
        ({"pp_size": 2}, "breakable", "--pp-size 2 cuts this one; leave it out"),
    ],
)
def test_a_verification_of_nothing_ends_the_start(
    chosen: Any, fields: dict[str, Any], backend: str, word: str
) -> None:
    chosen(mode="auto")
    arguments = Arguments(**fields)
    arguments.prefill.backend = backend
    resolution.settle(arguments, nothing)
    chosen(mode="auto", verify=True)
    with pytest.raises(UsageError, match=f"--glm-verify-graphs.*{word}"):
        resolution.settle(arguments, nothing)


def test_where_memory_leaves_no_bucket_there_is_nothing_to_verify(chosen: Any) -> None:
    chosen(memory=100.0, mode="auto", verify=True)
    with pytest.raises(UsageError, match="--glm-verify-graphs has no graphs to compare"):
        resolve(Arguments())


def test_the_pool_holds_the_selection_and_every_ranks_kv_and_experts_the_rows_they_get() -> None:
    sizes = footprint.Sizes.of(GLM, attention_tp=1, moe_tp=1)
    alone, shared = (footprint.row_bytes(sizes, cp_size=size) for size in (1, 8))
    # Of a local row 2,048 slots of 4 bytes; of 1 + 8 ranks' rows 576 KV values of 2 bytes; of 8 ranks' input, output.
    in_pool, fixed = 2048 * 4 + 9 * 576 * 2, 2 * 8 * 6144 * 2
    assert (shared - alone) == pytest.approx(footprint.PACKING * in_pool + fixed, abs=1)
    experts = 8 * (2 * 2048 * 2 + 2048 + 6144 * 2)  # of one row: gate and up, product, outputs
    gathered = footprint.row_bytes(sizes, cp_size=8, gathered=True)
    assert gathered > footprint.PACKING * 8 * experts + fixed > shared


def test_tensor_parallel_heads_and_experts_take_their_share() -> None:
    alone = footprint.row_bytes(footprint.Sizes.of(GLM, attention_tp=1, moe_tp=1))
    eight = footprint.row_bytes(footprint.Sizes.of(GLM, attention_tp=8, moe_tp=8))
    assert eight < alone / 2

"""One rank of two under interleaved context parallelism with MegaMoE: SGLang's runners, a small model, both ways.

SGLang's are: the batch's padding, both runners, capture and replay, CP's split and gathers, the DSA backend's
metadata and attention, the indexer, the router, the MoE layer's dispatch. Of the model only the weights, the order of
its parts and the kernels are the test's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tests.unit.prefill_graph import cp_kernels, recorded_graph
from tests.unit.prefill_graph.cp_kernels import PAGE, Pool

RANKS = 2
LAYERS = (True, False, False, True)  # which layers select; the others share the selection before them
HIDDEN, HEADS, LATENT, ROPE, TOPK = 16, 2, 8, 4, 4
INDEX_HEADS, INDEX_DIM = 2, 8
EXPERTS, EXPERTS_A_TOKEN, CALL_ROWS = 6, 2, 24
VOCABULARY, TABLE = 50, 512
# The fork's hooks of this path, by their functions.
HOOKED = (
    "lifetime:keep",
    "whole:attention_forward",
    "context_parallel:prepare",
    "rows:cached_lengths",
    "context_parallel:prepare_qkv",
    "context_parallel:indexer_with_kv",
)


@dataclasses.dataclass(frozen=True)
class Step:
    """`prompts`: of each request, tokens in the pool already and tokens of this step."""

    prompts: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return sum(new for _, new in self.prompts)


@dataclasses.dataclass
class Seen:
    """What one pass left behind on one rank."""

    graph: bool
    pool: Pool
    before: Pool
    hidden: torch.Tensor  # rows given to the logits
    logits: torch.Tensor
    attention: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
    experts: list[tuple[torch.Tensor, torch.Tensor]]  # ids and weights of each kernel call
    bounds: list[int]
    padded_to: int
    kept: int  # bytes of the graphs' memory that breaks own
    impl: str
    breaks: tuple[int, int]  # of the graph that has most, and SGLang's of the same layers (break_counts)
    table: int = TABLE


class Kernel:
    """MegaMoE's call: rows whose id is −1 go to no expert."""

    name, buffer_bytes = "test", 0

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.bounds: list[int] = []

    def __call__(self, experts: Any, rows: Any, out: Any, *, bound: int, scaling: float, clamp: Any) -> None:
        cp_kernels.same("num_tokens", min(rows.x.shape[0], bound), rows.x.shape[0])
        self.calls.append((rows.ids.clone(), rows.weights.clone()))
        self.bounds.append(bound)
        share = rows.weights.masked_fill(rows.ids < 0, 0.0).to(rows.x.dtype)
        chosen = self.weights[rows.ids.clamp(min=0).long()]
        out.copy_(torch.einsum("rh,rkhg,rk->rg", rows.x, chosen, share) * scaling)


def normal(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-2] ** 0.5


def turned(positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """In place of rope: what depends on the position."""
    angle = positions.to(x.dtype).view(-1, *[1] * (x.dim() - 1)) / 7
    return x * torch.cos(angle) + x.flip(-1) * torch.sin(angle)


def rope(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return turned(positions, q), turned(positions, k)


def indexer(layer: int) -> Any:
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    made = object.__new__(Indexer)
    torch.nn.Module.__init__(made)
    query, keys = normal(10 + layer, HIDDEN, INDEX_HEADS * INDEX_DIM), normal(20 + layer, HIDDEN, INDEX_DIM)
    gates = normal(30 + layer, HIDDEN, INDEX_HEADS)
    for name, value in {
        "layer_id": layer,
        "index_topk": TOPK,
        "n_heads": INDEX_HEADS,
        "head_dim": INDEX_DIM,
        "rope_head_dim": ROPE,
        "softmax_scale": INDEX_DIM**-0.5,
        "block_size": INDEX_DIM,
        "scale_fmt": None,
        "alt_stream": None,
        "use_dsa_indexer_fusion": True,
        "use_gfx950_fused_indexer": False,
        "use_aiter_fused_fp8_writer": False,
        "dsa_enable_prefill_cp": True,
        "num_init_tokens": 0,
        "num_local_tokens": 0,
        "wq_b": lambda x: (x @ query, None),
        "wk_weights_proj": lambda x: (torch.cat((x @ keys, x @ gates), dim=-1), None),
        "k_norm": lambda x: x.clone(),
        "rotary_emb": lambda positions, q, k: (turned(positions, q), turned(positions, k)),
        "_with_real_sm_count": contextlib.nullcontext,
        # SGLang's own compiles.
        "_scale_head_gates": lambda raw, scale: (
            (raw * INDEX_HEADS**-0.5)[..., None] * scale * INDEX_DIM**-0.5
        ),
    }.items():
        object.__setattr__(made, name, value)
    return made


class Layer:
    """Attention as DeepseekMLAForwardMixin orders it, then experts."""

    def __init__(self, index: int, selects: bool) -> None:
        from sglang.srt.layers.moe.topk import TopK
        from sglang.srt.layers.radix_attention import RadixAttention

        self.index, self.selects = index, selects
        self.indexer = indexer(index)
        self.attn_mqa = RadixAttention(HEADS, LATENT + ROPE, 0.4, 1, index, v_head_dim=LATENT)
        self.rotary_emb = rope
        self.kv_lora_rank, self.qk_rope_head_dim = LATENT, ROPE
        self.wq = normal(40 + index, HIDDEN, HEADS * (LATENT + ROPE))
        self.wkv = normal(50 + index, HIDDEN, LATENT + ROPE)
        self.wo = normal(60 + index, HEADS * LATENT, HIDDEN)
        router = normal(70 + index, HIDDEN, EXPERTS)
        self.moe = SimpleNamespace(
            gate=lambda x, forward_batch: x @ router,
            topk=TopK(EXPERTS_A_TOKEN, layer_id=index).forward_native,
            is_hash=False,
            routed_scaling_factor=1.5,
            routed_scaling_factor_fused_in_topk=False,
            num_fused_shared_experts=0,
            n_shared_experts=0,
            mega_shared_l1_weights=None,
            mega_shared_l2_weights=None,
            experts=SimpleNamespace(
                num_experts=EXPERTS, moe_runner_config=SimpleNamespace(swiglu_limit=None)
            ),
            config=SimpleNamespace(
                hidden_size=HIDDEN, moe_intermediate_size=HIDDEN, num_experts_per_tok=EXPERTS_A_TOKEN
            ),
        )

    def _fuse_rope_for_trtllm_mla(self, batch: Any) -> bool:
        return False

    def __call__(self, positions: torch.Tensor, x: torch.Tensor, batch: Any, topk: Any) -> Any:
        from sglang.srt.layers.cp.interleave import DSAInterleaveCPIndexerOverlap
        from sglang.srt.layers.moe import mega_moe

        overlap = DSAInterleaveCPIndexerOverlap(self, batch)
        latent = x @ self.wkv
        k_nope, k_pe = latent[:, None, :LATENT], latent[:, None, LATENT:]
        q_nope, q_pe = (x @ self.wq).view(-1, HEADS, LATENT + ROPE).split((LATENT, ROPE), dim=-1)
        if self.selects:
            topk = overlap.run_indexer(
                x=x,
                q_lora=x,
                positions=positions,
                forward_batch=batch,
                layer_id=self.index,
                k_nope=k_nope,
                latent_cache=latent,
            )
        q_pe, k_pe = rope(positions, q_pe, k_pe)
        q_nope, q_pe, k_nope, k_pe, topk = overlap.prepare_qkv(
            q_nope, q_pe, k_nope, k_pe, topk, defer_materialization=False
        )
        out = self.attn_mqa(q_nope, k_nope, k_nope, batch, q_rope=q_pe, k_rope=k_pe, topk_indices=topk)
        x = x + out.reshape(-1, HEADS * LATENT) @ self.wo
        rows = mega_moe._run_mega_routed(self.moe, x, batch, None, x.shape[0])
        return x + rows, topk


class Body:
    """The layers; SGLang captures `forward`."""

    def __init__(self) -> None:
        self.layers = [Layer(index, selects) for index, selects in enumerate(LAYERS)]

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any = None) -> Any:
        x, topk = input_embeds, None
        for layer in self.layers:
            x, topk = layer(positions, x, forward_batch, topk)
        return x / x.abs().amax(-1, keepdim=True).clamp(min=1e-9)

    __call__ = forward


class Model:
    """As much of a causal model as the runners ask for."""

    def __init__(self) -> None:
        from sglang.srt.runtime_context import get_model

        self.model = Body()
        self.shared_experts_config = get_model().shared_experts
        self.pp_group = SimpleNamespace(is_last_rank=True, is_first_rank=True)
        self.lm_head = normal(1, HIDDEN, VOCABULARY)
        self.table = normal(2, VOCABULARY, HIDDEN)
        self.hidden: torch.Tensor | None = None

    def get_input_embeddings(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda ids: self.table[ids]

    def logits_processor(self, ids: Any, hidden: torch.Tensor, head: Any, batch: Any, aux: Any) -> Any:
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        self.hidden = hidden.clone()
        last = torch.cumsum(batch.extend_seq_lens, dim=0) - 1  # UPSTREAM: LogitsProcessor._get_pruned_states
        return LogitsProcessorOutput(next_token_logits=hidden[last] @ head)


# SGLang's plan of where a step's KV goes, as far as a replay asks it.
SLOTS = SimpleNamespace(bind_replay=lambda static, reader, *, slots: setattr(static, "out_cache_loc", slots))


class Gloo:
    """A GroupCoordinator of both ranks."""

    world_size = RANKS

    def all_gather_into_tensor(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        dist.all_gather_single(output, rows)

    def barrier(self) -> None:
        dist.barrier()


def load() -> None:
    """Import what ranks need, as on a machine without a GPU: before kernels stand in for CUDA's, and before a fork."""
    import sglang.srt.model_executor.model_runner
    import sglang.srt.model_executor.runner.eager_runner
    import sglang.srt.model_executor.runner.prefill_cuda_graph_runner  # noqa: F401


class Rank:
    """This process as rank `rank` with these buckets captured, by the fork's hooks `without` these functions."""

    arguments: ClassVar[dict[str, Any]] = {
        "attn_cp_size": RANKS,
        "enable_prefill_cp": True,
        "cp_strategy": "interleave",
    }
    hooked: ClassVar[tuple[str, ...]] = HOOKED
    moe_hooked: ClassVar[tuple[str, ...]] = ("routed_experts",)
    context_parallel = True

    def parallel(self, rank: int) -> dict[str, Any]:
        """What differs from one attention rank alone."""
        return {
            "attn_cp_size": RANKS,
            "attn_cp_rank": rank,
            "enable_prefill_cp": True,
            "cp_strategy": "interleave",
        }

    def make_model(self) -> Model:
        return Model()

    def __init__(self, rank: int, buckets: Sequence[int], impl: str, without: Sequence[str] = ()) -> None:
        self.impl, self.stack = impl, contextlib.ExitStack()
        load()
        recorded_graph.install()
        self.attention = cp_kernels.install()
        self._context(rank, buckets)
        self._hooks(without)
        self._experts()
        self.pool = Pool(len(LAYERS), TABLE * 4, LATENT + ROPE, INDEX_DIM)
        self.before = self.pool.copy()
        self._runners(buckets, impl)

    def close(self) -> None:
        self.stack.close()

    def _context(self, rank: int, buckets: Sequence[int]) -> None:
        from sglang.srt import runtime_context
        from sglang.srt.layers.attention.dsa import utils as dsa_utils
        from sglang.srt.layers.cp import base
        from sglang.srt.layers.cp import utils as cp_utils
        from sglang.srt.layers.moe.utils import MoeA2ABackend
        from sglang.srt.model_executor import forward_batch_info

        context = runtime_context.get_context()
        self.stack.enter_context(
            context.override_server_args(
                tp_size=RANKS, ep_size=RANKS, device="cpu", page_size=PAGE, **self.arguments
            )
        )
        group = Gloo()
        self.stack.enter_context(
            context.parallel.override(
                **{
                    "tp_size": RANKS, "tp_rank": rank, "tp_group": group, "attn_cp_size": 1, "attn_cp_rank": 0,
                    "attn_cp_group": group, "attn_tp_size": 1, "attn_tp_rank": 0, "attn_dp_size": 1, "attn_dp_rank": 0,
                    "moe_ep_size": RANKS, "moe_ep_rank": rank, "moe_tp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0,
                    "attn_tp_group": SimpleNamespace(world_size=1),
                    **self.parallel(rank),
                }
            )
        )  # fmt: skip
        base._STRATEGY = None
        runtime_context.get_flags().moe.a2a_backend = MoeA2ABackend.MEGAMOE
        runtime_context.set_stream("dsa_cp_kv", recorded_graph.Stream())
        config = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["GlmMoeDsaForCausalLM"], index_topk=TOPK)
        )
        dsa_utils.process_model_config = lambda: config
        cp_utils.uses_mla_backend = lambda: True
        forward_batch_info._is_cpu = True  # else it pins memory
        graph = SimpleNamespace(backend="breakable", bs=list(buckets), max_bs=max(buckets))
        runtime_context.get_exec().graph._set("cuda_graph_config", SimpleNamespace(prefill=graph))

    def _hooks(self, without: Sequence[str]) -> None:
        """The fork's hooks of this path, as SGLang's registry applies them."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from glm_sglang.moe.hooks import HOOKS as MOE
        from glm_sglang.prefill_graph import lifetime, options
        from glm_sglang.prefill_graph.hooks import HOOKS as GRAPH
        from glm_sglang.upstream.install import load

        options.current = lambda: options.Options(mode="strict")  # type: ignore[assignment]
        lifetime._device_tensors = recorded_graph.POOL.tensors_in  # the device is the pool
        wanted = [hook for hook in GRAPH if hook.function.partition("prefill_graph.")[2] in self.hooked]
        assert len(wanted) == len(self.hooked)
        wanted = [hook for hook in wanted if hook.function.partition("prefill_graph.")[2] not in without]
        wanted += [hook for hook in MOE if hook.function.partition(":")[2] in self.moe_hooked]
        for hook in wanted:
            HookRegistry.register(hook.target, load(hook.function, hook.why), HookType(hook.kind))
        HookRegistry.apply_hooks()

    def _experts(self) -> None:
        from glm_sglang.moe import state
        from glm_sglang.moe.layer import RoutedExperts

        self.kernel = Kernel(normal(3, EXPERTS, HIDDEN, HIDDEN))
        routed = RoutedExperts(self.kernel, CALL_ROWS, state.attention(), lambda: None)
        state._running = state.Running("megamoe", "a test", len(LAYERS), routed.counters, routed)

    def _backend(self, impl: str) -> Any:
        from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
        from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import context

        backend = object.__new__(DeepseekSparseAttnBackend)
        table = torch.arange(TABLE * 3).view(3, TABLE) + PAGE  # page 0 takes the padding's writes
        pool = SimpleNamespace(req_to_token=table, size=3)
        vars(backend).update(
            device="cpu",
            req_to_token_pool=pool,
            req_to_token=table,
            token_to_kv_pool=self.pool,
            physical_page_size=PAGE,
            dsa_index_topk=TOPK,
            dsa_index_kpool=1,
            dsa_prefill_impl=impl,
            dsa_decode_impl=impl,
            dsa_kv_cache_store_fp8=impl == "flashmla_kv",  # its pool needs no further quantisation
            enable_auto_select_prefill_impl=False,
            dsa_topk_backend=DSATopKBackend.SGL_KERNEL,
            use_fused_topk=True,
            use_mha=False,
            supports_mha_one_shot=False,
            hisparse_coordinator=None,
            _kv_shard_pool=None,
            device_sm_major=9,
            flashmla_kv_num_q_heads=HEADS,
            flashmla_kv_format="V32",
            kv_cache_dim=LATENT + ROPE,
            speculative_num_draft_tokens=0,
            dcp_size=1,
            _arange_buf=torch.arange(1024, dtype=torch.int32),
            _build_topk_v2_plan=lambda lengths: None,
            _is_in_breakable_cuda_graph=context.is_in_breakable_cuda_graph,
            _is_in_tc_piecewise_cuda_graph=lambda: False,
            _get_device_sm=lambda: 90,
            _is_blackwell=lambda: False,
            get_cpu_graph_seq_len_fill_value=lambda: 1,  # UPSTREAM: get_cuda_graph_seq_len_fill_value
        )
        return backend

    def _runners(self, buckets: Sequence[int], impl: str) -> None:
        import sglang.srt.model_executor.runner.prefill_cuda_graph_runner as module
        from sglang.srt.layers.cp.bcg.bcg import PrefillCPBCGInput
        from sglang.srt.model_executor.cuda_graph_buffer_registry import build_prefill_registry
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
        from sglang.srt.model_executor.runner.eager_runner import EagerRunner
        from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import (
            BreakableCudaGraphBackend,
        )

        self.model, backend = self.make_model(), self._backend(impl)
        self.runner = runner = object.__new__(module.PrefillCudaGraphRunner)
        model_runner = self.model_runner = SimpleNamespace(
            model=self.model,
            attn_backend=backend,
            dtype=torch.float64,
            device="cpu",
            model_config=SimpleNamespace(
                hidden_size=HIDDEN,
                context_len=TABLE,
                vocab_size=VOCABULARY,
                hf_config=SimpleNamespace(
                    architectures=["GlmMoeDsaForCausalLM"],
                    num_hidden_layers=len(LAYERS),
                    index_topk=TOPK,
                    index_n_heads=INDEX_HEADS,
                    index_head_dim=INDEX_DIM,
                    indexer_types=["full" if selects else "shared" for selects in LAYERS],
                ),
            ),
            is_draft_worker=False,
            is_generation=True,
            req_to_token_pool=backend.req_to_token_pool,
            token_to_kv_pool=self.pool,
            pp_group=self.model.pp_group,
            lora_manager=None,
            hisparse_coordinator=None,
            graph_shared_output=None,
            device_timer=None,
            attn_tp_sequence_sharded=lambda tokens: True,
            prepare_dummy_forward_batch=lambda batch: batch,
            kv_index_translator=SimpleNamespace(
                bind_runner_slots=lambda batch: setattr(batch, "kv_loc_plan", SLOTS)
            ),
            ngram_embedding_manager=SimpleNamespace(enabled=False),
            spec_algorithm=SimpleNamespace(
                is_speculative=lambda: False, supports_prefill_shared_read_done=lambda: False
            ),
            _extend_forward_kwargs=lambda batch, proxy: {},
        )
        vars(runner).update(
            model_runner=model_runner,
            device="cpu",
            device_module=SimpleNamespace(synchronize=lambda: None),
            prefill_backend_name="breakable",
            capture_num_tokens=list(buckets),
            capture_forward_mode=ForwardMode.EXTEND,
            max_num_tokens=max(buckets),
            max_bs=3,
            max_context_size=None,
            max_seq_len=None,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            is_multimodal=False,
            is_dsv41_model=False,
            enable_lora=False,
            quant_config=None,
            num_dp_ranks=1,
            pp_size=1,
            attention_layers=[layer.attn_mqa for layer in self.model.model.layers],
            mha_companion_layers=[],
            has_mha_companion_layers=False,
            moe_layers=[],
            moe_fusions=[],
            dsa_indexers=[layer.indexer for layer in self.model.model.layers],
            require_mlp_tp_gather=False,
            require_attn_tp_gather=True,
            static_draft_hidden_states=None,
            layer_model=self.model.model,
            capture_return_pooled_hidden_states=False,
            _capture_req_slots=1,
            _is_full_backend=False,
            _capture_lora=False,
            _capture_chunked_prefix=False,
            _input_embeds_arg_idx=3,
            _qwen_bcg_hc_sidechannel=False,
            _qwen_bcg_mtp_draft=False,
            use_captured_attn_metadata=False,
            enable_cp_bcg_capture=self.context_parallel,
            tbo_plugin=SimpleNamespace(capture_one_batch_size=lambda batch, num_tokens: None),
            buffers=SimpleNamespace(pp_proxy_tensors=None),
            buffer_registry=build_prefill_registry(
                device=torch.device("cpu"), max_bs=3, max_num_token=max(buckets), cache_loc_dtype=torch.int64,
                hidden_size=HIDDEN, embed_dtype=torch.float64, enable_num_token_non_padded=True,
                require_gathered_buffer=True, enable_prefill_cp=self.context_parallel, share_pool=False,
                attn_tp_sharded_fn=lambda tokens: True,
            ),
            _prefill_static_buffers={
                name: torch.zeros(3, dtype=torch.int64) for name in module._PREFILL_STATIC_FIELDS
            },
        )  # fmt: skip
        runner.prefill_cp_bcg_input = PrefillCPBCGInput.create(runner) if self.context_parallel else None
        graphs = runner.backend = object.__new__(BreakableCudaGraphBackend)
        vars(graphs).update(
            _cuda_graph_runner=runner,
            _model_runner=model_runner,
            _graphs={},
            _outputs={},
            _capture_inputs={},
            _pool=None,
            _device_module=runner.device_module,
            _tp_group=SimpleNamespace(barrier=dist.barrier),
            _capture_stream=None,
            _debug_eager=False,
            _shared_output_buffer=None,
            _precarve=SimpleNamespace(measure=contextlib.nullcontext, mint=lambda: None),
            deduped_cuda_graph=None,
        )
        self.eager = object.__new__(EagerRunner)
        vars(self.eager).update(model_runner=model_runner, enable_pdmux=False)
        self.eager.load_batch = lambda batch, proxy=None: dataclasses.replace(batch)  # type: ignore[method-assign]
        self.captured: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.captured_bounds: dict[int, list[int]] = {}
        with graphs.replay_session():
            for bucket in reversed(buckets):
                self.kernel.calls, self.kernel.bounds = [], []
                runner.capture_one_shape(bucket)
                calls = len(self.kernel.calls) // 3  # two rounds to warm up
                self.captured[bucket] = self.kernel.calls[-calls:]
                self.captured_bounds[bucket] = self.kernel.bounds[-calls:]

    def batch(self, step: Step) -> Any:
        """As ForwardBatch.init_new makes it, then as ModelRunner pads it before either runner has it."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
        from sglang.srt.model_executor.model_runner import ModelRunner

        prefixes, news = zip(*step.prompts, strict=True)
        table = self.model_runner.req_to_token_pool.req_to_token
        generator = torch.Generator().manual_seed(step.tokens)
        lengths = torch.tensor([prefix + new for prefix, new in step.prompts])
        spans = [(request, range(prefix, prefix + new)) for request, (prefix, new) in enumerate(step.prompts)]
        slots = torch.cat([table[request, span.start : span.stop] for request, span in spans])
        votes = self.runner.can_replay_locally(
            batch_size=len(news), num_tokens=step.tokens, input_embeds=None, replace_embeds=None,
            prefix_lens=prefixes, is_target_verify=False, capture_hidden_mode=None, return_logprob=False,
        )  # fmt: skip
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(news),
            input_ids=torch.randint(0, VOCABULARY, (step.tokens,), generator=generator),
            req_pool_indices=torch.arange(len(news)),
            seq_lens=lengths,
            seq_lens_cpu=lengths.clone(),
            orig_seq_lens=lengths.clone(),
            seq_lens_sum=int(lengths.sum()),
            out_cache_loc=slots,
            positions=torch.tensor([position for _, span in spans for position in span]),
            extend_num_tokens=step.tokens,
            extend_seq_lens=torch.tensor(news, dtype=torch.int32),
            extend_prefix_lens=torch.tensor(prefixes, dtype=torch.int32),
            extend_start_loc=torch.tensor(news, dtype=torch.int32).cumsum(0) - torch.tensor(news),
            extend_prefix_lens_cpu=list(prefixes),
            extend_seq_lens_cpu=list(news),
            extend_logprob_start_lens_cpu=list(news),
            global_num_tokens_cpu=[step.tokens],
            global_num_tokens_gpu=torch.tensor([step.tokens]),
            global_num_tokens_for_logprob_cpu=[len(news)],
            global_num_tokens_for_logprob_gpu=torch.tensor([len(news)]),
            global_num_token_non_padded=torch.tensor(step.tokens, dtype=torch.int32),
            global_num_token_non_padded_cpu=step.tokens,
            can_run_dp_prefill_cuda_graph=votes,
            is_extend_in_batch=True,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_logprob=False,
            global_forward_mode=ForwardMode.EXTEND,
            kv_loc_plan=SLOTS,
        )
        ModelRunner._prepare_eager_forward_batch(self.model_runner, batch)
        return batch

    def replays(self, step: Step) -> bool:
        """Whether SGLang replays this step."""
        return bool(self.runner.can_run_graph(self.batch(step)))

    def run(self, step: Step, *, graph: bool) -> Seen:
        """One pass over the pool as it was at first; a graph's memory is what others may have left there."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        from glm_sglang.prefill_graph import break_counts, lifetime

        recorded_graph.POOL.poison()
        self.pool.load(self.before)
        self.attention.calls = []
        self.kernel.calls, self.kernel.bounds = [], []
        batch = self.batch(step)
        padded_to = len(batch.input_ids)
        replays = graph and bool(self.runner.can_run_graph(batch))
        context = ForwardContext(attn_backend=self.model_runner.attn_backend)
        with torch.no_grad(), forward_context(context, forward_batch=batch):
            output = (self.runner if replays else self.eager).execute(batch)
        bucket = next((size for size in self.captured if size == padded_to), None) if replays else None
        calls = self.kernel.calls if bucket is None else self.captured[bucket]
        bounds = self.kernel.bounds if bucket is None else self.captured_bounds[bucket]
        assert self.model.hidden is not None
        return Seen(
            graph=replays,
            pool=self.pool.copy(),
            hidden=self.model.hidden,
            before=self.before,
            logits=output.next_token_logits.clone(),
            attention=list(self.attention.calls),
            experts=[(ids.clone(), weights.clone()) for ids, weights in calls],
            bounds=list(bounds),
            padded_to=padded_to,
            kept=lifetime.kept().bytes,
            impl=self.impl,
            breaks=max(map(break_counts.of, self.runner.backend._graphs.values())),
        )

    def verified(self) -> list[tuple[int, int, int, float]]:
        """What --glm-verify-graphs compares: bucket, tokens, prefix, KL. _forward_raw has both branches here."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
        from sglang.srt.model_executor.model_runner import ModelRunner

        from glm_sglang.prefill_graph import options, verify

        model_runner, said = self.model_runner, []
        context = ForwardContext(attn_backend=model_runner.attn_backend)

        def forward_raw(batch: Any, _: None) -> Any:
            recorded_graph.POOL.poison()
            ModelRunner._prepare_eager_forward_batch(model_runner, batch)
            chosen = model_runner.prefill_cuda_graph_runner
            replays = chosen is self.runner and bool(self.runner.can_run_graph(batch))
            with forward_context(context, forward_batch=batch):
                output = (self.runner if replays else self.eager).execute(batch)
            return SimpleNamespace(can_run_graph=replays, logits_output=output)

        vars(model_runner).update(
            _forward_raw=forward_raw,
            prefill_cuda_graph_runner=self.runner,
            eager_runner=self.eager,
            page_size=PAGE,
        )
        options.current = lambda: options.Options(mode="strict", verify=True)  # type: ignore[assignment]
        compare = verify.compare
        verify.compare = lambda *args, **kwargs: said.append(compare(*args, **kwargs)) or said[-1]  # type: ignore
        verify.after_capture(None, model_runner)
        return [(one.bucket, one.step.tokens, one.step.prefix, one.kl) for one in said]

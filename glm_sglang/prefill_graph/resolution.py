"""Where SGLang resolves its arguments: the planned buckets go in, and a strict server without graphs is refused.

Through SGLang's own resolution hooks: `handle_gpu_memory_settings`, which would stop at 8,192 tokens for MLA models,
and `handle_other_validations`, behind everything that may still turn prefill graphs off, and behind the choice of KV
dtype and attention, on which it depends what graphs hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from glm_sglang.errors import UsageError
from glm_sglang.prefill_graph import buckets, context_parallel, eligibility, footprint, options, stock

logger = logging.getLogger(__name__)

Step = Callable[[Any], None]


def set_buckets(server_args: Any, previous: Step) -> None:
    """Around handle_gpu_memory_settings: buckets up to the chunk, before it sizes memory and after it chose a chunk."""
    if not options.current().ours:
        previous(server_args)
        return
    _declare(server_args)
    previous(server_args)
    _declare(server_args)


def _declare(server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Phase

    config = resolving_view(server_args)
    locked: set[tuple[str, str]] = getattr(server_args, "_cuda_graph_config_locked", set())
    wanted = options.current().buckets
    if wanted is None and locked & {(Phase.PREFILL, "bs"), (Phase.PREFILL, "max_bs")}:
        return  # SGLang's own flags say it
    if wanted is None:
        if config.chunked_prefill_size is None:
            return  # SGLang chooses it first
        # Where memory suffices for none, `settle` turns graphs off: SGLang takes no empty list.
        wanted = _plan(server_args, config).buckets or (buckets.unit(cp_size(config)),)
        server_args._glm_planned = True
    _change(server_args, config, bs=list(wanted), max_bs=max(wanted))


def _change(server_args: Any, config: Any, **fields: Any) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.model_executor.cuda_graph_config import Phase, with_phase

    declare_resolution(
        server_args,
        "glm_sglang.prefill_graph",
        cuda_graph_config=with_phase(config.cuda_graph_config, Phase.PREFILL, **fields),
    )


def _plan(server_args: Any, config: Any, memory: buckets.Memory | None = None) -> buckets.Plan:
    from sglang.srt.arg_groups.overrides import model_config_of

    largest = buckets.chunk(config.chunked_prefill_size, config.max_prefill_tokens, [config.max_total_tokens])
    memory = memory or _memory(server_args, config)
    # Under CP no graph is dense.
    dense = int(model_config_of(server_args).hf_config.index_topk) if cp_size(config) == 1 else 0
    return buckets.plan(largest, cp_size=cp_size(config), memory=memory, dense=dense)


def _memory(server_args: Any, config: Any) -> buckets.Memory:
    from sglang.srt.arg_groups.overrides import model_config_of
    from sglang.srt.utils.common import get_device_memory_capacity

    ranks = config.tp_size // max(config.attn_dp_size or 1, 1)
    model = model_config_of(server_args).hf_config
    sizes = footprint.Sizes.of(
        model,
        attention_tp=max(1, ranks // cp_size(config)),
        moe_tp=max(1, config.tp_size // config.ep_size),
    )
    mebibytes = get_device_memory_capacity(config.device)
    gpu_bytes = int((mebibytes or 0) * 2**20)
    sharing = cp_size(config)
    return footprint.memory(
        sizes,
        gpu_bytes,
        cp_size=sharing,
        # UPSTREAM: without an all-to-all experts get every rank's rows (attn_cp_interleave_gather).
        gathered=sharing > 1 and config.moe_a2a_backend == "none",
        keeping=_keeping(config, model),
    )


def _keeping(config: Any, model: Any) -> int:
    """Layers whose breaks may own what they read and write: the target's, and the draft's, which has no arena."""
    draft = max(1, int(getattr(model, "num_nextn_predict_layers", 0) or 0))
    keeping = draft if config.speculative_algorithm and _why_keeping(config, model, arena=False) else 0
    return keeping + (int(model.num_hidden_layers) if _why_keeping(config, model) else 0)


def _why_keeping(config: Any, model: Any, *, arena: bool = True) -> str:
    """Why breaks may own what they are given, "" where they are known not to. `arena`: capture attention if possible."""
    if cp_size(config) > 1:
        return context_parallel.why_keeping(config)
    if config.moe_a2a_backend not in context_parallel.KNOWN_DISPATCH:
        return f"the dispatch of --moe-a2a-backend {config.moe_a2a_backend} is a break"
    facts = eligibility.foreseen(config, model, cp_size=1, capability=_capability())
    if arena and not eligibility.why_not(facts):
        return ""
    return "--enable-symm-mem" if config.enable_symm_mem else stock.why_keeping(facts)


def _capability() -> int | None:
    import torch

    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None


def cp_size(config: Any) -> int:
    """Ranks that share a prefill's tokens. UPSTREAM: `--attn-cp-size` is filled in from `--tp` later."""
    if not config.enable_prefill_cp:
        return 1
    given = config.attn_cp_size or 1
    return int(given if given > 1 else config.tp_size)


def settle(server_args: Any, previous: Step) -> None:
    """Around handle_other_validations, behind whatever else is resolved: the plan, with what is known by now.

    No prefill graphs, though asked for, is said; strict ends the start. Raises UsageError.
    """
    previous(server_args)
    if not options.current().ours:
        return
    from sglang.srt.arg_groups.overrides import resolving_view

    config = resolving_view(server_args)
    backend = config.cuda_graph_config.prefill.backend
    if backend == "breakable":
        _refuse_unverifiable(config)
        if getattr(server_args, "_glm_planned", False):
            _settle_plan(server_args, config)
        return
    if why := cp_size(config) > 1 and context_parallel.why_not(server_args):
        _without_graphs(why)
    elif cp_size(config) > 1 and not options.current().strict:
        _without_graphs(
            "graphs under context parallelism were measured on two GPUs with few layers only; "
            "--glm-prefill-graph strict captures them"
        )
    else:
        _without_graphs(f"SGLang resolved --cuda-graph-backend-prefill to {backend} (its log says why)")


def _settle_plan(server_args: Any, config: Any) -> None:
    """Plan again: what SGLang has chosen since may make breaks own more, and then larger buckets go."""
    from sglang.srt.arg_groups.overrides import model_config_of

    planned = _plan(server_args, config)
    held = config.cuda_graph_config.prefill.bs
    kept = [bucket for bucket in held if bucket <= planned.covers]
    everything = _plan(server_args, config, buckets.Memory()).buckets
    server_args._glm_left_out = sum(bucket > max(kept, default=0) for bucket in everything)
    why = _why_keeping(config, model_config_of(server_args).hf_config)
    owning = f"; a layer's breaks own what they read, for {why}" if why else ""
    gib = planned.limit / 2**30
    if not kept:
        _change(server_args, config, backend="disabled")
        _without_graphs(
            f"graphs of {min(held)} tokens would take more than {gib:.1f} GiB, an eighth of the GPU{owning}; "
            "--glm-prefill-graph-buckets captures what it is given all the same"
        )
        return
    if len(kept) < len(held):
        _change(server_args, config, bs=kept, max_bs=max(kept))
    if max(kept) < planned.wanted:
        logger.warning(
            "prefill graph: steps of more than %d tokens run eagerly: their graphs would take more than %.1f GiB, an "
            "eighth of the GPU%s; --glm-prefill-graph-buckets captures them all the same",
            max(kept),
            gib,
            owning,
        )


def _refuse_unverifiable(config: Any) -> None:
    if options.current().verify and config.pp_size > 1:
        raise UsageError(
            f"--glm-verify-graphs compares whole models, and --pp-size {config.pp_size} cuts this one; leave it out"
        )


def _without_graphs(why: str) -> None:
    if options.current().strict:
        raise UsageError(f"--glm-prefill-graph is strict and {why}; change that, or give auto")
    if options.current().verify:
        raise UsageError(f"--glm-verify-graphs has no graphs to compare: {why}; change that, or leave it out")
    logger.warning("prefill graph: every step will run eagerly: %s", why)


_STEPS: dict[str, Callable[[Any, Step], None]] = {
    "handle_gpu_memory_settings": set_buckets,
    "handle_other_validations": settle,
}


def register() -> None:
    """Put both into SGLang's argument resolution."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    for name, step in _STEPS.items():
        register_resolution_hook(name)(step)


def registered() -> bool:
    """Whether `register` is in effect."""
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS

    return all(step in _HOOKS.get(name, ()) for name, step in _STEPS.items())

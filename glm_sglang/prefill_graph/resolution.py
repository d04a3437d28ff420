"""Where SGLang resolves its arguments: the planned buckets go in, and a strict server without graphs is refused.

Through SGLang's own resolution hooks: `handle_gpu_memory_settings`, which would stop at 8,192 tokens for MLA models,
and `handle_other_validations`, behind everything that may still turn prefill graphs off.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from glm_sglang.errors import UsageError
from glm_sglang.prefill_graph import buckets, context_parallel, footprint, options

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
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Phase, with_phase

    config = resolving_view(server_args)
    locked: set[tuple[str, str]] = getattr(server_args, "_cuda_graph_config_locked", set())
    wanted = options.current().buckets
    if wanted is None and locked & {(Phase.PREFILL, "bs"), (Phase.PREFILL, "max_bs")}:
        return  # SGLang's own flags say it
    if wanted is None:
        if config.chunked_prefill_size is None:
            return  # SGLang chooses it first
        largest = buckets.chunk(
            config.chunked_prefill_size, config.max_prefill_tokens, [config.max_total_tokens]
        )
        planned = buckets.plan(largest, cp_size=cp_size(config), memory=_memory(server_args, config))
        if planned.covers < planned.wanted:
            logger.warning(
                "prefill graph: steps of more than %d tokens run eagerly: their graphs would take more than %.1f GiB, an "
                "eighth of the GPU; --glm-prefill-graph-buckets captures them all the same",
                planned.covers,
                planned.limit / 2**30,
            )
        wanted = planned.buckets
    declare_resolution(
        server_args,
        "glm_sglang.prefill_graph",
        cuda_graph_config=with_phase(
            config.cuda_graph_config, Phase.PREFILL, bs=list(wanted), max_bs=max(wanted)
        ),
    )


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
    alone = sharing == 1
    return footprint.memory(
        sizes,
        gpu_bytes,
        cp_size=sharing,
        # UPSTREAM: without an all-to-all experts get every rank's rows (attn_cp_interleave_gather).
        gathered=not alone and config.moe_a2a_backend == "none",
        keeping=0 if alone or context_parallel.keeps_nothing(config) else model.num_hidden_layers,
    )


def cp_size(config: Any) -> int:
    """Ranks that share a prefill's tokens. UPSTREAM: `--attn-cp-size` is filled in from `--tp` later."""
    if not config.enable_prefill_cp:
        return 1
    given = config.attn_cp_size or 1
    return int(given if given > 1 else config.tp_size)


def refuse_without_graphs(server_args: Any, previous: Step) -> None:
    """Around handle_other_validations: no prefill graphs, though asked for, is said; strict ends the start.

    Raises UsageError.
    """
    previous(server_args)
    if not options.current().ours:
        return
    from sglang.srt.arg_groups.overrides import resolving_view

    config = resolving_view(server_args)
    backend = config.cuda_graph_config.prefill.backend
    if backend == "breakable":
        return
    if config.enable_prefill_cp and not options.current().strict:
        logger.warning(
            "prefill graph: every step will run eagerly: graphs under context parallelism are built and never measured; "
            "--glm-prefill-graph strict captures them"
        )
        return
    message = f"SGLang resolved --cuda-graph-backend-prefill to {backend} (its log says why)"
    if options.current().strict:
        raise UsageError(f"--glm-prefill-graph is strict and {message}; give auto, or what the log names")
    logger.warning("prefill graph: every step will run eagerly: %s", message)


_STEPS: dict[str, Callable[[Any, Step], None]] = {
    "handle_gpu_memory_settings": set_buckets,
    "handle_other_validations": refuse_without_graphs,
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

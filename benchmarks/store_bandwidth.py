"""How many bytes a second do the tiers move into and out of Valkey, beside what the server gives its own
benchmark?

One server on this machine, one value a page. The baseline is `valkey-benchmark` (or `redis-benchmark`, its
ancestor, which asks the same), else plain sockets that pipeline; each is run with and without pipelining, over as
many connections as ours, and the faster counts. Ours is the whole path: from `commit` to the last page that Valkey
took (checksum and envelope included), and from `prefetch` to the last page in the pool (checked). Beside them the
data paths alone, from and to plain memory: our sockets, valkey-glide-sync, the valkey client, and LMCache's own
Valkey worker pool; two of them also beside a thread that computes in Python, as a scheduler does. All in turns, round
by round, on the same server.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import os
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import valkey

from benchmarks import _result

PAGE = 3_500_000  # what a page of GLM-5.x comes to, 64 tokens with main KV and index keys of all layers
SIZES = (64 << 10, 1 << 20, PAGE)
WAYS = ("set", "get")
CONNECTIONS = 4
DEPTH = 16  # requests that the pipelining baseline has under way on one connection, of at most 1 MiB together
TOOLS = ("valkey-benchmark", "redis-benchmark")
INSTALL = (
    "no valkey-benchmark on the PATH, so bare sockets are the baseline. For the server's own benchmark install "
    "valkey-tools (Debian 13, bookworm-backports, recent Ubuntu), redis-tools (older ones) or valkey (Fedora, "
    "Homebrew), or name a binary with --tool"
)
WORKING_SET = 240_000_000  # bytes of the values that are written and read again and again

Arm = Callable[[], float]  # one round: bytes a second


def binary(named: str = "") -> str | None:
    """The server's own benchmark, where there is one. SystemExit for a `named` one that is not."""
    if named:
        path = shutil.which(named)
        if path is None:
            raise SystemExit(
                f"--tool: {named!r} is no program; expected a valkey-benchmark or redis-benchmark"
            )
        return path
    return next(filter(None, map(shutil.which, TOOLS)), None)


def version_of(path: str) -> str:
    """What the tool says it is, e.g. "valkey-benchmark 8.1.1"."""
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return " ".join(said.split()[:2])


def keys_of(size: int) -> int:
    """Values in the working set."""
    return max(32, WORKING_SET // size)


def tool_arm(path: str, port: int, size: int, command: str, depth: int, amount: int) -> Arm:
    """A round of the server's own benchmark, over as many keys as ours."""
    with valkey.Valkey(port=port) as client:
        for number in range(keys_of(size)):
            client.set(f"key:{number:012d}", bytes(size))
    requests = max(CONNECTIONS * depth, amount // size)

    def run() -> float:
        flags = ["-p", str(port), "-t", command, "-d", str(size), "-n", str(requests), "--csv"]
        flags += ["-c", str(CONNECTIONS), "-P", str(depth), "-r", str(keys_of(size))]
        done = subprocess.run([path, *flags], capture_output=True, text=True, check=True)
        return float(done.stdout.strip().splitlines()[-1].split(",")[1].strip('"')) * size

    return run


class Sockets:
    """The baseline without a tool: blocking sockets, one thread each, `depth` requests before their replies."""

    def __init__(self, port: int, size: int, depth: int, amount: int) -> None:
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
        self._threads = ThreadPoolExecutor(CONNECTIONS)
        self._size, self._depth = size, depth
        self._values = [memoryview(os.urandom(size)) for _ in range(CONNECTIONS)]
        self._buffers = [memoryview(bytearray(size + 64)) for _ in range(CONNECTIONS)]
        self._batches = max(2, amount // (size * depth * CONNECTIONS))

    def arm(self, work: Callable[[int], None]) -> Arm:
        def run() -> float:
            began = time.perf_counter()
            list(self._threads.map(work, range(CONNECTIONS)))
            return CONNECTIONS * self._batches * self._depth * self._size / (time.perf_counter() - began)

        return run

    def _name(self, number: int, batch: int, slot: int) -> bytes:
        keys = min(keys_of(self._size) // CONNECTIONS, self._batches * self._depth)
        return b"socket:%d:%d" % (number, (batch * self._depth + slot) % keys)

    def write(self, number: int) -> None:
        connection, value = self._sockets[number], self._values[number]
        replies = self._depth * len(b"+OK\r\n")
        for batch in range(self._batches):
            for slot in range(self._depth):
                name = self._name(number, batch, slot)
                head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, self._size)
                _send_all(connection, [memoryview(head), value, memoryview(b"\r\n")])
            assert connection.recv(replies, socket.MSG_WAITALL) == b"+OK\r\n" * self._depth

    def read(self, number: int) -> None:
        connection, buffer = self._sockets[number], self._buffers[number]
        expected = len(b"$%d\r\n\r\n" % self._size) + self._size
        for batch in range(self._batches):
            for slot in range(self._depth):
                name = self._name(number, batch, slot)
                connection.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name))
            for _ in range(self._depth):
                got = 0
                while got < expected:
                    got += connection.recv_into(buffer[got:expected], 0, socket.MSG_WAITALL)

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()
        self._threads.shutdown()


def _send_all(connection: socket.socket, parts: list[memoryview]) -> None:
    while parts:
        sent = connection.sendmsg(parts)
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][sent:]


class Tiers:
    """Ours: a writer and a reader, each smaller than the working set, so that every page moves every time."""

    def __init__(self, url: str, size: int, amount: int) -> None:
        from glm_connectors.tiers import Namespace, PageLayout, TierConfig, TieredStore
        from glm_connectors.tiers.envelope import HEADER_BYTES

        page = size - HEADER_BYTES
        space = Namespace("bandwidth", str(size), "fp8", PageLayout(64, (("kv", page),)))
        self._size, self._amount = size, amount
        count = keys_of(size)
        self._chain = [hashlib.sha256(b"%d" % number).digest() for number in range(count)]
        self._step = max(1, count // 8)
        config = TierConfig(
            url=url,
            pool_bytes=(count // 2 + 1) * (size + 512),
            put_share=1.0,
            prefetch_share=1.0,
            request_timeout=30.0,
        )
        self.writer = TieredStore(config, space, writer=True)
        self.reader = TieredStore(config, space, writer=False)
        self._at = {"write": 0, "read": 0}
        self._rids = itertools.count()
        self.write(least=count)

    def _next(self, way: str) -> list[bytes]:
        start = self._at[way]
        self._at[way] = (start + self._step) % (len(self._chain) - len(self._chain) % self._step)
        return self._chain[start : start + self._step]

    def write(self, least: int = 0) -> float:
        """From the first commit to the last page that Valkey took."""
        metrics, pages = self.writer.metrics, max(self._step, least, self._amount // self._size)
        before, committed = metrics["cache_saved_pages"], 0
        began = time.perf_counter()
        while committed < pages:
            while metrics["cache_save_queue_pages"] > 2 * self._step:  # half of the pool
                time.sleep(0.002)
            chain = self._next("write")
            slots = self.writer.reserve(len(chain))
            assert slots is not None
            committed += self.writer.commit(slots, chain)
        while metrics["cache_save_queue_pages"]:
            time.sleep(0.0005)
        seconds = time.perf_counter() - began
        assert metrics["cache_saved_pages"] - before == committed
        return committed * self._size / seconds

    def read(self) -> float:
        """From the first prefetch to the last page in the pool; two requests at a time."""
        loaded, before, tickets = 0, self.reader.metrics["cache_loaded_bytes"], []
        began = time.perf_counter()
        while loaded * self._size < self._amount:
            tickets.append(self.reader.prefetch(f"r{next(self._rids)}", self._next("read")))
            if len(tickets) > 1:
                loaded += self._ended(tickets.pop(0))
        loaded += sum(map(self._ended, tickets))
        seconds = time.perf_counter() - began
        assert self.reader.metrics["cache_loaded_bytes"] - before == loaded * self._size
        return loaded * self._size / seconds

    def _ended(self, ticket: Any) -> int:
        assert ticket.wait(60)
        assert ticket.end == "complete", ticket.end
        self.reader.cancel(ticket.rid)
        return int(ticket.loaded)

    def close(self) -> None:
        self.writer.close()
        self.reader.close()


class Alone:
    """A data path without tiers: values to and from plain memory, on as many threads."""

    def __init__(self, size: int, amount: int) -> None:
        self._size, self._amount = size, amount
        self._buffers = [memoryview(bytearray(size)) for _ in range(2 * CONNECTIONS)]

    def arm(self, submit: Callable[[str, memoryview], Any]) -> Arm:
        count = max(4 * CONNECTIONS, self._amount // self._size)
        names = [f"alone:{number % 32}" for number in range(count)]

        def run() -> float:
            began = time.perf_counter()
            futures = [
                submit(name, self._buffers[number % len(self._buffers)]) for number, name in enumerate(names)
            ]
            for future in futures:
                future.result()
            return count * self._size / (time.perf_counter() - began)

        return run


class Python:
    """A thread that computes in Python while an arm runs."""

    def __init__(self) -> None:
        self._wanted, self._ended = threading.Event(), False
        threading.Thread(target=self._compute, daemon=True).start()

    def _compute(self) -> None:
        while not self._ended:
            self._wanted.wait()
            sum(number * number for number in range(10_000))

    def beside(self, arm: Arm) -> Arm:
        def run() -> float:
            self._wanted.set()
            speed = arm()
            self._wanted.clear()
            return speed

        return run

    def end(self) -> None:
        self._ended = True
        self._wanted.set()


def arms_of(
    url: str, port: int, size: int, amount: int, tool: str | None, close: list[Callable[[], Any]]
) -> dict[str, dict[str, Arm]]:
    """{set, get: {arm: one round}}; baselines start with "baseline"."""
    from glm_connectors.valkey_store import parse
    from glm_connectors.valkey_store.glide import GlideClients
    from glm_connectors.valkey_store.sockets import SocketClients
    from lmcache.v1.storage_backend.valkey.worker_pool import ValkeyWorkerPool

    tiers, alone, few = Tiers(url, size, amount), Alone(size, amount), Alone(size, amount // 10)
    threads = ThreadPoolExecutor(CONNECTIONS)
    lmcache = ValkeyWorkerPool([("127.0.0.1", port)], num_workers=CONNECTIONS)
    client = valkey.Valkey(port=port)  # one connection a thread that is in a call
    close += [tiers.close, threads.shutdown, lmcache.close, client.close]
    sets: dict[str, Arm] = {
        "ours": tiers.write,
        "lmcache": alone.arm(lmcache.submit_set),
        "valkey_py": alone.arm(lambda name, view: threads.submit(client.set, name, view)),
    }
    gets: dict[str, Arm] = {
        "ours": tiers.read,
        "lmcache": alone.arm(lmcache.submit_get_into),
        "valkey_py": alone.arm(lambda name, view: threads.submit(_copied, client, name, view)),
    }
    python = Python()
    close.append(python.end)
    for name, path in (("sockets", SocketClients), ("glide", GlideClients)):
        clients = path(parse(url), 30.0, 5.0, 0)
        close.append(clients.close)
        for arms, call in ((sets, clients.write), (gets, clients.read)):
            arms[name] = alone.arm(partial(_in_thread, threads, call))
            arms[f"{name}_beside_python"] = python.beside(few.arm(partial(_in_thread, threads, call)))
    for depth in sorted({1, max(1, min(DEPTH, (1 << 20) // size))}):
        name = f"baseline_depth_{depth}"
        if tool is not None:
            sets[name] = tool_arm(tool, port, size, "set", depth, amount)
            gets[name] = tool_arm(tool, port, size, "get", depth, amount)
        else:
            sockets = Sockets(port, size, depth, amount)
            close.append(sockets.close)
            sets[name], gets[name] = sockets.arm(sockets.write), sockets.arm(sockets.read)
    return {"set": sets, "get": gets}


def _in_thread(threads: ThreadPoolExecutor, call: Callable[..., Any], name: str, view: memoryview) -> Any:
    return threads.submit(call, 0, [name], [view])


def _copied(client: Any, name: str, view: memoryview) -> None:
    """The client has no way to read into a buffer."""
    view[:] = client.get(name)


def measure(size: int, rounds: int, amount: int, tool: str | None = None) -> dict[str, Any]:
    """All arms in turns; bytes a second by arm, and ours over the faster baseline, round by round."""
    from glm_connectors.valkey_store import EmbeddedServer, parse

    close: list[Callable[[], Any]] = []
    with EmbeddedServer(parse("embedded://?maxmemory=3gb")) as server:
        arms = arms_of(server.url, server.port, size, amount, tool, close)
        gc.freeze()  # as SGLang does once it is up: else a collection of all that was imported takes a tenth of a second
        found: dict[str, Any] = {"value_bytes": size}
        for way, those in arms.items():
            speeds: dict[str, list[float]] = {name: [] for name in those}
            for number in range(rounds + 1):
                for name, arm in those.items():
                    speed = arm()
                    if number:  # the first is a warm-up
                        speeds[name].append(speed)
            best = [
                max(speeds[name][number] for name in speeds if name.startswith("baseline"))
                for number in range(rounds)
            ]
            ratios = sorted(ours / base for ours, base in zip(speeds["ours"], best, strict=True))
            found[way] = {
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "mb_per_s": {name: round(statistics.median(those) / 1e6) for name, those in speeds.items()},
                "best_mb_per_s": {name: round(max(those) / 1e6) for name, those in speeds.items()},
            }
            print(f"  {size} {way}: {found[way]}", file=sys.stderr, flush=True)
        for one in close:
            one()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of a value")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-bytes", type=int, default=200_000_000, help="of each arm in each round")
    parser.add_argument("--tool", default="", help="the server's benchmark, where it is not on the PATH")
    _result.add_arguments(parser)
    args = parser.parse_args()
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    tool = binary(args.tool)
    if tool is None:
        print(f"store_bandwidth: {INSTALL}", file=sys.stderr, flush=True)
    load = os.getloadavg()[0]
    sizes = [measure(size, args.rounds, args.round_bytes, tool) for size in args.sizes]
    result = {
        "baseline": version_of(tool) if tool else INSTALL,
        "connections": CONNECTIONS,
        **{
            f"{way}_ratio": size[way]["ratio"]
            for size in sizes
            if size["value_bytes"] == PAGE
            for way in WAYS
        },
        "set_ratio_least": min(size["set"]["ratio"] for size in sizes),
        "get_ratio_least": min(size["get"]["ratio"] for size in sizes),
        "sizes": sizes,
        "load_average_before": round(load, 1),
    }
    _result.finish("store_bandwidth", result, args, device="cpu")


if __name__ == "__main__":
    main()

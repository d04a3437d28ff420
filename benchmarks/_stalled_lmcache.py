"""LMCache unrepaired under `stalled_valkey`'s arrivals and stalls: its storage manager, executor and connector, without a
model. `python -m benchmarks._stalled_lmcache` is one run at one timeout, which `measure` starts.

Stock SGLang can't be the other side: its `--enable-lmcache` refuses PD prefill and wants a GPU. What a turn does here
is `executor_cascade`'s: look up, take what was loaded, store what is new; two nodes, first turns on A, second on B.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any

import orjson

from benchmarks import executor_cascade
from benchmarks._stalled_signals import Longest
from benchmarks._stalled_turns import Stalls, Turn, figures, schedule, send

# Seconds that its reads may take (blocking_timeout_secs): the article has 2, 10 is LMCache's default, and only 1 is less
# than a stall of 1.5. So there is a run at the article's 2 with stalls that exceed it, as rare as they are longer.
TIMEOUTS = (1, 2, 10)
ARTICLES = 2
CACHEABLE = executor_cascade.CHUNKS * executor_cascade.CHUNK_TOKENS
_PASSED_ON = ("turns", "rate", "think", "seed")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All timeouts beside each other, each in a process and with a Valkey of its own."""
    from glm_connectors.valkey_store import EmbeddedServer

    print("stalled_valkey: measuring LMCache unrepaired", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks._stalled_lmcache", "--spread", str(args.period)]
    for name in _PASSED_ON:
        command += [f"--{name}", str(getattr(args, name))]
    environment = os.environ | {"LMCACHE_LOG_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"}
    runs = {f"timeout_{timeout}_s": (timeout, args.stall, args.period) for timeout in TIMEOUTS}
    longer = f"timeout_{ARTICLES}_s_stall_{2 * args.stall:g}_of_{2 * args.period:g}_s"
    runs[longer] = (ARTICLES, 2 * args.stall, 2 * args.period)
    running: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        for name, (timeout, stall, period) in runs.items():
            # Here, one after the other: each looks for a free port.
            valkey = stack.enter_context(EmbeddedServer())
            own = {"timeout": timeout, "stall": stall, "period": period}
            own |= {"port": valkey.port, "pid": valkey.pid}
            flags = [word for key, value in own.items() for word in (f"--{key}", str(value))]
            running[name] = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, env=environment)
            stack.callback(running[name].kill)
        return {name: _figures(name, process) for name, process in running.items()}


def _figures(name: str, process: subprocess.Popen[bytes]) -> Any:
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"LMCache's run {name} ended with {process.returncode}")
    return orjson.loads(output.splitlines()[-1])


class Load:
    """Both turns of every conversation, on two nodes."""

    def __init__(self, url: str, timeout: int) -> None:
        self.timeouts: Counter[str] = Counter()
        logging.getLogger("lmcache.v1.storage_backend.remote_backend").addFilter(
            executor_cascade.TimeoutCounter(self.timeouts)
        )
        logging.getLogger("lmcache.v1.memory_management").setLevel(
            logging.ERROR
        )  # a full pool warns each time
        self.timeout = timeout
        self.nodes = [executor_cascade.Node(name, url, self.timeouts, timeout) for name in "AB"]
        self.turns: list[Turn] = []
        self.wrong = 0
        self.lock = threading.Lock()

    def first(self, conversation: int) -> None:
        self._reuse(0, conversation)
        self.nodes[0].store(conversation, 0, executor_cascade.CHUNKS)

    def second(self, conversation: int) -> None:
        arrived = time.monotonic()
        tokens = self._reuse(1, conversation)
        took = time.monotonic() - arrived
        with self.lock:
            self.turns.append(Turn(arrived, took, took, tokens))
        if tokens < CACHEABLE:
            self.nodes[1].store(conversation, 0, executor_cascade.CHUNKS)  # recomputed
        self.nodes[1].store(conversation, executor_cascade.CHUNKS, 1)  # what the second turn adds

    def queued(self) -> int:
        """Jobs in both nodes' executors that no worker has begun."""
        return sum(node.executor._queue.qsize() for node in self.nodes)

    def _reuse(self, node: int, conversation: int) -> int:
        name = f"{node}-{conversation}"
        self.nodes[node].lookup(name, conversation, executor_cascade.CHUNKS)
        tokens = self.nodes[node].answer(name, 3.0 * self.timeout)
        wrong = self.nodes[node].take(name, tokens)
        with self.lock:
            self.wrong += wrong
        return tokens


def one(args: argparse.Namespace) -> dict[str, Any]:
    """One timeout."""
    load = Load(f"valkey://127.0.0.1:{args.port}", args.timeout)
    threads: list[threading.Thread] = []

    def start(turn: Any, conversation: int) -> None:
        threads.append(threading.Thread(target=turn, args=(conversation,), daemon=True))
        threads[-1].start()

    arrivals = schedule(args.turns, args.rate, 1, args.think, args.spread, args.seed)
    stalls = Stalls(args.pid, args.stall, args.period)
    queues = Longest(load.queued, executor_cascade.SAMPLE)
    stalls.start()
    queues.start()
    try:
        send(
            [(c.first, partial(start, load.first, c.number)) for c in arrivals]
            + [(c.second, partial(start, load.second, c.number)) for c in arrivals]
        )
        ends = time.monotonic() + 3.0 * args.timeout + 5.0
        for thread in threads:
            thread.join(max(0.0, ends - time.monotonic()))
    finally:
        stalls.end()
        queue_most = queues.end()
    with load.lock:
        turns = list(load.turns)
    found = figures(turns, stalls.intervals, CACHEABLE, float(args.timeout))
    last = [node.sample() for node in load.nodes]
    queue_at_end = load.queued()
    del found["hit_rate_possible"]  # its timeout is of one read; a turn asks for several
    return {
        **found,
        "turns_without_an_answer": args.turns - len(turns),
        "live_workers": sum(int(sample["workers"]) for sample in last),
        "expected_workers": 8,
        "timeouts": load.timeouts["timeouts"],
        "zero_stores": sum(int(sample["zero_stores"]) for sample in last),
        "queue_most": max(queue_most, queue_at_end),
        "queue_at_end": queue_at_end,
        "pinned_at_end": max(sample["pinned"] for sample in last),
        "wrong_chunks": load.wrong,
    }


def main() -> None:
    """Command line of the child process."""
    parser = argparse.ArgumentParser()
    whole = ("turns", "seed", "timeout", "port", "pid")
    for name in (*_PASSED_ON, "spread", "timeout", "stall", "period", "port", "pid"):
        parser.add_argument(f"--{name}", type=int if name in whole else float)
    args = parser.parse_args()
    try:
        print("\n" + orjson.dumps(one(args)).decode(), flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # a dead executor's callers and threads must not keep the process


if __name__ == "__main__":
    main()

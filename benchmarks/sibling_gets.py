"""What do ranks that hold the same pages gain by getting each once and copying the others' out of their memory?

Ranks as processes of this machine over one real Valkey, pages of GLM-5.x's size: every rank wants the same prompt at
once. Two arms in turn: each rank gets all of it (`apart`), or its share (`together`, as a server does). Seconds until the
last rank has everything, bytes that Valkey sent, seconds of CPU; every page is checked against its checksum by the
product, and a sample of them byte for byte here.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import valkey as valkey_client
from glm_connectors.tiers import Namespace, PageLayout, Place, Share, Siblings, TierConfig, TieredStore
from glm_connectors.valkey_store import EmbeddedServer

from benchmarks import _result

PATIENCE_S = 120.0
SAMPLED = 16


def key_of(number: int) -> bytes:
    return hashlib.sha256(f"sibling_gets {number}".encode()).digest()


def content(number: int, size: int) -> Any:
    """A page's bytes."""
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def rank(index: int, args: argparse.Namespace, url: str, space: Namespace, pipe: Any) -> None:
    """A process: a store for each arm, one after the other; answers on `pipe`."""
    slot = space.layout.page_bytes + 1024
    config = TierConfig(url=url, pool_bytes=int(2.2 * args.pages * slot), request_timeout=10.0)
    keys = [key_of(number) for number in range(args.pages)]
    place = Place(Share(index, args.ranks))
    pipe.send(place.address)
    family = Siblings(place, pipe.recv())
    stores = {
        "apart": TieredStore(config, space, writer=False),
        "together": TieredStore(config, space, writer=False, share=place.share, siblings=family),
    }
    while stores["together"].metrics["cache_siblings", "usable"] < args.ranks - 1:
        time.sleep(0.01)
    pipe.send("ready")
    while (arm := pipe.recv()) is not None:
        store = stores[arm]
        before = resource.getrusage(resource.RUSAGE_SELF)
        began = time.monotonic()
        ticket = store.prefetch("r", keys)
        done = ticket.wait(PATIENCE_S)
        seconds = time.monotonic() - began
        after = resource.getrusage(resource.RUSAGE_SELF)
        pages = store.pin(keys)
        wrong = sum(
            not np.array_equal(np.frombuffer(pages[n].view, np.uint8), content(n, space.layout.page_bytes))
            for n in range(0, len(pages), max(1, args.pages // SAMPLED))
        )
        store.release(pages)
        store.cancel("r")
        pipe.send(
            {
                "end": ticket.end if done else "hung",
                "seconds": seconds,
                "pages": len(pages),
                "wrong": wrong,
                "copied": store.metrics["cache_sibling_pages", "copied"],
                "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            }
        )
        pipe.recv()  # all are done: nobody's pages are wanted any more
        store.clear()
    for store in stores.values():
        store.close()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _result.add_arguments(parser)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pages", type=int, default=192, help="of the prompt; 64 tokens each")
    parser.add_argument("--page-bytes", type=int, default=78 * 64 * 656 + 21 * 64 * 132)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    if args.ranks < 2:
        parser.error("--ranks must be at least 2")
    return args


def measure(args: argparse.Namespace, server: EmbeddedServer) -> dict[str, Any]:
    space = Namespace("sibling_gets", "1", "fp8", PageLayout(64, (("kv", args.page_bytes),)))
    slot = args.page_bytes + 1024
    writer = TieredStore(
        TierConfig(url=server.url, pool_bytes=16 * slot, request_timeout=10.0), space, writer=True
    )
    for number in range(args.pages):
        while writer.metrics["cache_save_queue_pages"] >= 4:  # or puts are dropped
            time.sleep(0.001)
        pages = writer.reserve(1)
        assert pages is not None
        pages[0].view[:] = content(number, args.page_bytes).tobytes()
        writer.commit(pages, [key_of(number)])
    while writer.metrics["cache_save_queue_pages"]:
        time.sleep(0.001)
    writer.close()
    client = valkey_client.Valkey(port=server.port)
    if client.dbsize() != args.pages:
        raise SystemExit(f"{client.dbsize()} of {args.pages} pages are in Valkey")
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for index in range(args.ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=rank, args=(index, args, server.url, space, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    addresses = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(addresses)
    for pipe in pipes:
        assert pipe.recv() == "ready"
    rounds: dict[str, list[dict[str, Any]]] = {"apart": [], "together": []}
    for number in range(args.rounds):
        for arm in ("apart", "together")[:: 1 if number % 2 else -1]:
            sent = client.info("stats")["total_net_output_bytes"]
            copied_before = sum(one["copied"] for one in (rounds[arm][-1]["ranks"] if rounds[arm] else []))
            for pipe in pipes:
                pipe.send(arm)
            ranks = [pipe.recv() for pipe in pipes]
            sent = client.info("stats")["total_net_output_bytes"] - sent
            for pipe in pipes:
                pipe.send("go on")
            rounds[arm].append(
                {
                    "seconds": round(max(one["seconds"] for one in ranks), 3),
                    "sent_pages": round(sent / args.page_bytes, 1),
                    "copied_pages": sum(one["copied"] for one in ranks) - copied_before,
                    "cpu_seconds": round(sum(one["cpu_seconds"] for one in ranks), 2),
                    "ranks": ranks,
                }
            )
            time.sleep(0.2)
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join(30)
    result: dict[str, Any] = {
        "ranks": args.ranks,
        "pages": args.pages,
        "tokens": args.pages * 64,
        "gigabytes": round(args.pages * args.page_bytes / 1e9, 3),
        "wrong_pages": sum(one["wrong"] for arm in rounds.values() for each in arm for one in each["ranks"]),
        "incomplete": sum(
            one["pages"] != args.pages for arm in rounds.values() for each in arm for one in each["ranks"]
        ),
    }
    for arm, found in rounds.items():
        result[arm] = {
            name: [each[name] for each in found]
            for name in ("seconds", "sent_pages", "copied_pages", "cpu_seconds")
        }
        result[arm]["median_seconds"] = statistics.median(each["seconds"] for each in found)
    result["times_faster"] = round(
        result["apart"]["median_seconds"] / result["together"]["median_seconds"], 2
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with EmbeddedServer() as server:
        result = measure(args, server)
    _result.finish("sibling_gets", result, args)
    return 0 if not result["wrong_pages"] and not result["incomplete"] else 1


if __name__ == "__main__":
    sys.exit(main())

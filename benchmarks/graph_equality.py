"""Do prefill graphs change what the model says? The same steps from a server with graphs and from ones without.

A small FP8 checkpoint of GLM's structure on one GPU. Every list of prompts is one prefill step (checked against the
servers' logs): at every bucket, one token beside it, several requests, behind cached prefixes, after chunks, and of
random lengths for the rest of the time.

A step's company is part of what eager says: its rows choose the kernels' tiles, and one request of more than 2,048
tokens turns the attention of all from dense to sparse (`_graph_steps`). So eager is asked in four ways, and graph is
held against the first, which computes what the graph does:

  as the graph   with a filler behind the list, for as many rows as the graph pads and for its attention;
  again          the same once more: above 2,048 tokens SGLang's selection is not repeatable to the bit;
  alone          the list as the graph's server got it;
  at the rows    with a filler for the rows only, where the graph's attention is not what eager alone has.

`--reference`: two eager servers in miniature on the reference platform, for the batches and the comparison themselves.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson

from benchmarks import _graph_asks, _result
from benchmarks._graph_asks import Case, Served
from benchmarks._graph_cases import GPU, REFERENCE, Setting, lists, random_sizes
from benchmarks._graph_comparison import Comparison
from benchmarks._idle_steps import captured, prompt
from glm_sglang.serving import Server, ServerError
from glm_sglang.tiny_model.__main__ import main as make_model

SAMPLE = 7  # every so many of the random lists eager is asked in all ways
WINDOW = 128  # random lists between two looks into the logs
LANES = 2  # random lists at once for a server: one at work, one that waits


def arms(setting: Setting, eager: int) -> dict[str, list[str]]:
    """Flags of each server; "verified" only has to start."""
    off, on = [], []
    if setting.graphs:
        off = ["--glm-prefill-graph", "off", "--cuda-graph-backend-prefill", "disabled"]
        buckets = ",".join(map(str, setting.rules.plan.buckets))
        on = ["--glm-prefill-graph", "strict", "--glm-prefill-graph-buckets", buckets]
    found = {"ours": on} | {f"eager{number}": off for number in range(eager)}
    return found | ({"verified": [*on, "--glm-verify-graphs"]} if setting.graphs else {})


def ask_all(
    found: Comparison, cases: Iterable[tuple[Case, bool]], ours: Served, eager: Sequence[Served], lanes: int
) -> None:
    """One window of cases, each with whether eager is asked in all ways."""
    roles = [found.asks(case, ours, eager[case.number % len(eager)], every_way) for case, every_way in cases]
    _graph_asks.run([ask for each in roles for ask in each.values()], found.setting.rules, lanes)
    for each in roles:
        found.take(each)


def compare_lists(found: Comparison, ours: Served, eager: Sequence[Served]) -> None:
    """All lists that are not random, one at a time for each server."""
    cases = [
        Case(number=number, kind=kind, prompts=tuple(map(tuple, prompts)), prefix=tuple(prefix))
        for number, (kind, prompts, prefix) in enumerate(lists(found.setting))
    ]
    ask_all(found, [(case, True) for case in cases], ours, eager, lanes=1)


def compare_random(
    found: Comparison, ours: Served, eager: Sequence[Served], seconds: float, note: Callable[[], None]
) -> dict[str, Any]:
    """Lists of random lengths, a token each, until the time is over; how many steps that were."""
    rng = random.Random("lengths")
    before, began, number = (ours.made, ours.replayed), time.monotonic(), 0
    result: dict[str, Any] = {}
    while time.monotonic() < began + seconds:
        window = []
        for _ in range(WINDOW if found.setting.graphs else 8):
            sizes = random_sizes(rng, found.setting.room)
            ids = tuple(tuple(prompt(f"random{number}.{i}", size)) for i, size in enumerate(sizes))
            case = Case(
                number=number,
                kind="random lengths",
                prompts=ids,
                keep=2 if number % SAMPLE else 64,
                new_tokens=1,
            )
            window.append((case, number % SAMPLE == 0))
            number += 1
        ask_all(found, window, ours, eager, LANES)
        took = time.monotonic() - began
        made, replayed = ours.made - before[0], ours.replayed - before[1]
        result = {
            "lists": number,
            "steps": made,
            "replayed": replayed,
            "seconds": round(took, 1),
            "steps_per_second": round(made / took, 1),
        }
        note()
    return result


def passes(arm: Served) -> dict[str, float]:
    """`glm_sglang:prefill_graph_eager_total` by reason and SGLang's passes by mode, from /metrics."""
    found: dict[str, float] = {}
    for line in httpx.get(arm.server.url + "/metrics", timeout=20.0, trust_env=False).text.splitlines():
        if line.startswith(("glm_sglang:prefill_graph_eager_total{", "sglang:cuda_graph_passes_total{")):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def verified(log: Path) -> list[str]:
    """What `--glm-verify-graphs` logged of each bucket."""
    return re.findall(r"prefill graph: verified (.*)", log.read_text(errors="replace"))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _result.add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=60.0, help="time for prompts of random lengths")
    parser.add_argument("--start-seconds", type=float, default=300.0)
    parser.add_argument(
        "--eager-servers", type=int, default=4, help="they bound the rate: an eager step is slow"
    )
    parser.add_argument("--reference", action="store_true", help="in miniature, on the reference platform")
    parser.add_argument("--out", default="", help="folder for partial results and logs")
    parser.add_argument("--extra", default="", help="further server flags for all")
    args = parser.parse_args(argv)
    if args.eager_servers < 1:
        parser.error("--eager-servers must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    setting = REFERENCE if args.reference else GPU
    out = Path(args.out or tempfile.mkdtemp(prefix="graph-equality-"))
    out.mkdir(parents=True, exist_ok=True)
    model = Path(tempfile.mkdtemp(prefix="graph-equality-model-"), "model")
    if make_model([str(model), *setting.model]):
        return 1
    chunk = f"--chunked-prefill-size={setting.chunk}"
    flags = [*setting.flags, chunk, "--sampling-backend=pytorch", "--skip-server-warmup", "--enable-metrics"]
    platform = {"GLM_SGLANG_PLATFORM": "reference"} if args.reference else {}

    def served(name: str, own: list[str]) -> Served:
        every = [*flags, *args.extra.split(), *own]
        return Served(
            name, Server(model, every, name=name, log=out / f"{name}.log", env=platform), setting.gap_s
        )

    found = {name: served(name, own) for name, own in arms(setting, args.eager_servers).items()}
    comparison = Comparison(setting)
    result: dict[str, Any] = {"buckets": setting.rules.plan.buckets}

    def note() -> None:
        whole = result | comparison.report()
        (out / "graph_equality.json").write_bytes(orjson.dumps(whole, option=orjson.OPT_INDENT_2))

    def up(arm: Served) -> bool:
        try:
            arm.server.wait_ready()
        except ServerError as error:
            result.setdefault("not_up", {})[arm.name] = str(error)[-4000:]
        note()
        return arm.name not in result.get("not_up", {})

    try:
        for arm in found.values():
            arm.server.ready_timeout_s = args.start_seconds
            arm.server.ready_path = "/model_info"
            arm.server.start()
            time.sleep(2.0)
        ours, eager = found["ours"], [arm for name, arm in found.items() if name.startswith("eager")]
        ready = [up(arm) for arm in (ours, *eager)]
        if all(ready):
            result["capture"] = captured(ours.server.log)
            began = time.monotonic()
            compare_lists(comparison, ours, eager)
            result["lists_seconds"] = round(time.monotonic() - began, 1)
            note()
        if "verified" in found:  # it shares the GPU: away with it before steps are counted by the second
            up(found["verified"])
            result["verified"] = verified(found["verified"].server.log)
            found["verified"].server.stop()
        if all(ready):
            result["random"] = compare_random(comparison, ours, eager, args.seconds, note)
            result["passes"] = passes(ours)
    finally:
        for arm in found.values():
            arm.server.stop()
    note()
    _result.finish(
        "graph_equality", result | comparison.report(), args, device="cpu" if args.reference else None
    )
    return 1 if "not_up" in result else 0


if __name__ == "__main__":
    sys.exit(main())

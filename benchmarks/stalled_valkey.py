"""Two-turn conversations over two prefill servers while their Valkey stops for a part of every period.

Turn one of a conversation is prefilled by server A, turn two by server B: what B reuses it can only have from Valkey.
One real Valkey server is stopped (SIGSTOP) for 1.5 s of every 5 s. Turns arrive on a seeded Poisson schedule, whether
or not others have been answered, so stalls meet their share of them; hits and times of those that arrive during a
stall stand apart. The same arrivals without stalls stand beside it, and LMCache's own parts, unrepaired, under the
same arrivals and stalls (`_stalled_lmcache`: storage manager, executor, connector, without a model).

`--beside WAIT` measures further `--glm-cache-wait` in the same run: a server B each, asked the same turns at the same
moments. The first B, and A, have the server's default, or `--wait`.

Checked: every page that was loaded has the bytes under which some server saved it; sampled answers are transformers';
servers B, some of which miss where others hit, answer alike. What the cache's calls take of a step of the scheduler's
thread is the upper bound of the histogram's bucket that holds p99, of the worst server: without the time in which the
thread could run and had no core (`scheduler_stall_p99_ms`), and with it (`…by_the_wall…`). The article's two signals
stand with every run, ours and LMCache's: stores of nothing (`zero_stores`), and the jobs in executors' queues, the most
that was seen and at the run's end. Servers, clients and Valkey share the machine.

`--sweep TURNS` instead: stall length, conversations together, deadline; with `--save` also its plot.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import Any

from benchmarks import _result, _stalled_lmcache, _stalled_signals, _stalled_sweep
from benchmarks._stalled_servers import Bench, deadline_s


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both runs on the same servers, then LMCache's."""
    waits = [args.wait, *(wait for wait in args.beside if wait != args.wait)]
    runs: dict[str, Any] = {}
    with ExitStack() as stack:
        bench = Bench(args, stack, waits)
        for name, stall, salt in (("no_stall", 0.0, 1), ("stalled", args.stall, 2)):
            print(f"stalled_valkey: {name}", file=sys.stderr, flush=True)
            runs[name] = bench.run(
                args, turns=args.turns, stall=stall, together=args.together, salt=salt, oracle=True
            )
            print(f"  {runs[name]}", file=sys.stderr, flush=True)
        pages = bench.check_pages()
    stalled, no_stall = runs["stalled"]["by_wait"][args.wait], runs["no_stall"]["by_wait"][args.wait]
    result: dict[str, Any] = {
        "hit_rate_second_half": stalled["hit_rate_second_half"],
        "hit_rate_no_stall": no_stall["hit_rate"],
        "scheduler_stall_p99_ms": max(run["scheduler_stall_p99_ms"] for run in runs.values()),
        "scheduler_stall_by_the_wall_p99_ms": max(
            run["scheduler_stall_by_the_wall_p99_ms"] for run in runs.values()
        ),
        **_stalled_signals.worst(list(runs.values())),
        **pages,
        "wait": args.wait,
        "deadline_s": deadline_s(args.wait),
        "ttft_max_s": stalled["ttft_s"]["max"],
        "conversations_per_second": args.rate,
        "think_s": [args.think, args.think + args.period],
        "stall_s": args.stall,
        "period_s": args.period,
        "pages_a_prompt": args.pages,
        **runs,
    }
    if args.lmcache:
        result["lmcache_unrepaired"] = _stalled_lmcache.measure(args)
    return result


def main() -> None:
    """Command line."""
    from glm_sglang import settings

    default = settings.CACHE_WAIT.default
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--turns", type=int, default=300, help="conversations of each run, so as many second turns")
    add("--rate", type=float, default=3.0, help="conversations a second, on average")
    add("--together", type=int, default=1, help="conversations that arrive at the same moment")
    add(
        "--think",
        type=float,
        default=3.0,
        help="seconds from turn one to turn two, at least; at most a period more",
    )
    add("--pages", type=int, default=4, help="pages of a first turn")
    add("--stall", type=float, default=1.5, help="seconds of every period that Valkey is stopped")
    add("--period", type=float, default=5.0, help="seconds")
    add("--wait", default=default, help=f"--glm-cache-wait of the servers (default: theirs, {default})")
    add("--beside", nargs="*", default=[], metavar="WAIT", help="--glm-cache-wait of further servers B")
    add("--seed", type=int, default=0, help="of the arrivals")
    add("--no-lmcache", dest="lmcache", action="store_false", help="leave LMCache's run out")
    add("--sweep", type=int, default=0, metavar="TURNS", help="measure the sweep instead, TURNS a point")
    _result.add_arguments(parser)
    args = parser.parse_args()
    if not args.sweep:
        _result.finish("stalled_valkey", measure(args), args)
        return
    result = _stalled_sweep.measure(args)
    _result.finish("stalled_valkey_sweep", result, args, module="benchmarks.stalled_valkey")
    if args.save:
        path = _result.RESULTS / _result.machine()[0] / "stalled_valkey_sweep.png"
        _stalled_sweep.plot(result, str(path))


if __name__ == "__main__":
    main()

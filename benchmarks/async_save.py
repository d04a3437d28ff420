"""Does saving pages cost a prefill step anything, and does loading them cost less than computing them again?

Two parts, each with a time of its own, and written to `--out` as they go. `copies`: the copies by themselves, true
GLM-5.x pages, no server: GB/s against a plain pinned copy, every page's bytes after save, eviction and load, a load under
a forward and what its launch waits for it. `servers`: prefill steps at 4k and 16k tokens with the cache off, with ours,
and with synchronous saves a chunk as LMCache makes them, and the scheduler's stalls of those alone; lone prompts of 4k
tokens that miss; loads of 32k and 128k tokens against recomputing them, and what their launches wait; last, busy shares
from traces. What had no time is in `skipped`. `targets` and `missed` hold all of it against what was to be reached
(`_async_save_judge`; "holds": null is not judged, and says why); a target that is missed does not change the exit status.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks import _async_save_judge, _result


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _result.add_arguments(parser)
    parser.add_argument("--parts", default="copies,servers")
    parser.add_argument("--pages", type=int, default=2048, help="of the copies' pool; 128k tokens by default")
    parser.add_argument("--copies-seconds", type=float, default=90.0, help="time box")
    parser.add_argument("--arms", default="off,ours,sync")
    parser.add_argument("--url", default="embedded://", help="of the arm with our cache (--glm-cache-url)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=360.0, help="time box once the servers are up")
    parser.add_argument(
        "--copy-gb-s",
        type=float,
        default=50.4,
        help="of a load by itself, where `copies` is not of this run (default %(default)s, of one H200)",
    )
    parser.add_argument(
        "--start-seconds", type=float, default=240.0, help="longest wait for a server, from its start"
    )
    parser.add_argument(
        "--hold", type=float, default=0.0, help="seconds from the start in which others use the GPU"
    )
    parser.add_argument(
        "--until", type=float, default=3600.0, help="seconds from the start after which nothing is begun"
    )
    parser.add_argument("--extra", default="", help="further server flags for every arm")
    parser.add_argument("--out", default="", help="folder for partial results and logs")
    args = parser.parse_args(argv)
    args.began = time.monotonic()
    return args


class Result:
    """What is known so far, in a file that is always whole."""

    def __init__(self, out: Path) -> None:
        self.values: dict[str, Any] = {}
        self._path = out / "async_save.json"
        self._began = time.monotonic()

    def put(self, **values: Any) -> None:
        """Adds, writes, and tells whoever waits."""
        self.values |= values
        self.values["seconds"] = round(time.monotonic() - self._began, 1)
        staging = self._path.with_suffix(".tmp")
        staging.write_bytes(orjson.dumps(self.values, option=orjson.OPT_INDENT_2))
        staging.replace(self._path)
        print(f"[{self.values['seconds']:6.1f} s] {', '.join(values)}", file=sys.stderr, flush=True)


def left(seconds: float, args: argparse.Namespace) -> Callable[[], float]:
    """Seconds left of a box that begins now, or until nothing more is begun."""
    ends = min(time.monotonic() + seconds, args.began + args.until)
    return lambda: ends - time.monotonic()


def copies(args: argparse.Namespace, result: Result) -> None:
    """The part without a server."""
    from benchmarks import _page_copies

    found: dict[str, Any] = {}

    def note(name: str, value: Any) -> None:
        found[name] = value
        result.put(copies=found)

    _page_copies.measure(note, left(args.copies_seconds, args), args.pages)
    plain, saves = found.get("plain_copy"), found.get("save_16k_tokens")
    if isinstance(plain, dict) and isinstance(saves, dict):
        result.put(
            d2h_share_of_plain_copy=round(saves["ours_gb_s"] / plain["d2h_gb_s"], 4),
            d2h_share_of_plain_copy_upstream=round(saves["upstream_chunks_gb_s"] / plain["d2h_gb_s"], 4),
        )


def servers(args: argparse.Namespace, result: Result, out: Path) -> None:
    """The part with servers."""
    from benchmarks import _cache_servers

    model = Path(tempfile.mkdtemp(prefix="async-save-model-"))
    began = time.monotonic()
    size = _cache_servers.write_model(model, args.layers)
    result.put(model_gb=round(size / 1e9, 2), model_seconds=round(time.monotonic() - began, 1))
    began = time.monotonic()
    flags = _cache_servers.arm_flags(args.url)
    arms, failed = _cache_servers.start(
        {name: [*flags[name], *args.extra.split()] for name in args.arms.split(",")},
        model,
        out,
        args.start_seconds,
    )
    try:
        result.put(
            copy_gb_s_stated=args.copy_gb_s, up_seconds=round(time.monotonic() - began, 1), layers=args.layers
        )
        if failed:
            result.put(not_up=failed)
        time.sleep(max(0.0, args.began + args.hold - time.monotonic()))

        def note() -> None:
            result.put(**_cache_servers.headline(arms), arms={arm.name: arm.result for arm in arms})

        _cache_servers.measure(arms, note, left(args.seconds, args))
        note()
    finally:
        for arm in arms:
            arm.server.stop()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    out = Path(args.out or tempfile.mkdtemp(prefix="async-save-"))
    out.mkdir(parents=True, exist_ok=True)
    result = Result(out)
    parts = args.parts.split(",")
    if "copies" in parts:
        copies(args, result)
        import torch

        torch.cuda.empty_cache()  # the servers share the GPU with this process
    if "servers" in parts:
        servers(args, result, out)
    found = _async_save_judge.targets(result.values)
    result.put(targets=found, missed=_async_save_judge.missed(found))
    for line in result.values["missed"]:
        print(f"missed: {line}", file=sys.stderr)
    _result.finish("async_save", result.values, args)
    print(f"partial results and logs: {out}", file=sys.stderr)
    return 0 if "not_up" not in result.values else 1


if __name__ == "__main__":
    sys.exit(main())

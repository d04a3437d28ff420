"""The workloads by name, and the flags that size them."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.workloads.conversations import LongAgent, LongContext, Mixed, TwoTurn
from benchmarks.workloads.model import Workload
from benchmarks.workloads.mooncake import Mooncake
from benchmarks.workloads.text import Text

WORKLOADS = {
    "two_turn": "chat of two turns over real text; the second repeats the first and adds a little",
    "long_context": "one turn of each of --lengths",
    "mixed": "lengths between the first and the last of --lengths behind one shared system prompt",
    "mooncake": "a trace in Mooncake's format (--trace)",
    "long_agent": "GLM-5-style agent turns: 64k in, 400 out, 90 % seen before (scaled by the flags)",
}


def tokens(text: str) -> int:
    """`16k` or `16384` as a number of tokens. Raises ArgumentTypeError."""
    digits, scale = (text[:-1], 1024) if text.lower().endswith("k") else (text, 1)
    if not digits.isdigit() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; allowed: 4096, 4k, …")
    return int(digits) * scale


def lengths(text: str) -> list[int]:
    """`4k,16k` as numbers of tokens."""
    return [tokens(part) for part in text.split(",")]


def share(text: str) -> float:
    """A share between 0 and 1, both apart."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no share; it must lie between 0 and 1")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of every workload; which ones matter to which, the help says."""
    names = ", ".join(WORKLOADS)
    group = parser.add_argument_group("workload")
    group.add_argument("--workload", choices=WORKLOADS, default="two_turn", help=f"{names} (two_turn)")
    group.add_argument(
        "--sessions", type=int, default=4, help="sessions a round; a length, for long_context (4)"
    )
    group.add_argument(
        "--prompt-tokens", type=tokens, help="two_turn, long_agent: prompt length (16k; 64k for long_agent)"
    )
    group.add_argument("--added-tokens", type=tokens, default=256, help="two_turn: what turn 2 adds (256)")
    group.add_argument("--answer-tokens", type=tokens, help="tokens of every answer (32; 400 for long_agent)")
    group.add_argument(
        "--turns-apart", action="store_true", help="two_turn: all first turns, then all second"
    )
    group.add_argument(
        "--lengths", type=lengths, default=lengths("4k,16k,64k,128k"), help="(4k,16k,64k,128k)"
    )
    group.add_argument("--system-tokens", type=tokens, default=2048, help="mixed: shared system prompt (2k)")
    group.add_argument("--hit-share", type=share, default=0.9, help="long_agent: share seen before (0.9)")
    group.add_argument("--prefix-sessions", type=int, default=4, help="long_agent: sessions a prefix (4)")
    group.add_argument("--trace", type=Path, help="mooncake: the trace's file")
    group.add_argument("--trace-limit", type=int, help="mooncake: so many requests of it")
    group.add_argument("--time-scale", type=float, default=1.0, help="mooncake: 2 replays at half speed (1)")
    group.add_argument("--length-scale", type=float, default=1.0, help="mooncake: 0.1 shrinks lengths (1)")
    group.add_argument("--text", nargs="+", default=[], metavar="FILE", help="another corpus than CPython's")
    group.add_argument(
        "--bytes-per-token", type=float, help="instead of asking the first endpoint what it counts"
    )
    group.add_argument("--seed", type=int, default=1, help="of lengths, order and arrivals (1)")


def build(args: argparse.Namespace, bytes_per_token: float) -> Workload:
    """The workload that the flags describe. Raises ValueError that names the flag to change."""
    for flag in ("sessions", "prefix_sessions"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}; it must be at least 1")
    text = Text(bytes_per_token, args.text)
    seed, sessions = args.seed, args.sessions
    answer = args.answer_tokens or (400 if args.workload == "long_agent" else 32)
    match args.workload:
        case "two_turn":
            prompt = args.prompt_tokens or 16384
            return TwoTurn(text, seed, sessions, prompt, args.added_tokens, answer, args.turns_apart)
        case "long_context":
            return LongContext(text, seed, sessions, args.lengths, answer)
        case "mixed":
            between = (min(args.lengths), max(args.lengths))
            return Mixed(text, seed, sessions, args.system_tokens, between, answer)
        case "long_agent":
            prompt = args.prompt_tokens or 65536
            return LongAgent(text, seed, sessions, prompt, answer, args.hit_share, args.prefix_sessions)
    if args.trace is None:
        raise ValueError("--trace is not given; --workload mooncake needs a trace's file")
    return Mooncake(text, seed, args.trace, args.trace_limit, args.time_scale, args.length_scale)

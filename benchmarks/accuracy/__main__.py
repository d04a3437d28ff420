"""Asks two OpenAI endpoints the same questions: share of right answers, McNemar's exact p, share of equal answers.

    python -m benchmarks.accuracy --suite gsm8k --a http://127.0.0.1:30000 --b http://127.0.0.1:30001 --json
    python -m benchmarks.accuracy --suite needle --lengths 4k,32k,128k --a URL --b URL -o needle.jsonl

GSM8K comes from --data, or from the Hugging Face cache that lm_eval fills. GLM-5 reasons before it answers: --api chat
leaves --thinking-tokens for that, or asks it not to with --no-thinking. Started again with the same flags and -o it
asks only what is missing: of a server that was started again, everything. Where an endpoint does not tell one start from
the next (SGLang's /server_info does, and process_start_time_seconds on /metrics), it takes --resume.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import httpx

from benchmarks import _result
from benchmarks.ab.client import Client
from benchmarks.ab.comparison import calibrate, run_async
from benchmarks.ab.endpoints import SpecError, parse_url
from benchmarks.ab.running import Endpoint, EndpointError, served_on
from benchmarks.accuracy.asking import How, Notebook, ask_both, pairs
from benchmarks.accuracy.identity import identity
from benchmarks.accuracy.paired import UNDECIDED, compare
from benchmarks.accuracy.suites import Question, SuiteError, gsm8k, needle
from benchmarks.workloads.catalogue import lengths
from benchmarks.workloads.text import Text

SUITES = ("gsm8k", "needle")
_POWERS = [4096 << i for i in range(9)]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--suite", choices=SUITES, action="append", required=True, help="several are allowed")
    p.add_argument("--a", required=True, metavar="URL", help="the reference")
    p.add_argument("--b", required=True, metavar="URL", help="what is compared with it")
    p.add_argument("--a-model", default="", help="the model's name at --a (the first it lists)")
    p.add_argument("--b-model", default="", help="the same at --b")
    p.add_argument("--api", choices=("chat", "completions"), default="chat")
    p.add_argument("--data", type=Path, help="gsm8k: JSONL of question and answer")
    p.add_argument("--shots", type=Path, help="gsm8k: the same for the worked examples")
    p.add_argument("--lengths", type=lengths, help="needle (4k, doubled up to the smaller context limit)")
    p.add_argument("--depths", type=_shares, default=[0.0, 0.25, 0.5, 0.75, 1.0], help="needle (0,0.25,…,1)")
    p.add_argument("--limit", type=int, help="so many questions a suite")
    p.add_argument("--max-tokens", type=int, help="of an answer alone (gsm8k 1024, needle 64)")
    thinking = p.add_mutually_exclusive_group()
    thinking.add_argument(
        "--thinking-tokens", type=_room, default=4096, help="of reasoning before an answer, in chat (4096)"
    )
    thinking.add_argument(
        "--no-thinking", action="store_true", help="chat: ask for answers without reasoning"
    )
    p.add_argument("--concurrency", type=int, default=8, help="questions at once, each side (8)")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--bytes-per-token", type=float, help="instead of asking --a what it counts")
    p.add_argument("-o", "--output", type=Path, default=Path("accuracy.jsonl"), help="(accuracy.jsonl)")
    p.add_argument(
        "--resume",
        action="store_true",
        help="count the answers in --output whichever server gave them at the URL; without it, those of the server "
        "that runs there now",
    )
    _result.add_arguments(p)
    return p


def _shares(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"{text} must be between 0 and 1")
    return values


def _room(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be 1 or more; --no-thinking asks for no reasoning")
    return value


def context_limit(endpoints: list[Endpoint]) -> int:
    """The smaller `max_model_len` of both. Raises SuiteError where none says it."""
    found = []
    for endpoint in endpoints:
        listed = httpx.get(f"{endpoint.url}/v1/models", timeout=60, trust_env=False).json()["data"]
        found += [
            one["max_model_len"] for one in listed if one["id"] == endpoint.model and one.get("max_model_len")
        ]
    if not found:
        raise SuiteError("--lengths is not given, and neither endpoint says its max_model_len")
    return int(min(found))


def questions(args: argparse.Namespace, suite: str, endpoints: list[Endpoint], how: How) -> list[Question]:
    """All of a suite. Raises SuiteError, EndpointError."""
    if suite == "gsm8k":
        return list(gsm8k(args.data, args.shots, args.limit, args.max_tokens or 1024, args.seed))
    sizes = args.lengths
    if sizes is None:
        limit = context_limit(endpoints)
        sizes = [size for size in _POWERS if size < limit] + [limit]
    text = Text(args.bytes_per_token or calibrate(endpoints[0], []))
    return list(needle(text, sizes, args.depths, args.limit, args.max_tokens or 64, args.seed, how.room))


def _same_servers(servers: dict[str, str]) -> None:
    """Raises EndpointError where another server answers by now than the one that this run began with."""
    if changed := [url for url, before in servers.items() if before and identity(url) != before]:
        raise EndpointError(
            f"{' and '.join(changed)}: by what it says of itself not the server that this run began with; ask again"
        )


def _reused(had: dict[str, int], questions: int, args: argparse.Namespace) -> str:
    """What to say of answers that were not asked for now; "" for none."""
    if not any(had.values()):
        return ""
    given = "whichever server gave them (--resume)" if args.resume else "of the same servers"
    return f"{had['a']} and {had['b']} of {questions} answers are from {args.output}, {given}. "


def _needs_resume(servers: dict[str, str]) -> str:
    silent = [url for url, found in servers.items() if not found]
    return f" with --resume: {' and '.join(silent)} can't be told from another start" if silent else ""


def main() -> int:
    """Exit status: 0 when every suite is decided, 1 when one is not (a question failed, too few are right), 2 for the
    flags.
    """
    args = parser().parse_args()
    servers: dict[str, str] = {}
    try:
        endpoints = []
        for url, model in ((args.a, args.a_model), (args.b, args.b_model)):
            endpoint = Endpoint(parse_url(url))
            endpoint.model = model
            endpoint.start()
            endpoints.append(endpoint)
        clients = {side: Client(e.url, e.model) for side, e in zip(("a", "b"), endpoints, strict=True)}
        args.output.parent.mkdir(parents=True, exist_ok=True)
        servers = {client.url: identity(client.url) for client in clients.values()}
        notebook, suites = Notebook(args.output, servers, any_server=args.resume), {}
        if notebook.others:
            print(
                f"{notebook.others} answers in {args.output} are of servers that ran at these URLs before, or can't be "
                "told from them, and don't count (--resume counts them)",
                file=sys.stderr,
            )
        how = How(args.api, None if args.no_thinking else args.thinking_tokens)
        for suite in dict.fromkeys(args.suite):
            asked = questions(args, suite, endpoints, how)
            had = run_async(ask_both(clients, asked, notebook, how, args.concurrency))
            _same_servers({} if args.resume else servers)
            suites[suite] = compare(suite, *pairs(clients, asked, notebook, how)) | {"reused": had}
            print(_reused(had, len(asked), args), suites[suite]["says"], sep="", file=sys.stderr)
    except (SpecError, SuiteError) as error:
        print(error, file=sys.stderr)
        return 2
    except (EndpointError, httpx.HTTPError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            f"\nstopped; the same command goes on from {args.output}{_needs_resume(servers)}", file=sys.stderr
        )
        return 130
    absent = [f"accuracy: {name} was not asked" for name in SUITES if name not in suites]
    result = {
        "suites": suites,
        "endpoints": {
            side: f"{e.url}, {e.model}" + (f", {e.about['version']}" if "version" in e.about else "")
            for side, e in zip(("a", "b"), endpoints, strict=True)
        },
        "api": args.api,
        "thinking_tokens": how.thinking if args.api == "chat" else None,
        "seed": args.seed,
        "answers": args.output.name,
        "not_measured": absent,
    }
    _result.finish("accuracy", result, args, device=served_on(endpoints))
    return 1 if any(found["verdict"].startswith(UNDECIDED) for found in suites.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

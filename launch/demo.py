"""`make demo`: prefill, decode and router on this machine, a two-turn chat over real text, and a table of what happened.

Nothing here is special to the demo: the same launcher, flags and router as on a GPU node, on free ports, with a small
GLM-5.3-shaped checkpoint that is made on the spot. DEMO_KEEP=1 leaves it serving until Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import orjson
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from glm_sglang.cluster import Cluster
from glm_sglang.serving import ServerError, group_members

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".demo"
REPORT = ROOT / "demo-report.json"
#: The demo's real text: the licence of this project, about 2,600 bytes of it; the tokenizer makes a token of each byte.
TEXT_BYTES = 2600
QUESTIONS = ("What does this text allow me to do?", "And what must I do in return?")
ANSWER_TOKENS = 48
#: The FP8 checkpoint dequantised to float32: on a CPU twice as fast as bfloat16, and nothing is rounded.
SERVER_ARGS = (
    *("--served-model-name", "glm-5.3-tiny", "--dtype", "float32"),
    *("--enable-cache-report", "--skip-server-warmup"),
)

console = Console(stderr=False)


@dataclass(frozen=True)
class Turn:
    """One turn as the client saw it. Seconds are wall-clock from sending the request."""

    turn: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    answer: str


class MemoryWatch(threading.Thread):
    """Highest sum of proportional set sizes of the cluster's processes, sampled every 8 seconds.

    Not more often: a sample takes the kernel a good part of a second, on the cores that the servers need.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self.cluster = cluster
        self.peak_bytes = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(8):
            groups = [process.pid for process in self.cluster.processes if process.alive]
            now = sum(_pss(pid) for group in groups for pid in group_members(group))
            self.peak_bytes = max(self.peak_bytes, now)


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def checkpoint() -> Path:
    """The demo's model, made the first time."""
    from glm_sglang.tiny_model.__main__ import main as make

    path = WORK / "model"
    if make([str(path), "--dtype", "fp8"]) != 0:
        raise SystemExit(1)
    return path


def start(cluster: Cluster) -> None:
    """Starts everything, with a line a process that shows what it is doing."""
    states = {process.name: Text("starting", "yellow") for process in cluster.processes}
    began = time.monotonic()

    def draw() -> Table:
        table = Table.grid(padding=(0, 2))
        for process in cluster.processes:
            table.add_row(f"  {process.name}", process.url, states[process.name])
        table.add_row("", f"{time.monotonic() - began:.0f} s", "")
        return table

    with Live(draw(), console=console, refresh_per_second=4) as live:

        def report(name: str, seconds: float, line: str) -> None:
            for process in cluster.processes:
                if process.name == name:
                    break
                states[process.name] = Text("ready", "green")
            states[name] = Text(line[:90], "yellow")
            live.update(draw())

        cluster.progress = report
        cluster.start()
        for name in states:
            states[name] = Text("ready", "green")
        live.update(draw())


def ask(client: httpx.Client, number: int, messages: list[dict[str, str]]) -> Turn:
    """Streams one turn through the OpenAI API and appends the answer to `messages`."""
    body = {
        "model": "glm-5.3-tiny",
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer, first, usage = "", 0.0, {}
    sent = time.monotonic()
    console.print(f"\n[bold]turn {number}[/bold]  {messages[-1]['content'][-60:]!r}")
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"HTTP {response.status_code}: {response.read().decode()[:500]}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = orjson.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    first = first or time.monotonic()
                    answer += piece
                    console.print(piece, end="", highlight=False, markup=False)
    ended = time.monotonic()
    console.print()
    if not first:
        raise RuntimeError("the answer is empty")
    messages.append({"role": "assistant", "content": answer})
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Turn(
        turn=number,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=cached,
        output_tokens=usage["completion_tokens"],
        ttft_s=round(first - sent, 3),
        prefill_tokens_per_s=round((usage["prompt_tokens"] - cached) / (first - sent), 1),
        decode_tokens_per_s=round((usage["completion_tokens"] - 1) / max(ended - first, 1e-9), 1),
        answer=answer,
    )


def show(turns: list[Turn], first_answer_s: float, memory_bytes: int) -> None:
    """The table, and the same as demo-report.json."""
    table = Table(title="two turns through prefill → NIXL → decode")
    for name in ("turn", "prompt tokens", "cached tokens", "TTFT s", "prefill tokens/s", "decode tokens/s"):
        table.add_column(name, justify="right")
    for turn in turns:
        numbers = (turn.turn, turn.prompt_tokens, turn.cached_tokens, turn.ttft_s)
        table.add_row(*map(str, numbers), str(turn.prefill_tokens_per_s), str(turn.decode_tokens_per_s))
    console.print()
    console.print(table)
    report = {
        "turns": [asdict(turn) for turn in turns],
        "seconds_from_start_to_first_token": round(first_answer_s, 1),
        "peak_memory_gib": round(memory_bytes / 2**30, 2),
    }
    REPORT.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    console.print(
        f"first token {report['seconds_from_start_to_first_token']} s after the start, "
        f"peak memory {report['peak_memory_gib']} GiB; the same numbers: {REPORT.name}"
    )


def keep(cluster: Cluster) -> None:
    """Serves until interrupted."""
    body = '{"model": "glm-5.3-tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}'
    console.print("\nserving until Ctrl-C:", style="bold")
    console.print(
        f"curl {cluster.url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        soft_wrap=True,
        highlight=False,
    )
    signal.pause()


def main() -> int:
    # SIGTERM ends the demo as Ctrl-C does, and Ctrl-C also where a shell ignored SIGINT: through `finally`,
    # which leaves no process behind.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    text = (ROOT / "LICENSE").read_text()[:TEXT_BYTES]
    model = checkpoint()
    cluster = Cluster(model, prefill_args=SERVER_ARGS, decode_args=SERVER_ARGS, logs=WORK / "logs")
    watch = MemoryWatch(cluster)
    try:
        watch.start()
        start(cluster)
        messages = [{"role": "user", "content": f"{text}\n\n{QUESTIONS[0]}"}]
        with httpx.Client(base_url=cluster.url, timeout=120, trust_env=False) as client:
            ready = time.monotonic()
            turns = [ask(client, 1, messages)]
            messages.append({"role": "user", "content": QUESTIONS[1]})
            turns.append(ask(client, 2, messages))
        show(turns, ready - began + turns[0].ttft_s, watch.peak_bytes)
        if os.environ.get("DEMO_KEEP") == "1":
            keep(cluster)
    except ServerError as error:
        console.print(f"[red]{error}", highlight=False)
        return 1
    except (RuntimeError, httpx.HTTPError) as error:
        console.print(
            f"[red]the request failed: {error}\nthe servers' logs: {WORK / 'logs'}", highlight=False
        )
        return 1
    except KeyboardInterrupt:
        console.print("\nstopping")
        return 130
    finally:
        watch.done.set()
        cluster.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

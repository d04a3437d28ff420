"""`make demo`: prefill, decode and router on this machine, a two-turn chat over real text, and a table of what happened.

Nothing here is special to the demo: the same launcher, flags and router as on a GPU node, on free ports, with a small
GLM-5.3-shaped checkpoint that is made on the spot. DEMO_KEEP=1 leaves it serving until Ctrl-C. Between the turns,
DEMO_RESTART=valkey pushes turn 1 out of a small device pool and restarts Valkey, empty: turn 2 has its hits from the
CPU pool. DEMO_RESTART=prefill restarts prefill, whose device and pool are empty then: turn 2 has them from Valkey.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import orjson
import psutil
from glm_connectors.valkey_store import EmbeddedServer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from glm_sglang import settings
from glm_sglang.cluster import Cluster
from glm_sglang.serving import ServerError

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".demo"
REPORT = ROOT / "demo-report.json"
#: The demo's real text: the licence of this project, about 2,600 bytes of it; the tokenizer makes a token of each byte.
TEXT_BYTES = 2600
QUESTIONS = ("What does this text allow me to do?", "And what must I do in return?")
ANSWER_TOKENS = 48
PAGE = 64
#: The FP8 checkpoint dequantised to float32: on a CPU twice as fast as bfloat16, and nothing is rounded.
SERVER_ARGS = (
    *("--served-model-name", "glm-5.3-tiny", "--dtype", "float32"),
    *("--enable-cache-report", "--skip-server-warmup"),
)

#: What the prefill node has besides: a CPU pool, and Valkey by `embedded://`, which ends with the server that started it:
#: where one of the two is restarted, the demo itself starts a Valkey that outlives prefill.
CACHE_ARGS = ("--glm-cache-pool-gb", "0.5", "--glm-cache-wait", "2000")
#: What may be restarted between the turns, and prefill's arguments for it: a device that has room for one prompt.
RESTARTS = {"": (), "valkey": ("--max-total-tokens", "3072"), "prefill": ()}

console = Console(stderr=False)


@dataclass(frozen=True)
class Turn:
    """One turn as the client saw it. Seconds are wall-clock from sending the request.

    pool_tokens: of the cached tokens, those that the device had lost and the CPU pool gave back; valkey_tokens: of these,
    those that the pool had lost too and Valkey gave back.
    """

    turn: int
    prompt_tokens: int
    cached_tokens: int
    pool_tokens: int
    valkey_tokens: int
    output_tokens: int
    ttft_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    answer: str


class MemoryWatch(threading.Thread):
    """Highest sum of proportional set sizes of the demo's processes, sampled every 8 seconds and at the end.

    Not more often: a sample takes the kernel a good part of a second, on the cores that the servers need.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(8):
            self.sample()

    def sample(self) -> None:
        """Takes one sample."""
        pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
        self.peak_bytes = max(self.peak_bytes, sum(map(_pss, pids)))


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


def counted(cluster: Cluster, name: str, label: str = "") -> int:
    """A counter of the prefill node's cache: the sum of its children, or of those with this label."""
    metrics = httpx.get(f"{cluster.prefills[0].url}/metrics", timeout=10, trust_env=False).text
    children = [
        line for line in metrics.splitlines() if line.startswith(f"glm_sglang:{name}{{") and label in line
    ]
    return sum(round(float(line.rpartition(" ")[2])) for line in children)


def loaded(cluster: Cluster) -> tuple[int, int]:
    """Tokens that the prefill node has taken from its CPU pool so far, and those that the pool has had from Valkey."""
    hits = counted(cluster, "cache_hit_pages_total", 'tier="valkey"')
    return PAGE * counted(cluster, "cache_load_pages_total"), PAGE * hits


def restart(cluster: Cluster, valkey: EmbeddedServer, what: str, client: httpx.Client, first: Turn) -> None:
    """Ends the Valkey server, or prefill, and starts it again at the same address, with nothing in memory."""
    began = time.monotonic()
    if what == "valkey":
        other = (ROOT / "LICENSE").read_text()[TEXT_BYTES:][:2900]
        message = {"role": "user", "content": other}
        body = {"model": "glm-5.3-tiny", "messages": [message], "max_tokens": 1}
        client.post("/v1/chat/completions", json=body).raise_for_status()
        console.print("\nanother prompt has pushed turn 1 out of the device", style="bold")
        valkey.stop()
        valkey.start()
    else:
        while counted(cluster, "cache_saved_pages_total") < first.prompt_tokens // PAGE:
            if time.monotonic() - began > 30:
                raise RuntimeError("turn 1 has not come to Valkey in 30 s")
            time.sleep(0.2)
        cluster.prefills[0].stop()
        cluster.prefills[0].start()
        cluster.prefills[0].wait_ready()
        cluster.router.wait_ready()
    console.print(f"\n{what} was restarted in {time.monotonic() - began:.0f} s", style="bold")


def ask(client: httpx.Client, number: int, messages: list[dict[str, str]], cluster: Cluster) -> Turn:
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
    before = loaded(cluster) if number > 1 else (0, 0)
    sent = time.monotonic()
    console.print(f"\n[bold]turn {number}[/bold]  {messages[-1]['content'][-60:]!r}")
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"HTTP {response.status_code}: {response.read().decode()[:500]}")
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = orjson.loads(line[6:])
            if event.get("error"):
                raise RuntimeError(str(event["error"]))
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
    if number > 1:
        time.sleep(1.1)  # metrics are brought up to date once a second
    after = loaded(cluster) if number > 1 else (0, 0)
    return Turn(
        turn=number,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=cached,
        pool_tokens=after[0] - before[0],
        valkey_tokens=after[1] - before[1],
        output_tokens=usage["completion_tokens"],
        ttft_s=round(first - sent, 3),
        prefill_tokens_per_s=round((usage["prompt_tokens"] - cached) / (first - sent), 1),
        decode_tokens_per_s=round((usage["completion_tokens"] - 1) / max(ended - first, 1e-9), 1),
        answer=answer,
    )


def show(turns: list[Turn], first_answer_s: float, memory_bytes: int) -> None:
    """The table, and the same as demo-report.json."""
    table = Table(title="two turns through prefill → NIXL → decode")
    for name in (
        "turn",
        "prompt tokens",
        "cached tokens",
        "from the pool",
        "from Valkey",
        "TTFT s",
        "prefill tokens/s",
        "decode tokens/s",
    ):
        table.add_column(name, justify="right")
    for turn in turns:
        tokens = (turn.prompt_tokens, turn.cached_tokens, turn.pool_tokens, turn.valkey_tokens)
        speeds = (turn.ttft_s, turn.prefill_tokens_per_s, turn.decode_tokens_per_s)
        table.add_row(*map(str, (turn.turn, *tokens, *speeds)))
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


def ignore_signals() -> None:
    """For the stopping, which nothing must interrupt."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)


def end_at_signals() -> None:
    """Ctrl-C (also where a shell ignored SIGINT), SIGTERM and a closed terminal end the demo through `finally`, which
    leaves no process behind. The first one counts.
    """

    def end(number: int, _: object) -> None:
        ignore_signals()
        sys.exit(128 + number)

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, end)


def main() -> int:
    end_at_signals()
    # Also on a machine with a GPU, for which `make setup` has not installed what CUDA needs.
    os.environ.setdefault(settings.PLATFORM.name, "reference")
    began = time.monotonic()
    text = (ROOT / "LICENSE").read_text()[:TEXT_BYTES]
    to_restart = os.environ.get("DEMO_RESTART", "")
    if to_restart not in RESTARTS:
        console.print(f"[red]DEMO_RESTART is {to_restart!r}, allowed: {', '.join(filter(None, RESTARTS))}")
        return 2
    model = checkpoint()
    valkey = EmbeddedServer() if to_restart else None
    url = valkey.url if valkey else "embedded://"
    prefill_args = (*SERVER_ARGS, "--glm-cache-url", url, *CACHE_ARGS, *RESTARTS[to_restart])
    cluster = Cluster(model, prefill_args=prefill_args, decode_args=SERVER_ARGS, logs=WORK / "logs")
    watch = MemoryWatch()
    try:
        watch.start()
        start(cluster)
        messages = [{"role": "user", "content": f"{text}\n\n{QUESTIONS[0]}"}]
        with httpx.Client(base_url=cluster.url, timeout=120, trust_env=False) as client:
            ready = time.monotonic()
            turns = [ask(client, 1, messages, cluster)]
            if valkey:
                restart(cluster, valkey, to_restart, client, turns[0])
            messages.append({"role": "user", "content": QUESTIONS[1]})
            turns.append(ask(client, 2, messages, cluster))
        watch.sample()
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
    except SystemExit:
        with contextlib.suppress(OSError):  # the terminal may be gone
            console.print("\nstopping")
        raise
    finally:
        ignore_signals()
        watch.done.set()
        cluster.stop()
        if valkey:
            valkey.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

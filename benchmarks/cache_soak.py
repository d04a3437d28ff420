"""Minutes of everything at once on one server with the cache: no wrong byte, nothing left behind, no long stall?

Conversations of short and long prompts, three turns each; a fifth of the requests is given up (the client hangs up
before or after the first token, or asks for the abort); /flush_cache now and then; device KV and CPU pool so small that
both evict all the time, and a Valkey that is stopped (SIGSTOP) for a part of every period. True GLM-5.x widths, few
layers, random weights on one GPU; `--reference`: in miniature on the reference platform.

Judged, with exit status 1 where one does not hold (`verdict`):
  bytes   every page that was loaded, from wherever it had come into the CPU pool, has there, and on the device behind
          the load, the bytes under which it was saved, and those are what its device page is once the forward is over
          (`glm_sglang.cache.audit`); a probe prompt is answered as it was first, cold, each time, from the device, the
          pool, Valkey, or computed anew: its logprobs are no further from the first than half of what one wrong page
          makes of them, which is measured first (`probe`; a probe that cannot tell is a failure).
  leaks   when all is idle, nothing is held, pinned, queued or waiting, in our tiers or SGLang's KV; SGLang's own check
          of an idle pool is silent; memory, threads, files and connections stay where they were after the warm-up (the
          first third of the load).
  stalls  the longest time of a scheduling step in the cache, what a batch's launch waits for its loads among it (on a
          GPU; reported on a CPU, where all share the cores and a launch waits for the bytes).
  and that each of these things happened: "not exercised" is a failure.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks import _idle_steps, _result, gpu_idle
from benchmarks._moe_servers import Report
from benchmarks._soak_judge import Limits, Sample, grown, left_behind, sample_of, stalls, verdict
from benchmarks._soak_load import PAGE, Client, Sizes
from benchmarks._stalled_servers import MODEL
from benchmarks._stalled_turns import Stalls
from glm_sglang.serving import Server, ServerError, free_port, group_members

COMMON = ("--page-size", str(PAGE), "--enable-metrics", "--enable-cache-report")
_SCRAPED_EVERY = 1.2  # seconds; the server brings its metrics up to date once a second
_LULL_S = 10.0  # for what was given up to be gone, between two rounds
#: A put waits a minute for a store that is down, and one that has come back is left alone for half a minute at most.
_PATIENCE_S = 100.0
_WARM_UP = 1 / 3  # of the load
_COMPLAINT = re.compile(r".*(?:[Ll]eak [Dd]etected|double free|use-after-free|Watchdog timeout).*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is unlike on a GPU and in miniature.

    device_tokens: of KV. valkey: its `maxmemory`. stall_s: of every period_s; longer than an operation's timeout and than
    a request is held back by default, 2 s each, so that both are met.
    """

    sizes: Sizes
    limits: Limits
    device_tokens: int
    chunk: int
    pool_gb: float
    valkey: str
    round_s: float
    stall_s: float
    period_s: float

    def flags(self) -> list[str]:
        """Of the server, but for the URL of its Valkey."""
        return [
            *COMMON,
            *("--max-total-tokens", str(self.device_tokens), "--context-length", str(self.sizes.context)),
            *("--chunked-prefill-size", str(self.chunk), "--glm-cache-pool-gb", str(self.pool_gb)),
        ]


# The probe has no more tokens than the index top-k of 2,048: then every key is selected. Beyond it, which keys are
# depends on scores whose last bits depend on how many rows a step has.
GPU = Setting(
    sizes=Sizes(shortest=200, longest=32_768, tail=2048, probe=1900, clients=12, live=4, probe_every=3.0),
    limits=Limits(memory_mib=512.0),
    device_tokens=57_344,
    chunk=8192,
    pool_gb=1.0,
    valkey="6gb",
    round_s=20.0,
    stall_s=2.5,
    period_s=9.0,
)
# Two cores share everything, so a stall says nothing here. float32: the probe may be longer than the index top-k of 64.
REFERENCE = Setting(
    sizes=Sizes(shortest=100, longest=1500, tail=150, probe=450, clients=3, live=5, probe_every=1.5),
    limits=Limits(memory_mib=128.0, stall_ms=None),
    device_tokens=4096,
    chunk=512,
    pool_gb=0.04,
    valkey="1gb",
    round_s=8.0,
    stall_s=2.5,
    period_s=8.0,
)


class Soak:
    """One server, its Valkey and its client."""

    def __init__(
        self, args: argparse.Namespace, setting: Setting, report: Report, out: Path, stack: ExitStack
    ) -> None:
        """Starts all of it. Raises ServerError."""
        from glm_connectors.valkey_store import EmbeddedServer, parse

        self.args, self.setting, self.report = args, setting, report
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cache-soak-")))
        self.audit = folder / "audit"
        self.valkey = stack.enter_context(EmbeddedServer(parse(f"embedded://?maxmemory={setting.valkey}")))
        flags, env = self._machine(folder / "model")
        env["GLM_SGLANG_CACHE_AUDIT"] = str(self.audit)
        flags += [*setting.flags(), "--glm-cache-url", self.valkey.url, *args.extra.split()]
        log = out / "server.log"
        self.server = Server(folder / "model", flags, port=free_port(), name="soak", log=log, env=env)
        self.server.ready_timeout_s = args.start_seconds
        # /health answers when a token was made, which compiles kernels: for the client to wait for.
        self.server.ready_path = "/model_info"
        stack.callback(self.server.stop)
        self.server.start()
        self.server.wait_ready()
        self.ready_at = len(self.server.log.read_text(errors="replace"))
        self.client = Client(self.server.url, setting.sizes, args.seed)
        self.readings: list[dict[str, float]] = []
        self.warm: dict[str, float] = {}  # the reading after the warm-up
        self.stalls = Stalls(self.valkey.pid, setting.stall_s, setting.period_s)

    def _machine(self, model: Path) -> tuple[list[str], dict[str, str]]:
        """Writes the model; flags and environment of a server of it."""
        if not self.args.reference:
            from benchmarks import _wide_model

            size = _wide_model.write_for_cache(model, self.args.layers, self.setting.sizes.context)
            self.report.say(f"a checkpoint of {size / 1e9:.1f} GB")
            left_out = ("prefill-max-requests", "load-format")
            common = {name: value for name, value in gpu_idle.COMMON.items() if name not in left_out}
            flags = [f"--{name}={value}" for name, value in common.items()]
            return [*flags, *gpu_idle.SWITCHES, "--cuda-graph-backend-prefill", "disabled"], {}
        from glm_sglang.tiny_model.__main__ import main as make_model

        if make_model([str(model), *MODEL]) != 0:
            raise SystemExit(1)
        threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
        return ["--skip-server-warmup"], {"GLM_SGLANG_PLATFORM": "reference", "OMP_NUM_THREADS": threads}

    # Reading

    def scrape(self) -> Sample:
        """Our metrics, and SGLang's count of evicted tokens, as they are or were a second ago."""
        return sample_of(self._get("/metrics").text)

    def _get(self, path: str) -> httpx.Response:
        answer = httpx.get(self.server.url + path, timeout=30, trust_env=False, follow_redirects=True)
        answer.raise_for_status()
        return answer

    def settle(self, patience: float) -> tuple[Sample, dict[str, float]]:
        """Waits until nothing is held any more; the last scrape, and what is held after so many seconds."""
        ends = time.monotonic() + patience
        while True:
            time.sleep(_SCRAPED_EVERY)
            (rank,) = self._get("/v1/loads").json()["loads"]
            sample = self.scrape()
            held = left_behind(
                sample, rank["num_running_reqs"] + rank["num_waiting_reqs"], rank["num_used_tokens"]
            )
            if not held or time.monotonic() > ends:
                return sample, held

    def read(self) -> dict[str, float]:
        """What the server's processes have of the machine, and Valkey of connections."""
        memory = threads = files = 0
        for pid in group_members(self.server.pid):
            try:
                for kind in ("Pss_Anon", "Pss_Shmem"):  # of files, others that map them have a share
                    memory += _field(Path(f"/proc/{pid}/smaps_rollup"), kind)
                threads += _field(Path(f"/proc/{pid}/status"), "Threads")
                files += len(os.listdir(f"/proc/{pid}/fd"))
            except (FileNotFoundError, ProcessLookupError):
                continue  # has ended
        reading = {
            "at_s": round(time.monotonic() - self.report.began, 1),
            "memory_mib": round(memory / 1024, 1),
            "threads": threads,
            "open_files": files,
            "valkey_connections": connections(self.valkey.node.host, self.valkey.node.port),
        }
        self.readings.append(reading)
        self.report.put(readings=self.readings)
        return reading

    # Running

    def warm_up(self) -> None:
        """What the first of a kind compiles, imports or connects is done now; the probe is chosen."""
        sizes = self.setting.sizes
        self.client.choose_probe()
        lengths = (sizes.shortest, sizes.shortest * 4, sizes.longest // 4, sizes.longest)
        prompts = [_idle_steps.prompt(f"warm.{self.args.seed}.{length}", length) for length in lengths]
        arm = _idle_steps.Arm("soak", self.server)
        for _ in range(2):  # computed; then, flushed, from Valkey; and from the device
            for ids in prompts:
                arm.prefill(ids)
                arm.prefill(ids)
            self.settle(2 * _LULL_S)
            self.client.flush(_LULL_S)
        # UPSTREAM: a server freezes its garbage collector once it has warmed itself up, which this one does not.
        httpx.post(self.server.url + "/freeze_gc", timeout=30, trust_env=False).raise_for_status()

    def load(self, before: Sample) -> None:
        """Rounds, until the time is over or the server has gone."""
        client, seconds = self.client, self.args.seconds
        began = time.monotonic()
        number = 0
        while (left := began + seconds - time.monotonic()) > 1.0 and self.server.alive:
            number += 1
            client.round(min(self.setting.round_s, left))
            try:
                sample, held = self.settle(_LULL_S)
                so_far = {"stall_ms": stalls(before, sample), "counts": counts(before, sample), "held": held}
                self.report.put(so_far=so_far)
                if number % 2:
                    client.flush(_LULL_S)
            except httpx.HTTPError as error:
                client.failures.append(f"after round {number}: {type(error).__name__}: {error}"[:300])
            reading = self.read()
            if not self.warm and time.monotonic() >= began + seconds * _WARM_UP:
                self.warm = reading
            self.report.put(load_s=round(time.monotonic() - began, 1), client=dict(client.counts))
            self.report.say(f"round {number}: {dict(client.counts)}, {reading}")

    def run(self) -> dict[str, Any]:
        """Warm-up, load, rest; what was found."""
        self.read()
        self.report.say("warms up")
        self.warm_up()
        before, _ = self.settle(_LULL_S)
        self.read()
        self.stalls.start()
        try:
            self.load(before)
        finally:
            self.stalls.end()
        self.report.say("the load has ended; waits until all is idle")
        after: Sample = before
        held: dict[str, float] = {}
        if alive := self.server.alive:
            try:
                after, held = self.settle(_PATIENCE_S)
            except httpx.HTTPError as error:
                alive = False
                self.client.failures.append(f"at the end: {type(error).__name__}: {error}"[:300])
        return self._found(before, after, held, alive)

    def _found(self, before: Sample, after: Sample, held: dict[str, float], alive: bool) -> dict[str, Any]:
        from glm_sglang.cache.audit import looks, mismatches

        client, last = self.client, self.read()
        warm = self.warm or self.readings[0]
        checked, wrong = mismatches(self.audit)
        seen = looks(self.audit)
        log = self.server.log.read_text(errors="replace")
        found: dict[str, Any] = {
            "wrong_bytes": len(wrong),
            "probes_wrong": len(client.wrong_probes),
            "failed_requests": client.counts["failed"],
            "stall_ms": stalls(before, after),
            "left_behind": held,
            "growth": {name: round(last[name] - warm[name], 1) for name in last if name != "at_s"},
            "sglang_complaints": _COMPLAINT.findall(log)[:5],
            "server_alive": alive,
            "probe": {
                "bound": client.bound,
                "other_page": min(client.other_page),
                "cold": max(client.differences.get("cold", [0.0])),
                "cached": max(client.differences.get("cached", [0.0])),
                "controls": client.other_page,
                "tokens": client.expected.tokens if client.expected else None,
                "wrong": client.wrong_probes[:10],
            },
            "counts": {
                **client.counts,
                **counts(before, after),
                "pages_checked": checked,
                "saves_read_again": seen["again"],
                "loads_read_back": seen["device"],
                "stalls_of_valkey": len(self.stalls.intervals),
            },
        }
        judged = verdict(found, self.setting.limits)
        return {
            "passed": judged["passed"],
            "failed": judged["failed"],
            "not_judged": judged["not_judged"],
            "stall_ms_max": found["stall_ms"]["max"],
            "pages_a_run": pages_a_run(found["counts"]),
            **found,
            "limits": asdict(self.setting.limits),
            "warm_reading": warm,
            "readings": self.readings,
            "failures": client.failures[:20],
            "prefetch_ends": by_label(before, after, "cache_prefetches_total", "end"),
            "dropped_saves": by_label(before, after, "cache_dropped_saves_total", "reason"),
            "offloads": by_label(before, after, "cache_offload_pages_total", "end"),
            "tracebacks_in_log": log[self.ready_at :].count("Traceback (most recent call last)"),
            "wrong_keys": wrong[:10],
        }


def counts(before: Sample, after: Sample) -> dict[str, int]:
    """What the server did, of the things that a soak is to meet and of those that explain it."""

    def of(name: str, **labels: str) -> int:
        return grown(before, after, f"{name}_total", **labels)

    return {
        "hit_pages_pool": of("cache_hit_pages", tier="cpu"),
        "hit_pages_valkey": of("cache_hit_pages", tier="valkey"),
        "miss_pages_valkey": of("cache_miss_pages", tier="valkey"),
        "lost_pages": of("cache_lost_pages"),
        "pages_loaded_to_device": of("cache_load_pages"),
        "runs_loaded_to_device": of("cache_load_runs"),
        "load_waits": grown(before, after, "cache_load_wait_seconds_count"),
        "saved_pages": of("cache_saved_pages"),
        "dropped_saves": of("cache_dropped_saves"),
        "device_evicted_tokens": of("evicted_tokens"),
        "pool_evicted_pages": of("cache_evicted_pages"),
        "refused_reservations": of("cache_refused_reservations"),
        "expired_waits": of("cache_expired_waits"),
        "failed_loads": of("cache_failed_loads"),
        "failed_copies": of("cache_offload_pages", end="failed"),
        "failed_prefetches": of("cache_failed_prefetches"),
        "failed_operations_at_valkey": of("cache_store_failures"),
        "bad_values": of("cache_bad_values"),
    }


def pages_a_run(counted: Mapping[str, int]) -> float | None:
    """How many pages of a load lay next to each other in the CPU pool, in the mean; None where nothing was loaded."""
    runs = counted["runs_loaded_to_device"]
    return round(counted["pages_loaded_to_device"] / runs, 2) if runs else None


def by_label(before: Sample, after: Sample, name: str, label: str) -> dict[str, int]:
    """A counter's children that grew, by a label's value."""
    values = {
        value for key in after if key.startswith(name) for value in re.findall(rf'{label}="([^"]+)"', key)
    }
    moved = {value: grown(before, after, name, **{label: value}) for value in sorted(values)}
    return {value: amount for value, amount in moved.items() if amount}


def connections(host: str, port: int) -> int:
    """Connections that a Valkey has, without the one that asks. Waits for one that is stopped."""
    with socket.create_connection((host, port), 30) as one, one.makefile("rb") as lines:
        one.sendall(b"INFO clients\r\n")
        for line in lines:
            if line.startswith(b"connected_clients:"):
                return int(line.partition(b":")[2]) - 1
    raise RuntimeError(f"{host}:{port} says nothing of its clients")


def _field(file: Path, name: str) -> int:
    """A number of a file of /proc; 0 where it isn't there."""
    match = re.search(rf"^{name}:\s+(\d+)", file.read_text(), re.MULTILINE)
    return int(match[1]) if match else 0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    build = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = build.add_argument
    add("--seconds", type=float, default=240.0, help="of load (default %(default)s)")
    add("--reference", action="store_true", help="in miniature, on the reference platform")
    add("--layers", type=int, default=8, help="of the model on a GPU (default %(default)s)")
    add("--seed", type=int, default=0, help="of prompts and aborts")
    add(
        "--start-seconds", type=float, default=300.0, help="longest wait for the server (default %(default)s)"
    )
    add("--extra", default="", help="further server flags, last")
    add("--out", default="", help="folder for the result as it grows and the server's log")
    _result.add_arguments(build)
    return build.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 when all that is judged holds, 1 otherwise."""
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the stack below ends what was started
    out = Path(args.out or tempfile.mkdtemp(prefix="cache-soak-"))
    out.mkdir(parents=True, exist_ok=True)
    setting = REFERENCE if args.reference else GPU
    report = Report(out / "cache_soak.json", args.start_seconds + args.seconds)
    report.put(reference=args.reference, setting=asdict(setting))
    with ExitStack() as stack:
        try:
            soak = Soak(args, setting, report, out, stack)
        except ServerError as error:
            report.put(passed=False, failed=[str(error)[-3000:]])
            print(error, file=sys.stderr)
            return 1
        report.put(up_s=round(time.monotonic() - report.began, 1))
        try:
            found = soak.run()
        except Exception as error:  # what is known so far is kept beside it
            report.put(passed=False, failed=[f"cut off: {type(error).__name__}: {error}"[:3000]])
            report.say(traceback.format_exc())
            return 1
        report.put(**found)
    final = _result.finish("cache_soak", report.result, args, device="cpu" if args.reference else None)
    report.put(**final)
    for reason in final["failed"]:
        report.say(reason)
    report.say(f"{'passed' if final['passed'] else 'FAILED'}; result and log: {out}")
    return 0 if final["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""An endpoint that runs: started, asked for its name, flushed, warmed, held while another one is measured, stopped."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import httpx

from benchmarks.ab.endpoints import Ports, Spec
from glm_sglang import settings
from glm_sglang.serving import Process

#: What an endpoint does while another one is measured: its processes stopped by SIGSTOP, left alone, or ended.
Between = Literal["paused", "running", "ended"]


_AWAKE_S = 60.0  # from SIGCONT to the first answer
_BUSY_S = 90.0  # a server refuses to flush while requests run or pages are on their way to another tier
_PATIENCE_S = 5.0  # of a refusal, until it is said


class EndpointError(RuntimeError):
    """An endpoint does not do what the comparison needs of it."""


class Endpoint:
    """One endpoint of a comparison. Owns the processes that it starts."""

    def __init__(
        self,
        spec: Spec,
        logs: Path | None = None,
        host: str = "127.0.0.1",
        ready_timeout_s: float = 1800.0,
    ) -> None:
        self.spec = spec
        self.host = host
        self.logs = logs
        self.ready_timeout_s = ready_timeout_s
        self.shared: dict[str, Process] = {}  # of spec.shared, which others own
        self.processes: dict[str, Process] = {}
        self.url = spec.url
        self.model = spec.model
        self.context: int | None = None  # tokens of a request with its answer, where the endpoint says
        self.about: dict[str, Any] = {}
        self.refused_s = 0.0  # longest that it refused to be flushed

    def start(self, progress: Callable[[str, float, str], None] | None = None) -> None:
        """Returns when it answers. Raises ServerError or EndpointError."""
        self.launch(progress)
        self.wait()

    def launch(self, progress: Callable[[str, float, str], None] | None = None) -> None:
        """Starts its processes, where it has none yet, and does not wait for them. Raises ServerError."""
        if self.spec.processes and not self.processes:
            self._make_processes(progress)
            try:
                for process in self.processes.values():
                    process.start()
            except BaseException:
                self.stop()
                raise

    def wait(self) -> None:
        """Returns when it answers. Raises ServerError, its processes stopped, or EndpointError."""
        try:
            for process in self.processes.values():
                process.wait_ready()
        except BaseException:
            self.stop()
            raise
        if self.processes:
            self.url = list(self.processes.values())[-1].url
        try:
            with self._client() as client:
                self._ask_for_model(client)
                self.about = describe(client)
        except httpx.HTTPError as error:
            raise EndpointError(
                f"{self.spec.name}: {self.url} cannot be asked for its model: {error}"
            ) from None

    def _ask_for_model(self, client: httpx.Client) -> None:
        listed = client.get("/v1/models")
        models = listed.json().get("data") if listed.status_code == 200 else None
        if not models and not self.model:
            raise EndpointError(f"{self.spec.name}: {self.url}/v1/models names no model; give `model`")
        found = [one for one in models or () if self.model in ("", one["id"])]
        if found:
            self.model = str(found[0]["id"])
            self.context = found[0].get("max_model_len")

    def _make_processes(self, progress: Callable[[str, float, str], None] | None) -> None:
        ports = Ports(self.host, {name: process.port for name, process in self.shared.items()})
        for name, command in self.spec.processes.items():
            called = self.spec.name if len(self.spec.processes) == 1 else f"{self.spec.name}-{name}"
            called = re.sub(r"[^\w.]+", "-", called)  # a file is called so too
            process = Process(
                called,
                ports.argv(name, command),
                host=self.host,
                port=ports.of(name),
                env=self.spec.env,
                log=self.logs / f"{called}.log" if self.logs else None,
                ready_path=self.spec.ready_path(name),
                ready_timeout_s=self.ready_timeout_s,
            )
            if progress is not None:
                process.progress = lambda s, line, name=process.name: progress(name, s, line)
            self.processes[name] = process

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)

    @property
    def flushed(self) -> str:
        """How its caches are emptied, in words."""
        if self.spec.flush is None:
            return "not flushed (declared to have no way to): only texts that differ keep rounds apart"
        refused = f"; refused for up to {self.refused_s:.0f} s" if self.refused_s >= 1 else ""
        return f"POST {self.spec.flush_path} to {max(1, len(self.spec.flush))} process(es) before every round{refused}"

    def flush(self) -> None:
        """Empties its caches; one that is busy is asked again for a while, and that is said. Raises EndpointError when it
        still refuses.
        """
        if self.spec.flush is None:
            return
        for url in [self._target(name) for name in self.spec.flush] or [self.url]:
            began, told = time.monotonic(), _PATIENCE_S
            while (said := self._flush_one(url)) == "400" and (waited := time.monotonic() - began) < _BUSY_S:
                self.refused_s = max(self.refused_s, waited)
                if waited >= told:
                    told *= 2
                    print(
                        f"{self.spec.name}: {url} refuses to flush, for {waited:.0f} s",
                        file=sys.stderr,
                        flush=True,
                    )
                time.sleep(0.2)
            if said:
                raise EndpointError(
                    f"{self.spec.name}: POST {url}{self.spec.flush_path} answered {said}; name the "
                    "processes that can be flushed with `flush`, another path with `flush_path`, or `flush: false`"
                )

    def _flush_one(self, url: str) -> str:
        """What it says, or how it fails; "" when it is done."""
        try:
            answer = httpx.post(url + self.spec.flush_path, timeout=120.0, trust_env=False)
        except httpx.HTTPError as error:
            return type(error).__name__
        return "" if answer.status_code == 200 else str(answer.status_code)

    def _target(self, name: str) -> str:
        if name.startswith("http"):
            return name.rstrip("/")
        known = {**self.shared, **self.processes}
        if name not in known:
            raise EndpointError(f"{self.spec.name}: `flush` names {name}; allowed: {', '.join(known)}")
        return known[name].url

    def answers(self) -> bool:
        """Whether each of its processes answers now; of one given by URL, whether that does."""
        if not self.processes:
            return answers(f"{self.url}/v1/models")
        return all(answers(one.url + self.spec.ready_path(name)) for name, one in self.processes.items())

    def pause(self) -> None:
        """Stops its processes from using the machine; harmless for one given by URL."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets them go on; returns when each answers. Raises EndpointError when one doesn't."""
        self._signal(signal.SIGCONT)
        deadline = time.monotonic() + _AWAKE_S
        for name, process in self.processes.items():
            # A router takes a moment to see that its workers are back.
            while not answers(process.url + self.spec.ready_path(name)):
                if time.monotonic() > deadline:
                    raise EndpointError(
                        f"{self.spec.name}: {name} does not answer {self.spec.ready_path(name)} {_AWAKE_S:.0f} s after "
                        "it was let go on; try --between running"
                    )
                time.sleep(0.1)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes.values():
            if process.alive:
                os.killpg(process.pid, number)

    def begin_to_stop(self) -> None:
        """Tells what it started to end, the asked one first, and does not wait, as `stop` does."""
        self._signal(signal.SIGCONT)
        for process in reversed(self.processes.values()):
            process.begin_to_stop()

    def stop(self) -> None:
        """Ends what it started, the asked one first."""
        self._signal(signal.SIGCONT)
        for process in reversed(self.processes.values()):
            process.stop()
        self.processes = {}

    def __enter__(self) -> Endpoint:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def answers(url: str) -> bool:
    """Whether GET gives 200 now."""
    try:
        return httpx.get(url, timeout=10.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


#: What of a server's own description belongs into a result; the whole has hundreds of fields.
_TELLING = (
    *("version", "model_path", "dtype", "quantization", "tp_size", "ep_size", "dp_size", "attn_cp_size"),
    *("chunked_prefill_size", "mem_fraction_static", "max_total_num_tokens", "context_length", "page_size"),
    *("attention_backend", "moe_a2a_backend", "disaggregation_mode", "disable_radix_cache", "device"),
)


def describe(client: httpx.Client) -> dict[str, Any]:
    """What the server says of itself at SGLang's /server_info and vLLM's /version; empty when neither answers."""
    told: dict[str, Any] = {}
    for path in ("/server_info", "/version"):
        try:
            answer = client.get(path)
            found = answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            continue
        if isinstance(found, dict):
            own = {key: value for key, value in found.items() if key.startswith("glm_")}
            told |= {key: found[key] for key in _TELLING if found.get(key) is not None} | own
    return told


def served_on(endpoints: Sequence[Endpoint]) -> Literal["cpu"] | None:
    """`cpu` where the endpoints say, or were told, to serve without a GPU; None where one has a GPU or none says."""
    told = {str(endpoint.about["device"]) for endpoint in endpoints if "device" in endpoint.about}
    if not told and settings.read(settings.PLATFORM) == "reference":
        return "cpu"
    # Of a pair the router answers, which has no device.
    words = " ".join(command for endpoint in endpoints for command in endpoint.spec.processes.values())
    if not told and re.search(r"--device[ =]cpu\b", words):
        return "cpu"
    return "cpu" if told == {"cpu"} else None


def hold(active: Endpoint | None, others: Sequence[Endpoint], between: Between) -> None:
    """Makes `active` the only one that uses the machine."""
    for other in others:
        if other is active:
            continue
        if between == "paused":
            other.pause()
        elif between == "ended" and other.spec.processes:
            other.stop()
    if active is not None:
        if between == "ended" and active.spec.processes and not active.processes:
            active.model = active.spec.model
            active.start()
        active.resume()

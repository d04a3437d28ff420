"""Prefill servers, decode servers and SGLang's router on one machine, started side by side and stopped together.

with Cluster(checkpoint, prefills=2, decodes=1) as cluster:
    httpx.post(cluster.url + "/v1/chat/completions", json={...})
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol

from glm_sglang.serving import Process, Server, free_port, stop_together

#: Called while the cluster starts: the process's name, seconds since its start, its newest log line.
ClusterProgress = Callable[[str, float, str], None]

#: SGLang's own launcher: what a decode node runs that has this package for its platform only.
STOCK_LAUNCHER = "sglang.launch_server"


class HasUrl(Protocol):
    """What a router has to know of a decode server."""

    @property
    def url(self) -> str:
        """http://host:port."""


class PrefillServer(Server):
    """A prefill server with a bootstrap port of its own."""

    def __init__(self, model: str | os.PathLike[str], args: Sequence[str] = (), **options: object) -> None:
        self.bootstrap_port = free_port()
        flags = [
            "--disaggregation-mode",
            "prefill",
            "--disaggregation-bootstrap-port",
            str(self.bootstrap_port),
        ]
        super().__init__(model, [*flags, *args], **options)  # type: ignore[arg-type]


class DecodeServer(Server):
    """A decode server that receives over NIXL; `module` names the launcher."""

    def __init__(self, model: str | os.PathLike[str], args: Sequence[str] = (), **options: object) -> None:
        flags = ["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl"]
        super().__init__(model, [*flags, *args], **options)  # type: ignore[arg-type]


class Router(Process):
    """SGLang's router before the given servers. Ready once all of them are registered and healthy."""

    def __init__(
        self,
        prefills: Sequence[PrefillServer],
        decodes: Sequence[HasUrl],
        args: Sequence[str] = (),
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        log: Path | None = None,
    ) -> None:
        port = free_port(host) if port is None else port
        workers = [word for p in prefills for word in ("--prefill", p.url, str(p.bootstrap_port))]
        workers += [word for d in decodes for word in ("--decode", d.url)]
        argv = [sys.executable, "-m", "glm_sglang.router", "--pd-disaggregation", *workers]
        argv += ["--host", host, "--port", str(port)]
        argv += ["--prometheus-host", host, "--prometheus-port", str(free_port(host))]
        argv += ["--worker-startup-check-interval", "1", "--log-level", "warn", *args]
        super().__init__("router", argv, host=host, port=port, log=log, ready_path="/readiness")


class Cluster:
    """`prefills`P`decodes`D behind a router. Starts everything at once; what one fails to start, none is left of.

    prefill_args, decode_args, router_args go to every server of the kind; `decode_module` names the decode servers'
    launcher. `logs`: a directory for the log files, kept; without it they are temporary.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        prefills: int = 1,
        decodes: int = 1,
        prefill_args: Sequence[str] = (),
        decode_args: Sequence[str] = (),
        router_args: Sequence[str] = (),
        decode_module: str = "glm_sglang.launch_server",
        port: int | None = None,
        logs: Path | None = None,
        progress: ClusterProgress | None = None,
    ) -> None:
        def options(name: str) -> dict[str, object]:
            return {"name": name, "log": logs / f"{name}.log" if logs else None}

        if logs:
            logs.mkdir(parents=True, exist_ok=True)
        self.prefills = [
            PrefillServer(model, prefill_args, **options(_name("prefill", i, prefills)))
            for i in range(prefills)
        ]
        self.decodes = [
            DecodeServer(model, decode_args, module=decode_module, **options(_name("decode", i, decodes)))
            for i in range(decodes)
        ]
        self.router = Router(
            self.prefills, self.decodes, router_args, port=port, log=logs / "router.log" if logs else None
        )
        self.progress = progress
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """Where clients talk to: the router."""
        return self.router.url

    @property
    def processes(self) -> list[Process]:
        """Every process, in the order of starting."""
        return [*self.prefills, *self.decodes, self.router]

    def start(self) -> None:
        """Returns when the router serves. Raises ServerError for the first process that doesn't come up."""
        try:
            # Pushed first, so that an interrupt during the start leaves nothing behind either.
            self._stack.callback(stop_together, self.processes[::-1])
            for process in self.processes:
                process.start()
            for process in self.processes:
                process.progress = self._progress_of(process.name)
                process.wait_ready()
        except BaseException:
            self.stop()
            raise

    def _progress_of(self, name: str) -> Callable[[float, str], None] | None:
        report = self.progress
        return None if report is None else lambda seconds, line: report(name, seconds, line)

    def stop(self) -> None:
        """Tells the router to end, then the servers; returns when no process is left."""
        self._stack.close()

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _name(role: str, index: int, count: int) -> str:
    return role if count == 1 else f"{role}{index}"

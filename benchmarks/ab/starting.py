"""Endpoints are started one after the other or side by side, with what they share, and stopped together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass

import httpx

from benchmarks.ab.endpoints import Spec, SpecError
from benchmarks.ab.running import Between, Endpoint, EndpointError, hold
from glm_sglang.serving import ServerError

#: What an endpoint that cannot be measured raises.
FAILURES = (EndpointError, ServerError, RuntimeError, httpx.HTTPError)
_GOING_S = 15.0  # from SIGTERM until those who waited for a server know


@dataclass(frozen=True)
class Starting:
    """How endpoints are started. together: side by side, and what does not start is left out with its reason; not the
    baseline, and not more than leave two.
    """

    between: Between = "paused"
    together: bool = False
    baseline: str = ""

    def check(self, specs: Sequence[Spec]) -> None:
        """Raises SpecError for what cannot go together."""
        if self.together and self.between == "ended":
            raise SpecError(
                "--start together keeps all endpoints up; --between ended keeps one: give one of them"
            )
        if self.between != "running" and any(spec.shared for spec in specs):
            raise SpecError(
                f"--between is {self.between}; endpoints that share a process need running: it would miss the others"
            )


def say(text: str) -> None:
    """A line for the person who waits."""
    print(text, file=sys.stderr, flush=True)


def judge(left_out: Mapping[str, str], endpoints: Sequence[Endpoint], baseline: str) -> None:
    """Raises EndpointError where what is left is no comparison."""
    if not left_out:
        return
    remaining = [endpoint for endpoint in endpoints if endpoint.spec.name not in left_out]
    if baseline in left_out or len(remaining) < 2:
        said = "\n".join(f"{name}: {why}" for name, why in left_out.items())
        why = (
            f"{baseline} is what the others are compared with" if baseline in left_out else "too few are left"
        )
        raise EndpointError(f"{said}\n{why}: nothing is measured")


def started(endpoints: Sequence[Endpoint], stack: ExitStack, starting: Starting) -> dict[str, str]:
    """Starts all, one after the other, each paused before the next; of ended ones only the first; or all side by side.
    The stack stops them. Returns those that did not start, side by side, and why.
    """
    shared = _shared(endpoints, stack)
    for endpoint in endpoints:
        endpoint.shared = {
            name: shared[command].processes[name] for name, command in endpoint.spec.shared.items()
        }
    stack.callback(_stop, endpoints)
    if starting.together:
        vital = {one.spec.name for one in shared.values()} | {starting.baseline}
        return _start_together(endpoints, list(shared.values()), vital)
    for one in shared.values():
        one.wait()
    first = endpoints if starting.between != "ended" else endpoints[:1]
    for endpoint in first:
        say(f"starting {endpoint.spec.name}")
        hold(None, endpoints, starting.between)
        endpoint.start(lambda name, seconds, line: say(f"{name} {seconds:4.0f} s  {line[:100]}"))
    hold(endpoints[0] if endpoints else None, endpoints, starting.between)
    return {}


def _shared(endpoints: Sequence[Endpoint], stack: ExitStack) -> dict[str, Endpoint]:
    """Launches the processes that endpoints share, by command; the stack stops them."""
    found: dict[str, Endpoint] = {}
    for endpoint in endpoints:
        for name, command in endpoint.spec.shared.items():
            if command not in found:
                spec = Spec(f"shared {name}", processes={name: command}, env=endpoint.spec.env)
                found[command] = Endpoint(spec, endpoint.logs, endpoint.host, endpoint.ready_timeout_s)
                say(f"starting {name}, which all share")
                stack.callback(found[command].stop)
                found[command].launch()
    return found


def _stop(endpoints: Sequence[Endpoint]) -> None:
    for endpoint in endpoints:
        endpoint.begin_to_stop()
    for endpoint in endpoints:
        endpoint.stop()


def _start_together(
    endpoints: Sequence[Endpoint],
    shared: Sequence[Endpoint],
    vital: Container[str],
) -> dict[str, str]:
    """Starts all side by side. Returns those that failed, and why; raises EndpointError for one that is vital."""

    def up(endpoint: Endpoint) -> None:
        if endpoint not in shared:
            say(f"starting {endpoint.spec.name}")
            endpoint.launch()
        endpoint.wait()
        say(f"{endpoint.spec.name} is up")

    return each([*shared, *endpoints], up, vital)


def each(
    endpoints: Sequence[Endpoint],
    work: Callable[[Endpoint], None],
    vital: Container[str] = (),
) -> dict[str, str]:
    """Does `work` with all at once. Those with which it fails are stopped; returns why, by name. Raises EndpointError at
    once for one without which the others are of no use.
    """
    failed: dict[str, str] = {}
    pool = ThreadPoolExecutor(max(1, len(endpoints)))
    jobs = [(endpoint, pool.submit(work, endpoint)) for endpoint in endpoints]
    try:
        for endpoint, job in jobs:
            try:
                job.result()
            except FAILURES as error:
                failed[endpoint.spec.name] = why = str(error) or type(error).__name__
                if endpoint.spec.name in vital:
                    raise EndpointError(f"{endpoint.spec.name}, which all need: {why}") from None
                say(f"{endpoint.spec.name} is left out: {why}")
                endpoint.stop()
    except BaseException:
        # The processes' end ends what waits for them.
        for endpoint in endpoints:
            endpoint.begin_to_stop()
        wait([job for _, job in jobs], timeout=_GOING_S)
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return failed

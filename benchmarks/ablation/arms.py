"""The changes, the flags that turn them on and off, the article's figures; and the arms that follow."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from benchmarks.ab.endpoints import Spec

NONE, ALL, STOCK = "none", "all", "stock SGLang"
#: Router and decode take no part in the ablation: they are the same in every arm.
ROUTER = "python -m glm_sglang.router --pd-disaggregation --prefill {url:prefill} {port:bootstrap} --decode {url:decode}"

Layout = Literal["single", "pair"]


@dataclass(frozen=True)
class Change:
    """One change of the five.

    on, off: flags of a prefill server; no `on`: it has no switch of its own, and `why` says where it is.
    platforms: where it can run; gpus: on how many at least, of prefill. article: its figure there, quoted.
    """

    name: str
    title: str
    article: str
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    platforms: frozenset[str] = frozenset({"cpu", "gpu"})
    gpus: int = 1
    why: str = ""


CHANGES: tuple[Change, ...] = (
    Change(
        "megamoe",
        "1 MegaMoE",
        "cold prefill +59 %; step time −38 % at 128k",
        on=("--glm-moe", "megamoe"),
        off=("--glm-moe", "stock"),
        platforms=frozenset({"gpu"}),
        gpus=2,
    ),
    Change(
        "graphs",
        "2 prefill graphs",
        "GPU idle 19.5 % at 16k before; most of it removed",
        on=("--glm-prefill-graph", "auto"),
        off=("--glm-prefill-graph", "off"),
        platforms=frozenset({"gpu"}),
    ),
    Change(
        "cache",
        "3, 4 and 5 the cache",
        "hits of second turns under Valkey stalls 0 → 56 %; 98 % without stalls",
        on=("--glm-cache-url", "{cache}"),
        off=("--glm-cache-url", "none"),
    ),
    Change(
        "executor",
        "3 executor",
        "hits of second turns under Valkey stalls 0 → 56 %",
        why="no switch of its own: a part of the cache (measured apart by benchmarks.executor_survival)",
    ),
    Change(
        "async_save",
        "4 async save",
        "GPU busy 88.9 → 99.1 %",
        why="no switch of its own: a part of the cache (measured apart by benchmarks.async_save)",
    ),
    Change(
        "lookup",
        "5 fast lookup",
        "81 → 66 ms for one 4k request",
        why="no switch of its own: a part of the cache (measured apart by benchmarks.lookup_latency)",
    ),
)
ARTICLE_ALL = "53k → ~94k tokens/s at 128k (1.77×), projected from measured pieces"


@dataclass(frozen=True)
class Arm:
    """One server or pair. `changes`: the names of those that are on; `state` says why there is no spec."""

    name: str
    changes: tuple[str, ...]
    article: str = ""
    state: str = "measured"
    spec: Spec | None = None


@dataclass(frozen=True)
class Setup:
    """What every arm has in common.

    flags, decode_flags: of prefill (or the single server) and of decode. stock_flags: what stock SGLang gets
    besides, its best ones; own_flags: what every arm but stock gets. env, decode_env: variables, devices among
    them; stock_env: of stock's prefill besides. values: of {cache} and the like. graphs: how they are asked for.
    share_decode: one decode for all arms, not one for each. moe_runner: SGLang's runner of experts where MegaMoE
    is off, of stock's too; "": as SGLang chooses.
    """

    model: str
    layout: Layout
    platform: str
    flags: str = ""
    decode_flags: str = ""
    stock_flags: str = ""
    own_flags: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    decode_env: Mapping[str, str] = field(default_factory=dict)
    stock_env: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    graphs: Literal["auto", "strict"] = "auto"
    share_decode: bool = False
    moe_runner: str = ""

    def prefill_gpus(self) -> int:
        """The GPUs of one prefill server: what the last --tp of its flags says."""
        flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        flags.add_argument("--tp-size", "--tp", "--tensor-parallel-size", type=int, default=1)
        return int(flags.parse_known_args(shlex.split(f"{self.flags} {self.own_flags}"))[0].tp_size)


def known_flags() -> frozenset[str]:
    """The own flags that this build's launcher has."""
    from glm_sglang.own_flags import FLAGS

    return frozenset(flag.option for flag in FLAGS)


def arms(
    setup: Setup,
    only: Sequence[str] = (),
    flags: frozenset[str] | None = None,
    also: Sequence[Sequence[str]] = (),
    named: Sequence[str] = (),
) -> list[Arm]:
    """Stock, none, each change alone, those of `also` together, all. A change that this build, platform or selection
    lacks is an arm without a spec. named: of none, the changes by name and all, those that are measured; () for each.
    """
    flags = known_flags() if flags is None else flags
    usable, singles = [], []
    for change in CHANGES:
        state = _state(change, setup, only, flags)
        if state == "measured":
            usable.append(change)
        spec = _spec(change.title, setup, (change,), flags) if state == "measured" else None
        singles.append(Arm(change.title, (change.name,), change.article, state, spec))
    names = tuple(change.name for change in usable)
    found = [
        Arm(STOCK, (), spec=_stock(setup)),
        Arm(NONE, (), "53k tokens/s at 128k", spec=_spec(NONE, setup, (), flags)),
        *singles,
    ]
    together = (
        "measured"
        if len(usable) > 1
        else f"the same as {usable[0].title}"
        if usable
        else "no change to turn on"
    )
    spec = _spec(ALL, setup, tuple(usable), flags) if len(usable) > 1 else None
    some = [_some(setup, chosen, usable, flags) for chosen in also]
    found = [*found, *some, Arm(ALL, names, ARTICLE_ALL, together, spec)]
    if not named:
        return found
    kept = {STOCK, *named, *(change.title for change in CHANGES if change.name in named)}
    kept |= {arm.name for arm in some}
    left_out = "left out by --arms"
    return [
        arm if arm.name in kept or not arm.spec else replace(arm, spec=None, state=left_out) for arm in found
    ]


def _some(setup: Setup, chosen: Sequence[str], usable: Sequence[Change], flags: frozenset[str]) -> Arm:
    on = tuple(change for change in usable if change.name in chosen)
    name = " + ".join(chosen)
    if missing := set(chosen) - {change.name for change in on}:
        return Arm(name, tuple(chosen), state=f"without {', '.join(sorted(missing))}, which is not measured")
    return Arm(name, tuple(chosen), spec=_spec(name, setup, on, flags))


def _state(change: Change, setup: Setup, only: Sequence[str], flags: frozenset[str]) -> str:
    if not change.on:
        return change.why
    if missing := [word for word in change.on if word.startswith("--") and word not in flags]:
        return f"not built: this build has no {' '.join(missing)}"
    if setup.platform not in change.platforms:
        return f"not on this platform ({setup.platform})"
    if (gpus := setup.prefill_gpus()) < change.gpus:
        return f'needs {change.gpus} GPUs or more (--flags "--tp {change.gpus} …"), prefill has {gpus}'
    if only and change.name not in only:
        return "left out by --changes"
    return "measured"


def _spec(name: str, setup: Setup, on: tuple[Change, ...], flags: frozenset[str]) -> Spec:
    words = []
    for change in CHANGES:
        chosen = change.on if change in on else change.off
        # A build without the flag is as if it were off.
        words += [word for word in chosen if not chosen or chosen[0] in flags]
    if not any(change.name == "megamoe" for change in on):
        words += _runner(setup)
    text = shlex.join(setup.graphs if word == "auto" else word for word in words)
    for key, value in setup.values.items():
        text = text.replace(f"'{{{key}}}'", value).replace(f"{{{key}}}", value)
    return _processes(
        name, setup, "glm_sglang.launch_server", f"{setup.flags} {setup.own_flags} {text}".strip()
    )


def _stock(setup: Setup) -> Spec:
    # On a CPU stock gets what our launcher fills in there: only the changes are to differ.
    on_cpu = setup.platform == "cpu"
    device = "--device cpu --page-size 64 --sleep-on-idle " if on_cpu else ""
    if on_cpu:
        setup = replace(setup, env={"OMP_WAIT_POLICY": "passive", **setup.env})
    setup = replace(setup, env={**setup.env, **setup.stock_env})
    flags = shlex.join(_runner(setup))
    return _processes(
        STOCK, setup, "sglang.launch_server", f"{device}{setup.flags} {setup.stock_flags} {flags}".strip()
    )


def _runner(setup: Setup) -> list[str]:
    return ["--moe-runner-backend", setup.moe_runner] if setup.moe_runner else []


def _processes(name: str, setup: Setup, module: str, flags: str) -> Spec:
    # Of a pair decode writes the usage, with prefill's count of cached tokens in it.
    server = "python -m {module} --model-path {model} --host 127.0.0.1 --port {{port}} --enable-cache-report {flags}"
    first = server.format(module=module, model=shlex.quote(setup.model), flags=flags)
    if setup.layout == "single":
        return Spec(name, processes={"server": first}, env=setup.env)
    prefill = f"{first} --disaggregation-mode prefill --disaggregation-bootstrap-port {{port:bootstrap}}"
    decode = server.format(
        module="glm_sglang.launch_server", model=shlex.quote(setup.model), flags=setup.decode_flags
    )
    decode = f"{decode} --disaggregation-mode decode --disaggregation-transfer-backend nixl"
    if module == "sglang.launch_server":
        prefill += " --disaggregation-transfer-backend nixl"
    processes = {
        "prefill": _with(setup.env, prefill),
        "decode": _with(setup.decode_env, decode),
        "router": f"{ROUTER} --host 127.0.0.1 --port {{port}} --prometheus-port {{port:metrics}} "
        "--worker-startup-check-interval 1 --log-level warn",
    }
    shared = {"decode": processes.pop("decode")} if setup.share_decode else {}
    # SGLang's decode half keeps no prefixes, and refuses to flush while it holds a request of any arm, of a dead one too.
    flush = ("prefill",) if setup.share_decode else ("prefill", "decode")
    return Spec(name, processes=processes, flush=flush, ready={"router": "/readiness"}, shared=shared)


def _with(env: Mapping[str, str], command: str) -> str:
    if not env:
        return command
    words = " ".join(f"{key}={shlex.quote(value)}" for key, value in env.items())
    return f"env {words} {command}"

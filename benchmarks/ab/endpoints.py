"""The endpoints of a comparison: given by URL, or started from a YAML file of commands.

    endpoints:
      ours:
        command: python -m glm_sglang.launch_server --model-path {model} --port {port}
      stock pair:
        processes:
          prefill: python -m sglang.launch_server … --port {port} --disaggregation-bootstrap-port {port:bootstrap}
          decode: python -m sglang.launch_server … --port {port}
          router: python -m sglang_router.launch_router … --prefill {url:prefill} {port:bootstrap} --port {port}
        flush: [prefill, decode]
      elsewhere:
        url: http://10.0.0.1:30000

Of several processes the last is the one that is asked. `{port}` is a free port, `{port:NAME}` and `{url:NAME}`
another process's or a further one; `{KEY}` comes from `--set KEY=VALUE`. Also known: `env` (variables),
`model` (the name to ask for; otherwise the first that /v1/models lists), `ready` (a path that answers 200; a mapping of
processes to paths where they differ),
`flush` (processes or URLs whose cache is flushed before a round; false: it has no way to), `flush_path`
(/flush_cache; vLLM has /reset_prefix_cache), `requires` (a path: without it the endpoint is left out, and the
result says so). No two endpoints may name the same Valkey. A list `not_measured` beside `endpoints` says what the
file leaves out, and why.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from glm_sglang import settings
from glm_sglang.serving import free_port

_PLACE = re.compile(r"\{([a-z_]+)(?::([\w-]+))?\}")
_KEYS = {"command", "processes", "url", "env", "model", "ready", "flush", "flush_path", "requires"}


class SpecError(ValueError):
    """The file or the flags describe no endpoint; the message names the key, what was found, what is
    allowed.
    """


@dataclass(frozen=True)
class Spec:
    """One endpoint as described. Either `url`, or `processes` (name → command, the asked one last).

    shared: processes of all endpoints that name the same command, started once; `processes` and `flush` may name them.
    """

    name: str
    url: str = ""
    processes: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    ready: str | Mapping[str, str] = "/health"  # of all processes, or by name
    flush: tuple[str, ...] | None = ()  # (): the asked one; None: no way to
    flush_path: str = "/flush_cache"
    shared: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """For the record: what would be typed."""
        if self.url:
            return {"url": self.url}
        shared = {"shared": dict(self.shared)} if self.shared else {}
        return {"processes": dict(self.processes), "env": dict(self.env), **shared}

    def ready_path(self, process: str) -> str:
        """The path that answers 200 once this process serves."""
        return self.ready if isinstance(self.ready, str) else self.ready.get(process, "/health")


def parse_url(text: str) -> Spec:
    """`name=http://…` or a URL alone, which then is its own name."""
    name, equals, url = text.partition("=")
    if not equals or "://" in name:
        name, url = text, text
    if not url.startswith(("http://", "https://")):
        raise SpecError(f"--url is {text!r}; it must be NAME=http://HOST:PORT")
    return Spec(name, url=url.rstrip("/"))


def load(path: Path, values: Mapping[str, str]) -> tuple[list[Spec], list[str]]:
    """The file's endpoints, and a sentence for each that this machine lacks. Raises SpecError."""
    try:
        whole = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SpecError(f"--config: {path} cannot be read: {error}") from None
    table = whole.get("endpoints") if isinstance(whole, dict) else None
    if not isinstance(table, dict) or not table:
        raise SpecError(f"--config: {path} has no mapping `endpoints` of names to endpoints")
    specs, absent = [], [str(line) for line in whole.get("not_measured") or ()]
    for name, entry in table.items():
        if not isinstance(entry, dict) or not set(entry) <= _KEYS:
            wrong = sorted(set(entry) - _KEYS) if isinstance(entry, dict) else entry
            raise SpecError(f"--config: endpoint {name} has {wrong}; allowed: {', '.join(sorted(_KEYS))}")
        needed = entry.get("requires")
        if needed and not Path(fill(str(needed), values)).exists():
            absent.append(f"{name}: not measured, {fill(str(needed), values)} is not on this machine")
            continue
        specs.append(_spec(str(name), entry, values))
    return specs, absent


def _spec(name: str, entry: Mapping[str, Any], values: Mapping[str, str]) -> Spec:
    given = [key for key in ("command", "processes", "url") if entry.get(key)]
    if len(given) != 1:
        raise SpecError(f"--config: endpoint {name} has {given}; it must have one of command, processes, url")
    processes = entry.get("processes") or ({"server": entry["command"]} if "command" in entry else {})
    flush = entry.get("flush", ())
    return Spec(
        name,
        url=str(entry.get("url", "")).rstrip("/"),
        processes={str(key): fill(str(command), values) for key, command in processes.items()},
        env={key: fill(str(value), values) for key, value in (entry.get("env") or {}).items()},
        model=fill(str(entry.get("model", "")), values),
        ready=entry.get("ready", "/health"),
        flush=None if flush is False else tuple(flush),
        flush_path=str(entry.get("flush_path", "/flush_cache")),
    )


def fill(text: str, values: Mapping[str, str]) -> str:
    """Puts `--set` values in place of {KEY}; {port} and {url} stay. Raises SpecError for one not given."""

    def value(match: re.Match[str]) -> str:
        key = match[1]
        if key in ("port", "url"):
            return match[0]
        if key not in values:
            raise SpecError(f"{{{key}}} in {text!r} has no value; give --set {key}=…")
        return values[key]

    return _PLACE.sub(value, text)


def refuse_shared_caches(specs: Sequence[Spec], environ: Mapping[str, str] = os.environ) -> None:
    """Raises SpecError where two endpoints keep pages in one Valkey: the second would be measured with the first's pages.

    Keys name the model, not the endpoint, and a flush leaves Valkey alone. Processes of one endpoint may share one.
    """
    owner: dict[object, str] = {}
    for spec in specs:
        places = {
            place
            for command in spec.processes.values()
            for place in _places(_cache_url(shlex.split(command), {**environ, **spec.env}))
        }
        for place in places:
            if place in owner:
                raise SpecError(
                    f"endpoints {owner[place]} and {spec.name} would share a Valkey, and each other's pages; "
                    "give each a --glm-cache-url of its own: embedded://, another server, or another database of it"
                )
            owner[place] = spec.name


def _cache_url(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Where a server with this command line keeps its pages: its last flag, else its variable. "none" for nowhere."""
    found = "none"
    if "glm_sglang.launch_server" in words:
        inline = dict(word.split("=", 1) for word in words if word.startswith(f"{settings.CACHE_URL.name}="))
        found = {**environ, **inline}.get(settings.CACHE_URL.name) or found
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag == "--glm-cache-url":
            found = value if equals else following
    return found


def _places(url: str) -> set[object]:
    """The servers and databases behind a URL; none of a server that is started for this one alone."""
    from glm_connectors import valkey_store

    if url == "none":
        return set()
    try:
        store = valkey_store.parse(url)
    except valkey_store.CacheUrlError:
        return {url}  # the server will say what is wrong with it
    return {(node, store.database) for node in store.nodes}


class Ports:
    """Gives every name one free port, and the processes their command lines. `taken`: ports of processes that run."""

    def __init__(self, host: str = "127.0.0.1", taken: Mapping[str, int] | None = None) -> None:
        self.host = host
        self.ports: dict[str, int] = dict(taken or {})

    def of(self, name: str) -> int:
        """The port of this name."""
        if name not in self.ports:
            self.ports[name] = free_port()
        return self.ports[name]

    def argv(self, process: str, command: str) -> list[str]:
        """The command's words; the first that is `python` is this interpreter."""

        def value(match: re.Match[str]) -> str:
            port = self.of(match[2] or process)
            return str(port) if match[1] == "port" else f"http://{self.host}:{port}"

        words = [_PLACE.sub(value, word) for word in shlex.split(command)]
        if "python" in words:
            words[words.index("python")] = sys.executable
        return words

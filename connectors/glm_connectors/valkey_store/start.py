"""What a person must change before a server starts, in one message; and what may mend itself.

A store that is down costs hits and stops no server. One that is there and will never serve pages does: wrong credentials
or rights, TLS that does not verify or is not spoken, a cluster taken for a node, something that is no Valkey.
"""

from __future__ import annotations

import ssl
import threading
import time
from typing import Any

from glm_connectors.valkey_store import health
from glm_connectors.valkey_store.failures import is_credentials, kind_of, lacks_right
from glm_connectors.valkey_store.silence import dial
from glm_connectors.valkey_store.url import CacheUrlError, Node, StoreUrl

# What glide serves, and who knows users (6.0). Valkey's own versions begin at 7.2.
_OLDEST = (6, 2)

# Of a step's timeout, of a node's steps together and of all nodes: what the last step finds is still waited for.
_STEPS, _ALL = 2.25, 2.5


def check_at_start(url: StoreUrl, timeout: float, *, thorough: bool = False) -> dict[Node, str]:
    """Asks every node once, all at the same time: {node: a word from `failures.KINDS`}, empty where all answer.

    CacheUrlError where a node is there and refuses our credentials, shows another certificate than it should, or is not
    what the scheme says: that needs a person. thorough: also where the user may not do what pages need, where a node
    speaks TLS and should not or the other way round, is too old, or no Valkey.

    timeout: seconds of each answer; all together take two and a half times as long at most, whatever a name server does.
    What is asked of a node after its first failure shares what is left of that. A node that is slower is a "timeout".
    """
    found: dict[Node, str | CacheUrlError] = {}
    began = time.monotonic()

    def ask(node: Node) -> None:
        try:
            fault = _fault(url, node, timeout, began + _STEPS * timeout, thorough)
        except CacheUrlError as error:
            found[node] = error
        else:
            found[node] = fault

    threads = [threading.Thread(target=ask, args=(node,), daemon=True) for node in url.nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, began + _ALL * timeout - time.monotonic()))
    down = {}
    for node in url.nodes:
        fault = found.get(node, "timeout")
        if isinstance(fault, CacheUrlError):
            raise fault
        if fault:
            down[node] = fault
    return down


def _fault(url: StoreUrl, node: Node, timeout: float, ends: float, thorough: bool) -> str:
    """Empty where it answers, else as `check_at_start`. ends: by time.monotonic(), here and below."""
    try:
        info = health.ask(url, node, timeout, pages=thorough)
    except Exception as error:
        heard = None
        if thorough and kind_of(error) == "connection":
            # It may be quiet until then, and something else may have to be asked after that.
            heard = _unheard(url, node, ends - _left(ends) / 2)
        if (why := _needs_a_person(url, node, heard or error)) is None and thorough:
            why = _is_another(url, node, error, ends)
        if why is not None:
            raise CacheUrlError(why) from None
        return kind_of(error)
    if info is not None:
        if bool(info.get("cluster_enabled", 0)) != url.cluster:
            raise CacheUrlError(_other_scheme(node, clustered=not url.cluster))
        if thorough and (version := _version(info)) and version < _OLDEST:
            shown, oldest = (".".join(map(str, numbers)) for numbers in (version, _OLDEST))
            raise CacheUrlError(f"{node} is of version {shown}; use a Valkey, or a Redis from {oldest} on")
    return ""


def _needs_a_person(url: StoreUrl, node: Node, error: Exception) -> str | None:
    said = health.said(url, error)
    if lacks_right(error):
        return (
            f"{node} does not let the user of {url} do what the cache needs: {said}; give it the rights that the "
            "README's cache section lists"
        )
    if is_credentials(error):
        return f"{node} refuses the credentials of {url}: {said}"
    if url.tls and _is_tls(error):
        return f"no TLS with {node}: {said}; ?ca=FILE names the authority to trust, ?cert=FILE&key=FILE who we are"
    return None


def _is_another(url: StoreUrl, node: Node, error: Exception, ends: float) -> str | None:
    """What answers there, where that is not what the URL says."""
    import valkey

    kind = kind_of(error)
    if kind == "moved" and not url.cluster:
        return _other_scheme(node, clustered=True)
    if kind in ("timeout", "connection") or isinstance(error, valkey.InvalidResponse):
        speaks = _speaks_plainly if url.tls else _speaks_tls
        if speaks(node, ends):
            scheme = ("valkey" if url.tls else "valkeys") + ("-cluster" if url.cluster else "")
            return f"{node} speaks {'no TLS' if url.tls else 'TLS'}: use {scheme}://"
    if isinstance(error, valkey.InvalidResponse):
        return f"what answers at {node} is no Valkey; correct host and port"
    if kind == "refused" and isinstance(error, valkey.ResponseError):
        return f"{node} refuses what the cache needs: {health.said(url, error)}"
    return None


def _other_scheme(node: Node, clustered: bool) -> str:
    scheme = "valkey-cluster://" if clustered else "valkey://"
    return f"{node} is {'part of a' if clustered else 'no'} cluster: use {scheme} (or its TLS form)"


def _version(info: dict[str, Any]) -> tuple[int, ...]:
    """Of the commands that it has, as far as it says: a Valkey calls itself a Redis 7.2 as well."""
    try:
        return tuple(map(int, str(info["redis_version"]).split(".")[:2]))
    except (KeyError, ValueError):
        return ()


def _left(ends: float) -> float:
    """Seconds, for a socket: some."""
    return max(0.001, ends - time.monotonic())


def _speaks_plainly(node: Node, ends: float) -> bool:
    """Whether a Valkey answers there without TLS. It is not told who we are."""
    try:
        with dial(node.host, node.port, _left(ends)) as one:
            one.settimeout(_left(ends))
            one.sendall(b"PING\r\n")
            return one.recv(64).startswith((b"+PONG", b"-NOAUTH", b"-NOPERM"))
    except (OSError, ValueError):
        return False


def _speaks_tls(node: Node, ends: float) -> bool:
    """Whether somebody there speaks TLS: whoever it is, nothing is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with dial(node.host, node.port, _left(ends)) as one:
            one.settimeout(_left(ends))
            with context.wrap_socket(one, server_hostname=node.host):
                return True
    except (OSError, ValueError):
        return False


def _unheard(url: StoreUrl, node: Node, ends: float) -> Exception | None:
    """What a node has against our certificate, or that there is none. In TLS 1.3 it says so after the handshake, and who
    has written by then may find the connection reset instead."""
    if not url.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=url.ca or None)
        if url.cert:
            context.load_cert_chain(url.cert, url.key, password="")
        with dial(node.host, node.port, _left(ends)) as one:
            one.settimeout(_left(ends))
            with context.wrap_socket(one, server_hostname=node.host) as connection:
                connection.settimeout(_left(ends))
                connection.recv(1)
    except (OSError, ValueError) as error:
        return error
    return None


def _is_tls(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLError):
            return not isinstance(seen, ssl.SSLEOFError | ssl.SSLZeroReturnError) and "timed out" not in str(
                seen
            )
        seen = seen.__cause__ or seen.__context__
    return "SSL" in str(error) and "timed out" not in str(error)

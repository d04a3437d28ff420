"""Health and administration over the `valkey` client: a fresh, short connection for each question.

The data path has connections of its own (`sockets.py`, `glide.py`); one that is stuck there says nothing here, and the
other way round.
"""

from __future__ import annotations

import secrets
from typing import Any

from glm_connectors.valkey_store.failures import kind_of, lacks_right
from glm_connectors.valkey_store.url import Node, StoreUrl


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
            "ssl_password": "",  # or an encrypted key asks the terminal for one
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


def ask(url: StoreUrl, node: Node, timeout: float, *, pages: bool = False) -> dict[str, Any] | None:
    """`INFO` of a node, after a PING; None where the URL's user may not ask for it and pages need it not.

    pages: asks also whether the user may what pages need. Raises what the client raises. A server's words in it may be
    what we have sent, the password as well: `said` leaves it out.
    """
    glide = url.cluster or url.tls
    client = connect(url, node, timeout)
    try:
        _ping(client, needed=url.cluster)
        if pages:
            _ask_for_pages(client, clustered=url.cluster)
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
    """Connects, signs in and asks. Who may not PING has an answer, and the node is alive; so is one that cannot write to
    its disk, which refuses PING as it does writes."""
    pool = client.connection_pool
    pool.release(pool.get_connection("PING"))  # what is refused while connecting is no PING
    try:
        client.ping()
    except Exception as error:
        if (needed or not lacks_right(error)) and "MISCONF" not in str(error):
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


def _ask_for_pages(client: Any, clustered: bool) -> None:
    """The commands of the data path, for a key of the pages' prefix that nobody else can have: nothing comes, and nothing
    changes. What else stands against them passes, or is said elsewhere."""
    nothing = f"glm:check:{secrets.token_hex(16)}"
    commands = [("GET", nothing), ("SET", nothing, "", "XX"), ("DEL", nothing)]
    if not clustered:  # there a page is read by itself
        commands.append(("MGET", nothing))
    for command in commands:
        try:
            client.execute_command(*command)
        except Exception as error:
            kind = kind_of(error)
            passes = kind in ("oom", "failover", "loading") or "MISCONF" in str(error)
            if not passes and not (clustered and kind == "moved"):
                raise


def said(url: StoreUrl, error: BaseException) -> str:
    """A failure's first line, without the password: a server may repeat what it was asked, or the beginning of it
    (Valkey: 128 bytes, with spaces for line ends), a library may quote it."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    forms = {
        url.password,
        " ".join(url.password.splitlines()),
        *(f(url.password)[1:-1] for f in (repr, ascii)),
    }
    found = [
        next((form[:end] for end in range(len(form), 4, -1) if form[:end] in line), form) for form in forms
    ]
    for secret in sorted(filter(None, found), key=len, reverse=True):
        line = line.replace(secret, "***")
    return line[:200]

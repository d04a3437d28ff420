"""The URL of a store of pages: what it may say, and one message that names the flag where it says something else.

    none                                              no remote tier
    embedded://[?maxmemory=1gb]                       a Valkey server of our own on this machine
    valkey://[user:password@]host[:port][,host…][/db] one node, or pages spread over several independent ones
    valkeys://…                                       the same over TLS [?ca=FILE&cert=FILE&key=FILE]
    valkey-cluster://…, valkeys-cluster://…           a Valkey cluster; the hosts are its seeds

User and password are percent-encoded. Only `password` itself ever holds the password: not `str`, `repr` or an
error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

FLAG = "--glm-cache-url"
SCHEMES = ("none", "embedded", "valkey", "valkeys", "valkey-cluster", "valkeys-cluster")
DEFAULT_PORT = 6379
DEFAULT_MAXMEMORY = "1gb"
_OPTIONS = {
    "embedded": ("maxmemory",),
    "valkey": (),
    "valkey-cluster": (),
    "valkeys": ("ca", "cert", "key"),
    "valkeys-cluster": ("ca", "cert", "key"),
}


class CacheUrlError(ValueError):
    """The URL can't be used, or the store refuses its credentials. The message names `--glm-cache-url`."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{FLAG}: {what}")


@dataclass(frozen=True)
class Node:
    """Where a Valkey server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class StoreUrl:
    """A parsed URL. `nodes` is empty for `none` and `embedded`; a cluster's are its seeds."""

    scheme: str
    nodes: tuple[Node, ...] = ()
    username: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    ca: str = ""
    cert: str = ""
    key: str = ""
    maxmemory: str = DEFAULT_MAXMEMORY

    @property
    def tls(self) -> bool:
        return self.scheme.startswith("valkeys")

    @property
    def cluster(self) -> bool:
        return self.scheme.endswith("-cluster")

    def __str__(self) -> str:
        """The URL without its password: fit for logs."""
        if self.scheme == "none":
            return "none"
        user = f"{self.username}:***@" if self.password else f"{self.username}@" if self.username else ""
        database = f"/{self.database}" if self.database else ""
        return f"{self.scheme}://{user}{','.join(map(str, self.nodes))}{database}"


def parse(text: str) -> StoreUrl:
    """The URL's parts. CacheUrlError, which names the flag and never the password, where it is not one."""
    text = text.strip()
    if text == "none":
        return StoreUrl("none")
    scheme, separator, _ = text.partition("://")
    if not separator or scheme not in SCHEMES[1:]:
        raise CacheUrlError(
            f"expected none or {', '.join(f'{s}://…' for s in SCHEMES[1:])}; found {_shown(text)}"
        )
    try:
        parts = urlsplit(text)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise CacheUrlError(f"{_shown(text)} is no URL: {_harmless(error)}") from None
    for name in options:
        if name not in _OPTIONS[scheme]:
            allowed = ", ".join(_OPTIONS[scheme]) or "none"
            raise CacheUrlError(f"unknown option {name!r}; {scheme}:// takes: {allowed}")
    if parts.fragment:
        raise CacheUrlError("a '#' in the URL: percent-encode it as %23")
    if scheme == "embedded":
        if parts.netloc or parts.path not in ("", "/"):
            raise CacheUrlError("embedded:// takes no host; for a running server use valkey://host:port")
        return StoreUrl(scheme, maxmemory=options.get("maxmemory", DEFAULT_MAXMEMORY))
    credentials, _, hosts = parts.netloc.rpartition("@")
    username, has_password, password = credentials.partition(":")
    nodes = tuple(_node(host) for host in hosts.split(","))
    if len(set(nodes)) != len(nodes):
        raise CacheUrlError(f"a node occurs twice: {', '.join(map(str, nodes))}")
    if credentials and has_password and not password:
        raise CacheUrlError("a user without a password; leave out the ':' where there is none")
    if username and not password and scheme != "valkey":
        # UPSTREAM: glide signs in with a password or not at all; it would be the default user.
        raise CacheUrlError(f"a user without a password is for valkey:// only; found {scheme}://")
    _check_files(options)
    return StoreUrl(
        scheme,
        nodes,
        unquote(username),
        unquote(password),
        _database(parts.path, scheme),
        **options,
    )


def _node(text: str) -> Node:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or "@" in text or port == 0:
        raise CacheUrlError(f"expected host or host:port (port 1 to 65535), found {text!r}")
    return Node(host, DEFAULT_PORT if port is None else port)


def _database(path: str, scheme: str) -> int:
    number = path.strip("/")
    if not number:
        return 0
    if not number.isascii() or not number.isdigit():
        raise CacheUrlError(f"expected a database number behind the host, found {path!r}")
    if scheme.endswith("-cluster") and int(number):
        raise CacheUrlError("a cluster has no database but 0")
    return int(number)


def _check_files(options: dict[str, str]) -> None:
    for name, path in options.items():
        if not os.path.isfile(path):
            raise CacheUrlError(f"{name}={path!r} is no file")
    if ("cert" in options) != ("key" in options):
        raise CacheUrlError("cert and key belong together")


def _shown(text: str) -> str:
    """The URL with whatever may be credentials left out."""
    head, at, tail = text.rpartition("@")
    if not at:
        return repr(text)
    return repr(f"{head.partition('://')[0]}://***@{tail}")


def _harmless(error: ValueError) -> str:
    """urllib quotes the part that it did not like, which may be the password."""
    return type(error).__name__ if "@" in str(error) else str(error)

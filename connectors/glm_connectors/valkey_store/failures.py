"""What went wrong at a store, by name: an exception of either client as one word for a metric."""

from __future__ import annotations

# failover: the node is not, or not yet, the one that takes this.
KINDS = ("timeout", "connection", "auth", "loading", "failover", "oom", "moved", "refused")
PASSING = ("timeout", "connection", "loading", "failover")  # the same operation may well succeed later


def kind_of(error: BaseException) -> str:
    """One of KINDS. By the server's own error code where there is one: our sockets and glide pass it on in the text, the
    `valkey` client makes it the error's class."""
    text = str(error)
    for code, kind in _CODES.items():
        if code in text:
            return kind
    name = type(error).__name__
    if name in _CLASSES:
        return _CLASSES[name]
    if "Timeout" in name or "timed out" in text.lower():
        return "timeout"
    if "Auth" in name:
        return "auth"
    if "Connection" in name or "Closing" in name or isinstance(error, OSError):
        return "connection"
    return "refused"


# Valkey's error codes, and glide's words for some of them.
_CODES = {
    "WRONGPASS": "auth",
    "NOAUTH": "auth",
    "NOPERM": "auth",
    "AuthenticationFailed": "auth",
    "PermissionDenied": "auth",
    "LOADING": "loading",
    "BusyLoading": "loading",
    # A script or a module keeps it busy; BUSYKEY and BUSYGROUP are other errors. With a colon: as glide writes it.
    "BUSY Valkey": "loading",
    "BUSY Redis": "loading",
    "BUSY: Valkey": "loading",
    "BUSY: Redis": "loading",
    "READONLY": "failover",
    "MASTERDOWN": "failover",
    "CLUSTERDOWN": "failover",
    "NOREPLICAS": "failover",
    "TRYAGAIN": "failover",
    "- ReadOnly": "failover",
    "- MasterDown": "failover",
    "- ClusterDown": "failover",
    "- TryAgain": "failover",
    "OOM": "oom",
    "MOVED": "moved",
    "ASK:": "moved",
    "- Moved": "moved",
    "- Ask": "moved",
}
_CLASSES = {
    "NoPermissionError": "auth",
    "BusyLoadingError": "loading",
    "ReadOnlyError": "failover",
    "MasterDownError": "failover",
    "ClusterDownError": "failover",
    "TryAgainError": "failover",
    "OutOfMemoryError": "oom",
    "MovedError": "moved",
    "AskError": "moved",
}


def is_credentials(error: BaseException) -> bool:
    """Whether the server is there and does not want us: no retry mends that."""
    return kind_of(error) == "auth"


def lacks_right(error: BaseException) -> bool:
    """Whether the server knows the user, who may not do this."""
    return type(error).__name__ == "NoPermissionError" or any(
        code in str(error) for code in ("NOPERM", "PermissionDenied")
    )


def wants_another(error: BaseException) -> bool:
    """Of a command's answer: whether a new connection may get a better one. A primary that has become a replica keeps its
    clients, while its name leads to another node; a user who was signed out signs in again."""
    return kind_of(error) in ("failover", "loading") or "NOAUTH" in str(error)


def remedy(error: BaseException) -> str:
    """What to change, behind the server's words; empty where waiting may do."""
    if lacks_right(error):
        return "; give its user the rights that the README's cache section lists"
    if is_credentials(error):
        return "; correct the credentials in --glm-cache-url or GLM_SGLANG_CACHE_URL and restart"
    return ""

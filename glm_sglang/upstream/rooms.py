"""The rooms of the fork and what each changes in SGLang."""

import importlib
from collections.abc import Sequence
from typing import TypeVar

from glm_sglang.platform_choice import PlatformName
from glm_sglang.upstream.hooks import Hook, Registration, Scope

# Modules with HOOKS and, where needed, REGISTRATIONS. Order is the order of installation.
ROOMS: tuple[str, ...] = (
    "glm_sglang.upstream.own_hooks",
    "glm_sglang.reference_platform.hooks",
    "glm_sglang.disaggregation.hooks",
    "glm_sglang.attention.hooks",
    "glm_sglang.indexer.hooks",
    "glm_sglang.moe.hooks",
    "glm_sglang.requests.hooks",
    "glm_sglang.prefill_graph.hooks",
    "glm_sglang.cache.hooks",
)

Change = TypeVar("Change", Hook, Registration)


def hooks() -> tuple[Hook, ...]:
    """Every hook of every room, whatever the platform.

    Raises ValueError where two hooks replace one symbol on one platform: only the last would be in effect.
    """
    found = _declared("HOOKS", Hook)
    replaced: dict[tuple[str, str], Hook] = {}
    for hook in found:
        if hook.kind != "replace":
            continue
        for platform in ("cuda", "reference") if hook.platform == "any" else (hook.platform,):
            other = replaced.setdefault((hook.target, platform), hook)
            if other is not hook:
                raise ValueError(f"{hook.target} is replaced twice: {other.function} and {hook.function}")
    return found


def registrations() -> tuple[Registration, ...]:
    """Every registration of every room, whatever the platform."""
    return _declared("REGISTRATIONS", Registration)


def active(changes: Sequence[Change], platform: PlatformName, scope: Scope) -> tuple[Change, ...]:
    """The changes that a process must carry.

    Under a stock launcher only those of scope "installed" count, and only where the reference platform is
    active.
    """
    if platform == "stock" or (scope == "installed" and platform != "reference"):
        return ()
    return tuple(
        change
        for change in changes
        if change.platform in ("any", platform) and (scope == "launcher" or change.scope == "installed")
    )


def everything(platform: str = "") -> tuple[Hook | Registration, ...]:
    """Hooks and registrations of every room; of one platform where it is named."""
    changes: tuple[Hook | Registration, ...] = (*hooks(), *registrations())
    return tuple(change for change in changes if not platform or change.platform in ("any", platform))


def symbols(changes: Sequence[Hook | Registration]) -> tuple[str, ...]:
    """Every upstream symbol that these changes rest on, sorted, each once."""
    return tuple(sorted({symbol for change in changes for symbol in change.symbols}))


def _declared(name: str, kind: type[Change]) -> tuple[Change, ...]:
    found: list[Change] = []
    for room in ROOMS:
        for change in getattr(importlib.import_module(room), name, ()):
            if not isinstance(change, kind):
                raise TypeError(f"{room}.{name} holds {change!r}, expected {kind.__name__}")
            found.append(change)
    return tuple(found)

"""What the launcher does about the cache: refuses what cannot go with it, fills in SGLang's flags, starts a
Valkey for `embedded://`, asks the store before anything is loaded.

The URL may hold a password, and SGLang prints its arguments; so the options reach the schedulers through the
environment, and the linker's configuration on the command line names the class and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from glm_sglang import failure, settings
from glm_sglang.cache import options, stalls
from glm_sglang.command_line import Request
from glm_sglang.errors import UsageError

LINKER = {"linker": "GlmCacheLinker", "linker_module_path": "glm_sglang.cache.linker"}
PAGE_TOKENS = 64
_URL = "--glm-cache-url"
_ANSWER_S = 1.0  # that a step of the question to the store may take

# ServerArgs field -> why it can't be. Each of them is a switch, or off when None.
_EXCLUDED: dict[str, str] = {
    "enable_lmcache": "another cache under the same radix tree",
    "enable_hierarchical_cache": "another cache under the same radix tree",
    "enable_flexkv": "another cache under the same radix tree",
    "disable_radix_cache": "a cache continues the radix tree",
    "radix_cache_backend": "a cache continues SGLang's own radix tree",
    "hicache_storage_backend": "a store of SGLang's hierarchical cache, which is not in use",
    "enable_unified_memory": "its pages move within the pool while they are copied",
    "enable_kv_cache_sharding": "a rank holds parts of a page",
    "enable_hisparse": "a part of the KV is on the host already",
    "speculative_algorithm": "the draft model's KV would not be stored",
}
# ServerArgs field -> its only value, and why.
_FIXED: dict[str, tuple[int, str]] = {
    "page_size": (PAGE_TOKENS, "the page that is stored"),
    "pp_size": (1, "because the stages' hits are not reconciled"),
}


def fields(request: Request) -> dict[str, tuple[Any, str]]:
    """ServerArgs field → (value, why) that turn the linker on; {} without a cache.

    Raises UsageError for a bad option, or for flags that exclude each other, naming the one to change.
    """
    chosen = options.read()
    if not chosen.on:
        return {}
    _refuse_conflicts(request)
    try:
        stalls.log_longer(settings.read(settings.CACHE_STALL_LOG_MS))
    except ValueError as error:
        raise UsageError(str(error)) from None
    if chosen.url.startswith("embedded://") and str(request.get("nnodes", 1)) != "1":
        raise UsageError(
            f"{_URL} is embedded://, a server of one machine, and --nnodes is {request.given['nnodes']}; give the URL of "
            "a Valkey that every node reaches"
        )
    why = f"{_URL} is given"
    return {
        "enable_unified_cache_external_linker": (True, why),
        "unified_cache_external_linker_backend": ("dynamic", why),
        "unified_cache_external_linker_config": (json.dumps(LINKER), why),
    }


def _refuse_conflicts(request: Request) -> None:
    if request.get("disaggregation_mode", "null") == "decode":
        raise UsageError(
            f"{_URL} does nothing on a decode server, which gets its KV from prefill; give it to the prefill "
            "server and leave it out here"
        )
    for name, why in _EXCLUDED.items():
        if request.get(name, None) not in (None, False):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} and {_URL} exclude each other ({why}); leave one of them out")
    for name in (
        "enable_unified_cache_external_linker",
        "unified_cache_external_linker_backend",
        "unified_cache_external_linker_config",
    ):
        if name in request.given:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} names another linker than {_URL} does; leave one of them out")
    for name, (allowed, why) in _FIXED.items():
        value = request.get(name, allowed)
        if str(value) != str(allowed):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} is {value}; with {_URL} it must be {allowed}, {why}")


@contextlib.contextmanager
def embedded_valkey() -> Iterator[None]:
    """While the server runs, so does the Valkey that `embedded://` asks for; its ranks are told where.

    Raises UsageError where it does not start.
    """
    chosen = options.read()
    if not chosen.url.startswith("embedded://"):
        yield
        return
    from glm_connectors.valkey_store import CacheUrlError, EmbeddedServer, parse

    try:
        server = EmbeddedServer(parse(chosen.url))
    except CacheUrlError as error:
        raise UsageError(str(error)) from None
    with server:
        os.environ[settings.CACHE_URL.name] = server.url
        print(f"{failure.PREFIX}cache: a Valkey of our own at {server.url}", file=sys.stderr, flush=True)
        yield


def check_store() -> None:
    """Asks the store, within seconds, what a server would find out minutes later, its model loaded.

    Raises UsageError for what will never serve pages: wrong credentials or rights, TLS that does not verify, another
    server than the URL says. One that does not answer is a warning: the server works without it.
    """
    chosen = options.read()
    if not chosen.on:
        return
    from glm_connectors.valkey_store import CacheUrlError, check_at_start, parse

    try:
        down = check_at_start(parse(chosen.url), _ANSWER_S, thorough=True)
    except CacheUrlError as error:
        raise UsageError(str(error)) from None
    for node, why in down.items():
        print(
            f"{failure.PREFIX}cache: {node} of {_URL} does not answer ({why}); the server starts without it, and has no "
            "hits from it until it does",
            file=sys.stderr,
            flush=True,
        )

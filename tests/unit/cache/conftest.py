"""SGLang's run-time context as a scheduler process has it, without a server."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from glm_connectors.tiers import Namespace, Share, TierConfig, TieredStore
from glm_connectors.valkey_store import EmbeddedServer

ALONE = Share()
os.environ.setdefault("GLM_SGLANG_PLATFORM", "reference")


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from sglang.srt.mem_cache import utils
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.runtime_context import get_context

    from glm_sglang.cache import gate, page_keys

    # As the hooks do in a server.
    def no_compiler(*_: Any) -> Any:
        raise AssertionError("the C++ hash would be compiled in the scheduler")

    monkeypatch.setattr(utils, "get_native_hash", functools.partial(page_keys.native_hash, no_compiler))
    for name, hook in (
        ("match", gate.matching),
        ("_tail_hashes", gate.tail_hashes),
        ("_sync_restorable_prefix", gate.shortest_common),
    ):
        _around(monkeypatch, UnifiedCacheLinkerWrapper, name, hook)
    _around(monkeypatch, UnifiedRadixCache, "insert", gate.insert)
    release = UnifiedCacheLinkerWrapper.release_request

    def release_request(self: Any, rid: str) -> None:
        gate.request_gone(release(self, rid), self, rid)

    monkeypatch.setattr(UnifiedCacheLinkerWrapper, "release_request", release_request)
    with get_context().override_server_args(page_size=64, device="cpu"):
        yield


def _around(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, hook: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **more: hook(original, *args, **more))


@pytest.fixture
def make_tree(context: None) -> Iterator[Callable[..., Any]]:
    """`make_tree(store, pages=…)`: a rank; closed at the end."""
    from tests.unit.cache.tree import Tree

    made: list[Tree] = []

    def make(*args: Any, **kwargs: Any) -> Tree:
        made.append(Tree(*args, **kwargs))
        return made[-1]

    yield make
    for tree in made:
        tree.close()


@pytest.fixture(scope="package")
def valkey() -> Iterator[EmbeddedServer]:
    """A real Valkey, shared: use prompts of your own, and leave it running."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def node(context: None, make_tree: Callable[..., Any], valkey: EmbeddedServer) -> Callable[..., Any]:
    """`node(wait_s=…)`: a tree over a store of its own; all share the Valkey. `port`: of a proxy before it."""
    from glm_sglang.cache.device_pages import device_pages
    from tests.unit.cache.tree import PAGE, make_pool

    layout = device_pages(make_pool(1), PAGE).layout
    space = Namespace("m", "r", "bf16", layout)

    def make(
        writer: bool = True,
        port: int | None = None,
        pool_bytes: int = 64 << 20,
        share: Share = ALONE,
        **more: Any,
    ) -> Any:
        url = valkey.url if port is None else f"valkey://127.0.0.1:{port}"
        config = TierConfig(url=url, pool_bytes=pool_bytes, request_timeout=1.0, drain=2.0)
        return make_tree(TieredStore(config, space, writer=writer, share=share), **more)

    return make

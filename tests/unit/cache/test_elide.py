"""Index buffers of layers that share an indexer: with our linker as without one, with another's as upstream wants."""

from __future__ import annotations

import pytest

from glm_sglang.cache.elide import elide_index_keys


@pytest.mark.parametrize(
    ("linker", "url", "elided"), [(False, "none", True), (True, "embedded://", True), (True, "none", False)]
)
def test_as_without_a_linker(monkeypatch: pytest.MonkeyPatch, linker: bool, url: str, elided: bool) -> None:
    from sglang.srt.mem_cache.kv_cache_configurator import _should_elide_dsa_index_k as original
    from sglang.srt.runtime_context import get_context, get_memory

    monkeypatch.setenv("GLM_SGLANG_CACHE_URL", url)
    with get_context().override_server_args(enable_unified_cache_external_linker=linker):
        assert elide_index_keys(original, is_draft_worker=False) is elided
        assert not elide_index_keys(original, is_draft_worker=True)
        assert get_memory().enable_unified_cache_external_linker is linker

"""Page hashes as the stores take them."""

from __future__ import annotations

from collections.abc import Sequence

from glm_sglang.cache.page_keys import chain_names


def chain(tokens: Sequence[int], page_tokens: int) -> list[bytes]:
    """Digests of the pages of `tokens`, 32 bytes each."""
    return [bytes.fromhex(name) for name in chain_names(tokens, page_tokens)]

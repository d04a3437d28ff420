"""Page keys of a prompt: a chain of keyed BLAKE3, one digest a page, hashed once when the request arrives.

The digest of a page names everything up to its end: its key is the digest of the page before it. The first
key is derived from salt and extra key (adapter, tenant), so prompts under different ones share nothing. No
Python `hash` is involved: the same in every process, whatever its PYTHONHASHSEED.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from blake3 import blake3

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

DIGEST_BYTES = 32
_CONTEXT = "glm_connectors 2026 page_hashes: root of a chain of token pages"


def root(salt: bytes = b"", extra_key: bytes = b"") -> bytes:
    """The key of a chain's first page, 32 bytes.

    Lengths are part of it: ("a", "b") differs from ("ab", "").
    """
    hasher = blake3(derive_key_context=_CONTEXT)
    for part in (salt, extra_key):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


def as_tokens(tokens: Sequence[int]) -> array[int]:
    """Token ids as 32-bit unsigned integers. OverflowError for one that is negative or needs more."""
    return array("I", tokens)


def page_hashes(tokens: ReadableBuffer, page_tokens: int, chain_root: bytes) -> list[bytes]:
    """Digests of the whole pages of a prompt, 32 bytes each; a last page that isn't full has none.

    tokens: contiguous 32-bit ids, such as `as_tokens` returns or a numpy array of uint32. page_tokens: ids
    in a page. chain_root: from `root`. ValueError where the ids are not 32 bits wide or page_tokens is below
    1.
    """
    view = memoryview(tokens)
    if view.itemsize != 4:
        raise ValueError(f"tokens: expected items of 4 bytes, found {view.itemsize}")
    if page_tokens < 1:
        raise ValueError(f"page_tokens: expected 1 or more, found {page_tokens}")
    data = view.cast("B")
    page_bytes = 4 * page_tokens
    digests: list[bytes] = []
    key = chain_root
    for start in range(0, len(data) - len(data) % page_bytes, page_bytes):
        key = blake3(data[start : start + page_bytes], key=key).digest()
        digests.append(key)
    return digests


def as_lmcache_hash(digest: bytes) -> int:
    """A digest as LMCache's chunk hash: its first 8 bytes as an unsigned integer, as LMCache folds vLLM's
    digests.
    """
    return int.from_bytes(digest[:8], "big")

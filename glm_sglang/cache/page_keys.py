"""SGLang's page hashes: a chain of SHA-256 over token ids, seeded by extra key and salt, computed off its thread.

The radix tree computes the same chain for what it stores (in Rust), so these must equal it byte for byte; they
are the same in every process, whatever its PYTHONHASHSEED. Where the tree's module is loaded its own function makes
them: in less time, and without the interpreter lock, for which the scheduler would wait. Python is the rest.

UPSTREAM: cpp_utils/native_hash.get_native_hash compiles a C++ extension in the scheduler process when it is first
called: 14 s without an answer, or the end of the process where OpenSSL's headers are not installed.
"""

from __future__ import annotations

import hashlib
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from glm_sglang.cache.in_use import in_use

# Pages hashed before the interpreter lock is offered to others: about half a millisecond.
_PAGES_A_TURN = 256
_U32_MAX = 0xFFFF_FFFF
_WIDE = b"\xff"
# UPSTREAM: its `get_hash_str`(int64 ids, digest before in hexadecimal or None, tokens a page) → digests in hexadecimal.
_TREE = "sglang.srt.mem_cache.rust_tree_core.mem_cache"


def chain_names(
    tokens: Sequence[int], page_tokens: int, prior: bytes | None = None, *, yielding: bool = False
) -> list[str]:
    """Digests of the pages of `tokens` in hexadecimal; a last page that is not full is hashed as it is.

    prior     digest of the page before the first, or the name space's seed; None for neither.
    yielding  offer the interpreter to other threads now and then: for a thread beside the scheduler's.

    ValueError for a negative id.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    if ids.size and int(ids.min()) < 0:
        raise ValueError("token ids must not be negative")
    if (of_tree := _hash_of_tree()) is not None:
        return of_tree(np.ascontiguousarray(ids), prior.hex() if prior else None, page_tokens)
    wide = bool(ids.size) and int(ids.max()) > _U32_MAX
    narrow = ids.astype("<u4").tobytes() if not wide else b""
    names: list[str] = []
    for number, start in enumerate(range(0, len(ids), page_tokens)):
        page = hashlib.sha256(prior or b"")
        if not wide:
            page.update(narrow[4 * start : 4 * (start + page_tokens)])
        elif int(ids[start : start + page_tokens].max()) <= _U32_MAX:
            page.update(ids[start : start + page_tokens].astype("<u4").tobytes())
        else:
            page.update(_WIDE)
            page.update(ids[start : start + page_tokens].astype("<u8").tobytes())
        prior = page.digest()
        names.append(prior.hex())
        if yielding and number % _PAGES_A_TURN == _PAGES_A_TURN - 1:
            time.sleep(0)
    return names


def _hash_of_tree() -> Callable[[Any, str | None, int], list[str]] | None:
    """The radix tree's function, where this process has loaded it. Never loads it: that may compile it."""
    return getattr(sys.modules.get(_TREE), "get_hash_str", None)


def request_names(
    tokens: Sequence[int], page_tokens: int, extra_key: str | None, cache_salt: str | None
) -> list[str]:
    """Digests in hexadecimal of a prompt's whole pages, from its start, in its name space; for a thread of its own."""
    from sglang.srt.mem_cache.utils import storage_namespace_seed

    seed = storage_namespace_seed(extra_key, cache_salt or None)
    whole = len(tokens) // page_tokens * page_tokens
    return chain_names(tokens[:whole], page_tokens, bytes.fromhex(seed) if seed else None, yielding=True)


def native_hash(
    original: Any, token_ids: Any, prior_digest: bytes | None, page_size: int | None = None
) -> str | list[str]:
    """Around get_native_hash: the same digests without compiling C++, where this cache is on.

    Bigram keys (speculation) are not ours: the launcher refuses speculation with this cache.
    """
    if in_use() is None or getattr(token_ids, "is_bigram", False):
        return original(token_ids, prior_digest, page_size)  # type: ignore[no-any-return]
    raw = token_ids.raw_token_ids() if hasattr(token_ids, "raw_token_ids") else token_ids
    tokens = raw if isinstance(raw, array) else array("q", raw)
    names = chain_names(tokens, page_size or max(1, len(tokens)), prior_digest)
    if page_size is not None:
        return names
    return names[0] if names else hashlib.sha256(prior_digest or b"").hexdigest()

"""Page hashes: SGLang's chain, from its definition, the same in every process."""

from __future__ import annotations

import hashlib
import importlib.util
import struct
import subprocess
import sys
import threading
import time
from array import array
from typing import Any

import pytest

from glm_sglang.cache import page_keys
from glm_sglang.cache.page_keys import chain_names
from tests.unit.cache.digests import chain

TOKENS = [(i * 7919) % 151_000 for i in range(200)]


def by_definition(tokens: list[int], prior: bytes = b"") -> list[bytes]:
    """SHA-256 over the digest before and the page's ids as little-endian 32-bit integers."""
    digests = []
    for start in range(0, len(tokens), 64):
        page = tokens[start : start + 64]
        prior = hashlib.sha256(prior + struct.pack(f"<{len(page)}I", *page)).digest()
        digests.append(prior)
    return digests


@pytest.fixture(params=["python", "tree"])
def hashed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to the same digests: hashlib's, and those of the radix tree's own module."""
    tree = page_keys._TREE
    if request.param == "python":
        monkeypatch.delitem(sys.modules, tree, raising=False)
        assert page_keys._hash_of_tree() is None
    else:
        if importlib.util.find_spec(tree) is None:
            pytest.skip("SGLang comes without its radix tree in Rust")
        from sglang.srt.mem_cache.rust_tree_core.extension import bindings

        monkeypatch.setitem(sys.modules, tree, bindings)
        assert page_keys._hash_of_tree() is not None
    return str(request.param)


@pytest.mark.usefixtures("hashed_by")
@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 200])
def test_chain(length: int) -> None:
    tokens = TOKENS[:length]
    assert chain(tokens, 64) == chain(array("q", tokens), 64) == by_definition(tokens)
    after = [digest.hex() for digest in by_definition(tokens, b"p" * 32)]
    assert chain_names(tokens, 64, b"p" * 32, yielding=True) == after


@pytest.mark.parametrize("hashed_by", ["tree"], indirect=True)
def test_the_tree_hashes_without_the_interpreter_lock(hashed_by: str) -> None:
    """Nobody is asked to give the lock back for 100 s here, so another thread runs on only where it is let go."""
    turns, ended = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not ended.wait(0.0001):
            turns += 1

    before = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    thread.start()
    try:
        sys.setswitchinterval(100.0)
        tokens: Any = array("q", range(1 << 20))
        seen, until = turns, time.monotonic() + 60
        while (
            turns == seen and time.monotonic() < until
        ):  # one call takes milliseconds, a core may come later
            page_keys._hash_of_tree()(tokens, None, 64)  # type: ignore[misc]
        assert turns > seen
    finally:
        sys.setswitchinterval(before)
        ended.set()
        thread.join()


@pytest.mark.usefixtures("hashed_by")
def test_a_page_names_everything_before_it() -> None:
    other = [TOKENS[0] + 1, *TOKENS[1:]]
    assert not set(chain(TOKENS, 64)) & set(chain(other, 64))
    assert chain(TOKENS[:150], 64)[:2] == chain(TOKENS, 64)[:2]


@pytest.mark.usefixtures("hashed_by")
def test_ids_beyond_32_bits_have_pages_of_their_own() -> None:
    """A placeholder of a picture may be that large; its low bits must not pass for a token."""
    wide = [*TOKENS[:64], (1 << 32) + TOKENS[64], *TOKENS[65:128]]
    assert chain(wide, 64)[0] == chain(TOKENS, 64)[0]
    assert chain(wide, 64)[1] != chain(TOKENS[:128], 64)[1]
    page = b"\xff" + struct.pack("<64Q", *wide[64:])
    assert chain(wide, 64)[1] == hashlib.sha256(chain(TOKENS, 64)[0] + page).digest()
    with pytest.raises(ValueError, match="negative"):
        chain([-1], 64)


def test_the_same_whatever_the_hash_seed() -> None:
    """LMCache 1739, 2979: several ranks, zero hits, because the hash seed differed."""
    program = "from glm_sglang.cache.page_keys import chain_names; print(chain_names(range(128), 64)[1])"
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert said == {by_definition(list(range(128)))[1].hex()}

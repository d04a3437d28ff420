"""Page keys: equal prompts have equal keys everywhere, different ones don't; each key names all tokens
before its end.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from blake3 import blake3
from glm_connectors.page_hashes import DIGEST_BYTES, as_lmcache_hash, as_tokens, page_hashes, root
from hypothesis import given
from hypothesis import strategies as st

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=200)


@given(tokens=TOKENS, page=st.integers(1, 70))
def test_keys_are_the_chain_of_keyed_blake3_over_whole_pages(tokens: list[int], page: int) -> None:
    expected, key = [], root(b"s", b"e")
    for start in range(0, len(tokens) - page + 1, page):
        key = blake3(np.array(tokens[start : start + page], "<u4").tobytes(), key=key).digest()
        expected.append(key)
    assert page_hashes(as_tokens(tokens), page, root(b"s", b"e")) == expected
    assert all(len(digest) == DIGEST_BYTES for digest in expected)


@given(tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200), data=st.data())
def test_a_changed_token_changes_its_page_and_all_after_it_and_none_before(
    tokens: list[int], data: st.DataObject
) -> None:
    page = data.draw(st.integers(1, 16))
    position = data.draw(st.integers(0, len(tokens) - 1))
    other = tokens.copy()
    other[position] = (other[position] + 1) % 2**32
    before = page_hashes(as_tokens(tokens), page, root())
    after = page_hashes(as_tokens(other), page, root())
    equal = [a == b for a, b in zip(before, after, strict=True)]
    assert equal == [index < position // page for index in range(len(before))]


@given(tokens=TOKENS, longer=TOKENS, page=st.integers(1, 16))
def test_a_prompt_and_its_continuation_share_the_keys_of_the_prompt(
    tokens: list[int], longer: list[int], page: int
) -> None:
    keys = page_hashes(as_tokens(tokens), page, root())
    assert page_hashes(as_tokens(tokens + longer), page, root())[: len(keys)] == keys


@given(one=st.tuples(st.binary(), st.binary()), two=st.tuples(st.binary(), st.binary()))
def test_another_salt_or_extra_key_is_another_root(
    one: tuple[bytes, bytes], two: tuple[bytes, bytes]
) -> None:
    assert (root(*one) == root(*two)) == (one == two)


def test_keys_are_the_same_under_another_hash_seed() -> None:
    code = (
        "from glm_connectors.page_hashes import *;"
        "print(page_hashes(as_tokens(range(200)), 64, root(b'salt', b'lora'))[-1].hex())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert printed == {page_hashes(as_tokens(range(200)), 64, root(b"salt", b"lora"))[-1].hex() + "\n"}


def test_ids_of_another_width_and_empty_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="expected items of 4 bytes, found 8"):
        page_hashes(np.zeros(64, np.int64), 64, root())
    with pytest.raises(ValueError, match="expected 1 or more, found 0"):
        page_hashes(np.zeros(64, np.uint32), 0, root())
    with pytest.raises(OverflowError):
        as_tokens([-1])


def test_lmcache_takes_the_first_eight_bytes() -> None:
    assert as_lmcache_hash(bytes([0, 0, 0, 0, 0, 0, 1, 2, *range(24)])) == 258

"""The byte-level tokenizer: text survives it, bytes are tokens, and a chat's next turn begins with the last
one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_sglang.tiny_model.shape import SPECIAL_TOKENS, special_id

_loaded: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def _load(checkpoint: Callable[..., Path]) -> None:
    from transformers import AutoTokenizer

    _loaded["tokenizer"] = AutoTokenizer.from_pretrained(checkpoint("bf16"), local_files_only=True)


@settings(deadline=None)
@given(st.text())
def test_any_text_survives(text: str) -> None:
    tokenizer = _loaded["tokenizer"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


@settings(deadline=None)
@given(st.text().filter(lambda text: not any(special in text for special in SPECIAL_TOKENS)))
def test_tokens_are_the_bytes(text: str) -> None:
    assert _loaded["tokenizer"].encode(text, add_special_tokens=False) == list(text.encode())


def test_no_token_is_added_unasked() -> None:
    assert _loaded["tokenizer"].encode("ab") == [97, 98]


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_special_tokens_are_one_token_and_vanish_on_request(token: str) -> None:
    tokenizer = _loaded["tokenizer"]
    ids = tokenizer.encode(f"a{token}b", add_special_tokens=False)
    assert ids == [97, special_id(token), 98]
    assert tokenizer.decode(ids) == f"a{token}b"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"


def _prompt(messages: list[dict[str, Any]], generate: bool = True) -> list[int]:
    ids = _loaded["tokenizer"].apply_chat_template(messages, add_generation_prompt=generate, tokenize=True)
    return list(ids["input_ids"] if hasattr(ids, "keys") else ids)


def test_chat_has_glms_markers() -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = _loaded["tokenizer"].decode(_prompt(messages))
    assert text == "[gMASK]<sop><|system|>\nS<|user|>\nU<|assistant|>\n"


@settings(deadline=None)
@given(st.text(), st.text(), st.text())
def test_turn_2_begins_with_turn_1_and_its_answer(question: str, answer: str, more: str) -> None:
    first = [{"role": "user", "content": question}]
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": more}]
    served = _prompt(first) + _loaded["tokenizer"].encode(answer, add_special_tokens=False)
    assert _prompt(second)[: len(served)] == served


def test_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert _prompt([{"role": "user", "content": parts}]) == _prompt([{"role": "user", "content": "ab"}])

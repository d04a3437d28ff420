"""A byte-level tokenizer: every byte is a token, so any text goes in and comes out unchanged. Special tokens
are GLM's.
"""

from __future__ import annotations

from typing import Any

from glm_sglang.tiny_model.shape import FIRST_SPECIAL, PAD_TOKEN, SPECIAL_TOKENS

# The roles' markers of GLM-4.5 and later. Turn 2's prompt begins with turn 1's prompt and answer, byte for
# byte, so a prefix cache can hit: nothing is stripped, and no text is added after an answer.
CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ '<|observation|>\\n' }}{% else %}{{ '<|' + message.role + '|>\\n' }}{%
    endif %} {%- if message.content is string %}{{ message.content }} {%- else %}
        {%- for part in message.content or [] %}{{ part if part is string else part.text }}{% endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""


def byte_symbols() -> list[str]:
    """The character that stands for each byte 0..255 in a byte-level vocabulary (UPSTREAM: tokenizers'
    ByteLevel).

    Bytes that Latin-1 prints stand for themselves; the others, in order, for the code points from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in printable else next(hidden)) for byte in range(256)]


def tokenizer_json() -> str:
    """tokenizer.json as text: token id = byte value, then the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS]
    )
    if added != len(SPECIAL_TOKENS) or tokenizer.token_to_id(SPECIAL_TOKENS[0]) != FIRST_SPECIAL:
        raise RuntimeError("tokenizers gave the special tokens other ids than 256 and up")
    return str(tokenizer.to_str(pretty=True)) + "\n"


def tokenizer_config(max_position: int) -> dict[str, Any]:
    """tokenizer_config.json."""
    return {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": PAD_TOKEN,
        "extra_special_tokens": list(SPECIAL_TOKENS),
        "model_max_length": max_position,
        "pad_token": PAD_TOKEN,
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }

"""A prompt without tokens is refused. Upstream, it ends both schedulers of a prefill-decode pair."""

from __future__ import annotations

from typing import Any

from glm_sglang.upstream.hooks import Hook

_TARGET = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
_WHY = (
    'input_ids [] is refused upstream, but text "" becomes no tokens and is not: the prefill scheduler fails on the '
    "empty batch and the decode scheduler on its leak check"
)
_REMOVE = "SGLang refuses a prompt of no tokens however it was given"


def refuse_empty_prompt(manager: Any, request: Any, input_ids: list[int] | None) -> None:
    """Before _validate_one_request. Raises ValueError, which SGLang answers with HTTP 400."""
    if input_ids is not None and not len(input_ids) and getattr(request, "input_embeds", None) is None:
        raise ValueError(
            "The prompt is empty: it has 0 tokens. Send at least one token of text or input_ids."
        )


HOOKS: tuple[Hook, ...] = (
    Hook(
        target=_TARGET,
        kind="before",
        function=f"{__name__}:refuse_empty_prompt",
        why=_WHY,
        remove_when=_REMOVE,
        platform="cuda",
    ),
    # Also in a stock decode server on the reference platform, which gets the same request from the router.
    Hook(
        target=_TARGET,
        kind="before",
        function=f"{__name__}:refuse_empty_prompt",
        why=_WHY,
        remove_when=_REMOVE,
        platform="reference",
        scope="installed",
    ),
)

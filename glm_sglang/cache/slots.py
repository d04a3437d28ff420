"""SGLang names pages by their tokens' slots in the KV pool: slots → page numbers, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def page_numbers(slots: Any, page_tokens: int) -> Sequence[int]:
    """Slots [pages · page_tokens], page by page → the pages' numbers. Waits for a device tensor: not for the
    scheduler thread. ValueError where the slots are not whole pages.
    """
    # numpy from here on: each of torch's operations lets go of the interpreter, and has to get it back.
    ends = slots.cpu().numpy().reshape(-1, page_tokens)
    starts = ends[:, 0]
    if (starts % page_tokens).any() or (ends[:, -1] != starts + (page_tokens - 1)).any():
        raise ValueError(f"slots are not whole pages of {page_tokens} tokens")
    numbers: list[int] = (starts // page_tokens).tolist()
    return numbers


def numbers_on_device(slots: Sequence[torch.Tensor], page_tokens: int) -> torch.Tensor:
    """Slots int64 [pages · page_tokens] of each request, page by page → the numbers of all pages, int64 [pages], on their
    device. On the current stream; waits for nothing. page_tokens ≥ 2.

    Where the slots are not whole pages the device fails, and with it the process: another request's pages would be
    overwritten. UPSTREAM: PagedTokenToKVPoolAllocator.alloc gives whole pages.
    """
    # [pages, 2]: each page's first slot and last.
    ends = torch.cat([one.view(-1, page_tokens)[:, :: page_tokens - 1] for one in slots])
    numbers = ends[:, 0] // page_tokens
    inside = torch.arange(0, page_tokens, page_tokens - 1, device=ends.device)
    whole = torch.add(inside, numbers[:, None], alpha=page_tokens) == ends
    torch._assert_async(whole.all(), f"slots are not whole pages of {page_tokens} tokens")
    return numbers

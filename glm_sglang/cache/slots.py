"""SGLang names pages by their tokens' slots in the KV pool: slots → page numbers, on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def page_numbers(slots: Any, page_tokens: int) -> Sequence[int]:
    """Slots [pages · page_tokens], page by page → the pages' numbers. Waits for a device tensor: not for the
    scheduler thread. ValueError where the slots are not whole pages.
    """
    host = slots if slots.device.type == "cpu" else slots.cpu()
    # Plain numbers from here on: each of torch's operations lets go of the interpreter, and has to get it back.
    host = host.numpy()
    firsts, lasts = host[::page_tokens].tolist(), host[page_tokens - 1 :: page_tokens].tolist()
    last = page_tokens - 1
    if len(host) % page_tokens or any(
        first % page_tokens or end != first + last for first, end in zip(firsts, lasts, strict=True)
    ):
        raise ValueError(f"slots are not whole pages of {page_tokens} tokens")
    return [first // page_tokens for first in firsts]


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

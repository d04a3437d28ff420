"""Weight updates that leave an expert half loaded: the caller is told, every rank knows, and nothing is computed with it.

Targets       SchedulerWeightUpdaterManager.end_weight_update, .update_weights_from_disk, .update_weights_from_ipc.
Why           an expert of which only parts came cannot be arranged. Raised where it is found, that ends one rank's
              scheduler, loads the same files again, or becomes a warning beside "success", by the way it came.
Upstream      none.
Goes when     process_weights_after_loading can refuse an update on all ranks alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from glm_sglang.moe import state

logger = logging.getLogger(__name__)


def answer(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around an update's last step: its answer is the ranks' common one. Collective over `manager.tp_cpu_group`.

    After a failure a session stays open and generation is paused, on every rank, until an update arranges all experts.
    """
    session = manager._session
    result = original(manager, request)
    running = state.running()
    if running is None or running.routed is None:
        return result
    found = _everywhere(running.unfinished, manager.tp_cpu_group)
    scheduler = manager.scheduler
    if not found:
        if running.blocked and scheduler is not None:
            # UPSTREAM: None unless the caller paused generation as well.
            scheduler._engine_paused = scheduler._pause_started_at is not None
        running.blocked = ""
        return result
    if scheduler is not None:
        # UPSTREAM: what pause_generation sets in mode "in_place"; the event loops then run no batch.
        scheduler._engine_paused = True
    running.blocked = "; ".join(found)
    manager._session = session
    result.success = False
    result.message = (
        f"MegaMoE: experts are not whole, generation is paused: {running.blocked}. Load them whole, then "
        + ("end_weight_update again" if session is not None else "update again")
    )
    logger.error("%s", result.message)
    return result


def _everywhere(unfinished: dict[int, str], group: Any) -> list[str]:
    """What any rank of `group` could not arrange, in the same order on all of them."""
    ranks: list[dict[int, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, unfinished, group=group)
    return [
        f"rank {rank}, layer {layer}: {text}"
        for rank, found in enumerate(ranks)
        for layer, text in sorted((found or {}).items())
    ]

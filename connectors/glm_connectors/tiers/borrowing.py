"""Gets by way of a sibling: what it lends is copied, what it has found out is taken over, the rest comes from Valkey."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from glm_connectors.tiers.gets import Fetch, Getter
from glm_connectors.tiers.lending import OUTCOMES
from glm_connectors.tiers.metrics import MetricTable
from glm_connectors.tiers.siblings import Ending, Siblings

logger = logging.getLogger(__name__)

_FORBIDDEN = (errno.EPERM, errno.EACCES, errno.ENOSYS)
# Seconds that pages may be on their way to a sibling: then they come from Valkey, whatever it says.
_LONGEST_S = 30.0


class Borrower:
    """Runs on the store's event loop. from_valkey: gets some of a fetch's pages there, an outcome for each."""

    def __init__(
        self,
        siblings: Siblings,
        executor: Any,
        getter: Getter,
        table: MetricTable,
        from_valkey: Callable[[Fetch, Sequence[bytes]], Coroutine[Any, Any, dict[bytes, str]]],
    ) -> None:
        self._siblings, self._executor, self._getter, self._table = siblings, executor, getter, table
        self._from_valkey = from_valkey

    async def bring(self, owner: int, fetch: Fetch) -> dict[bytes, str]:
        """An outcome for each of the fetch's keys, whose pages are the sibling's to get."""
        return await self._bring(owner, fetch, fetch.keys, asyncio.get_running_loop().time() + _LONGEST_S)

    async def _bring(self, owner: int, fetch: Fetch, keys: Sequence[bytes], until: float) -> dict[bytes, str]:
        outcomes: dict[bytes, str] = {}
        said: dict[bytes, int] = {}
        async with self._siblings.borrow(owner, keys) as places:
            if places:
                said = dict(zip(keys, places, strict=True))
            if lent := {key: place for key, place in said.items() if place > 0}:
                outcomes |= await self._copy(owner, fetch, lent)
        if Ending.ABSENT in said.values():
            for ticket in fetch.tickets:
                ticket._without.add(owner)
        again: list[bytes] = []
        rest: list[bytes] = []
        for key in keys:
            place = said.get(key, Ending.ABSENT)
            if place in OUTCOMES:
                outcomes[key] = OUTCOMES[place]
            elif place == Ending.COMING and asyncio.get_running_loop().time() < until:
                again.append(key)
            elif (outcome := outcomes.get(key, "absent")) in ("absent", "unusable"):
                self._table.add("cache_sibling_pages", outcome)
                rest.append(key)
        parts: list[Coroutine[Any, Any, dict[bytes, str]]] = []
        if rest:
            parts.append(self._from_valkey(fetch, rest))
        if again:
            parts.append(self._bring(owner, fetch, again, until))
        for part in await asyncio.gather(*parts):
            outcomes |= part
        return outcomes

    async def _copy(self, owner: int, fetch: Fetch, lent: dict[bytes, int]) -> dict[bytes, str]:
        keys, places, pid = list(lent), list(lent.values()), self._siblings.pid(owner)
        try:
            outcomes = await self._executor.submit_job(self._getter.from_sibling, pid, fetch, keys, places)
            return dict(zip(keys, outcomes, strict=True))
        except OSError as error:
            if error.errno in _FORBIDDEN:
                self._siblings.refuse(owner, str(error))
            else:  # it is ending, and its connection will say so; or short of memory
                logger.info("cache: pages of rank %d were not copied: %s", owner, error)
        except Exception as error:
            logger.warning("a sibling's pages can't be copied: %s", error)
        return dict.fromkeys(keys, "unusable")

"""What a rank lends to its siblings: pages of its share that are in the pool, or on their way there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from glm_connectors.tiers.envelope import HEADER_BYTES
from glm_connectors.tiers.gets import HIT, Fetch
from glm_connectors.tiers.pool import CpuPool, Page
from glm_connectors.tiers.siblings import Ending

# Seconds that a question waits for a page that nobody here is getting: its request may be about to arrive.
_GRACE_S = 0.1
_LOOK_S = 0.005
# What an owner has found out goes for all; whatever else its get has come to ("full", "cancelled") is its own affair.
_ENDINGS = {"miss": Ending.MISS, "failed": Ending.FAILED, "down": Ending.DOWN}
OUTCOMES = {int(ending): outcome for outcome, ending in _ENDINGS.items()}


class Lending:
    """`siblings.Lender`. under_way: gets that have not ended, by key. planned: what requests wait for, begun or not; both
    change on the same event loop.

    Ranks get a prompt in the same order, and each its own pages from nobody else: so the first page that any of them
    lacks is always under way, and nobody waits for one who waits for him.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: CpuPool,
        under_way: Mapping[bytes, Fetch],
        planned: Mapping[bytes, int],
    ) -> None:
        self._loop, self._pool, self._under_way, self._planned = loop, pool, under_way, planned

    async def lend(self, keys: Sequence[bytes]) -> tuple[list[int], list[Page]]:
        """Pages that are on their way are waited for; others for as long as their request may still be about to
        arrive here."""
        until = self._loop.time() + _GRACE_S
        ended: dict[bytes, str] = {}
        while True:
            held, absent = self._pool.hold_any(keys, "sibling")
            coming = {
                key: fetch.task
                for key in absent
                if (fetch := self._under_way.get(key)) is not None and fetch.task is not None
            }
            late = self._loop.time() >= until
            open_ = [key for key in absent if key not in ended and (not late or key in self._planned)]
            if not coming and not open_:
                places = {page.key: page.address - HEADER_BYTES for page in held}
                found = [
                    places.get(key) or int(_ENDINGS.get(ended.get(key, ""), Ending.ABSENT)) for key in keys
                ]
                return found, held
            self._pool.release(held, "sibling")
            if not coming:
                await asyncio.sleep(_LOOK_S)
                continue
            await asyncio.wait(set(coming.values()))
            for key, task in coming.items():
                outcome = "cancelled" if task.cancelled() else task.result().get(key, "cancelled")
                if outcome != HIT:
                    ended[key] = outcome

    def take_back(self, lent: object) -> None:
        """What `lend` gave is no longer lent."""
        assert isinstance(lent, list)
        self._pool.release(lent, "sibling")

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
_LOOK_S, _LOOK_MOST_S = 0.005, 0.04  # between looks at what has not begun
# What an owner has found out goes for all; whatever else its get has come to ("full", "cancelled") is its own affair.
_ENDINGS = {"miss": Ending.MISS, "failed": Ending.FAILED, "down": Ending.DOWN}
OUTCOMES = {int(ending): outcome for outcome, ending in _ENDINGS.items()}


class Lending:
    """`siblings.Lender`. under_way: gets that have not ended, by key. planned: what requests wait for, begun or not; both
    change on the same event loop.

    Nobody waits for one who waits for him: a rank gets its own pages from Valkey directly; a page's position is the same
    in every prompt that has it; and who waits for a planned page waits for a prompt that is at an earlier position.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: CpuPool,
        under_way: Mapping[bytes, Fetch],
        planned: Mapping[bytes, int],
    ) -> None:
        self._loop, self._pool, self._under_way, self._planned = loop, pool, under_way, planned

    async def lend(self, keys: Sequence[bytes], seconds: float) -> tuple[list[int], list[Page]]:
        """Pages that are on their way are waited for, at most so many seconds; others for as long as their request may
        still be about to arrive here."""
        now = self._loop.time()
        until, grace = now + seconds, now + min(_GRACE_S, seconds)
        ended: dict[bytes, str] = {}
        look = _LOOK_S
        while True:
            held, absent = self._pool.hold_any(keys, "sibling")
            coming = {
                key: fetch.task
                for key in absent
                if (fetch := self._under_way.get(key)) is not None and fetch.task is not None
            }
            now = self._loop.time()
            planned = {key for key in absent if key not in ended and key in self._planned}
            unknown = now < grace and any(
                key not in ended and key not in planned and key not in coming for key in absent
            )
            if now >= until or not (coming or planned or unknown):
                places = {page.key: page.address - HEADER_BYTES for page in held}
                places |= dict.fromkeys([*coming, *planned], int(Ending.COMING))
                return [
                    places.get(key) or int(_ENDINGS.get(ended.get(key, ""), Ending.ABSENT)) for key in keys
                ], held
            self._pool.release(held, "sibling")
            if not coming:
                await asyncio.sleep(min(look, until - now))
                look = min(2 * look, _LOOK_MOST_S)
                continue
            await asyncio.wait(set(coming.values()), timeout=until - now)
            for key, task in coming.items():
                if task.done():
                    outcome = "cancelled" if task.cancelled() else task.result().get(key, "cancelled")
                    if outcome != HIT:
                        ended[key] = outcome

    def take_back(self, lent: object) -> None:
        """What `lend` gave is no longer lent."""
        assert isinstance(lent, list)
        self._pool.release(lent, "sibling")

    def sample(self) -> int:
        """The address of a slot that was free; 0 where none was."""
        pages = self._pool.take(1, "sibling") if self._pool.free else None
        if not pages:
            return 0
        address = pages[0].address - HEADER_BYTES
        self._pool.release(pages, "sibling")
        return address

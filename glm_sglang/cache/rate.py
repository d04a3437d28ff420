"""The measured prefill rate, against which a load from Valkey is weighed."""

from __future__ import annotations

from collections.abc import Callable


class PrefillRate:
    """Tokens and seconds of each prefill batch: from its launch to the next scheduling step.

    Without overlap a step comes when the batch has been computed; with it, when the batch before has been. In a row of
    batches both are a batch's time. `report(tokens, seconds)` gets every one of more than a page.
    """

    def __init__(self, report: Callable[[int, float], None], at_least: int = 64) -> None:
        self._report = report
        self._at_least = at_least
        self._tokens = 0
        self._launched_at = 0.0

    def launched(self, tokens: int, now: float) -> None:
        """A batch of `tokens` new tokens is about to run."""
        self._tokens, self._launched_at = tokens, now

    def step(self, now: float) -> None:
        """The scheduler has come around."""
        tokens, self._tokens = self._tokens, 0
        if tokens >= self._at_least and now > self._launched_at:
            self._report(tokens, now - self._launched_at)

"""What the proof of the client accepts; its figures come from `--prove-client`, on a quiet machine."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.ab.prove import judged


def rates(requests: float = 9000.0, tokens: int = 90_000_000) -> list[dict[str, Any]]:
    return [{"requests_per_s": requests, "input_tokens_per_s": tokens}]


def delays(*late: tuple[int, float, float]) -> list[dict[str, Any]]:
    return [{"streams": n, "ttft_late_p50_ms": p50, "ttft_late_p99_ms": p99} for n, p50, p99 in late]


@pytest.mark.parametrize(
    ("late", "streams", "ok"),
    [
        # What an earlier proof called fine: a first token of 20 ms, seen 28 ms late at 128 streams.
        ([(1, 1.652, 5.87), (16, 1.244, 3.897), (128, 27.736, 157.045)], 16, True),
        ([(1, 0.5, 1.0), (16, 2.1, 3.0), (128, 0.5, 1.0)], 1, False),
        ([(1, 0.5, 1.0), (16, 0.5, 10.1)], 1, False),
        ([(1, 2.5, 3.0), (16, 0.5, 1.0)], 0, False),
        ([(1, 0.5, 1.0), (16, 2.0, 10.0), (128, 2.0, 10.0)], 128, True),
    ],
)
def test_a_client_that_sees_tokens_late_is_not_proven(
    late: list[tuple[int, float, float]], streams: int, ok: bool
) -> None:
    found = judged(rates(), delays(*late))
    assert (found["streams"], found["ok"]) == (streams, ok)
    assert found["answer"].startswith(f"Up to {streams} streams at once")


@pytest.mark.parametrize(
    ("requests", "tokens", "ok"),
    [(5000.0, 0, True), (4999.0, 999_999, False), (4316.2, 75_610_670, True)],
)
def test_either_rate_is_enough(requests: float, tokens: int, ok: bool) -> None:
    """The requirement's own wording: 5,000 requests/s or 1M input tokens/s on two cores."""
    assert judged(rates(requests, tokens), delays((16, 0.1, 0.1)))["ok"] is ok

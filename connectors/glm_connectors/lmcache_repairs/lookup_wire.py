"""Messages between the repaired lookup client and servers.

LMCache's own (lmcache.v1.lookup_client.async_lookup_message, same tags), with rank and attempt added: that
is what lets a client tell a late reply from one to the present question. Hashes travel packed and offsets
run-length encoded, which takes a rank a third of the time to read; a long prompt has thousands. Upstream's
lists are read as well, though an unrepaired client has no link to a repaired server (`lookup_link`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import overload

import msgspec

_UNSIGNED, _SIGNED = "Q", "q"  # digests folded to 64 bits; Python's `hash`, upstream's default


class LookupRequest(msgspec.Struct, tag="LookupRequestMsg"):
    """Scheduler to rank. Read it with `hashes_of` and `Offsets`.

    hashes: one a chunk, packed as `code` says (upstream: a list). offsets: tokens in each chunk as (length,
    count) runs (upstream: lengths).
    """

    lookup_id: str
    hashes: bytes | list[int]
    offsets: list[tuple[int, int] | int]
    request_configs: dict[str, str] | None = None
    attempt: int = 0
    code: str = _UNSIGNED


class LookupCleanup(msgspec.Struct, tag="LookupCleanupMsg"):
    """Scheduler to rank: release what was loaded for this attempt."""

    lookup_id: str
    attempt: int = 0


class LookupReply(msgspec.Struct, tag="LookupResponseMsg"):
    """Rank to scheduler. rank -1: the sender says none."""

    lookup_id: str
    num_hit_tokens: int
    rank: int = -1
    attempt: int = 0


def request(
    lookup_id: str,
    hashes: Sequence[int],
    offsets: Sequence[int],
    request_configs: dict[str, str] | None,
    attempt: int,
) -> LookupRequest:
    """A request with its hashes packed. OverflowError for a hash beyond 64 bits."""
    try:
        packed, code = array(_UNSIGNED, hashes), _UNSIGNED
    except OverflowError:  # negative
        packed, code = array(_SIGNED, hashes), _SIGNED
    return LookupRequest(lookup_id, packed.tobytes(), _runs(offsets), request_configs, attempt, code)


def _runs(offsets: Sequence[int]) -> list[tuple[int, int] | int]:
    """All chunks but the last are of one length, as a rule: one run, and what comes behind it as it is."""
    if not offsets:
        return []
    first = offsets[0]
    count = offsets.count(first)
    if list(offsets[:count]) != [first] * count:
        return list(offsets)
    return [(first, count), *offsets[count:]]


def hashes_of(message: LookupRequest) -> Sequence[int]:
    """The chunk hashes. UPSTREAM: TokenDatabase.process_tokens only takes their length and iterates."""
    if isinstance(message.hashes, list):
        return message.hashes
    values = array(message.code)
    values.frombytes(message.hashes)
    return values


class Offsets(Sequence[int]):
    """Tokens in each chunk, expanded when they are read.

    UPSTREAM: TokenDatabase.process_tokens iterates over them.
    """

    def __init__(self, runs: Sequence[tuple[int, int] | int]) -> None:
        self._runs = [(run, 1) if isinstance(run, int) else run for run in runs]

    def __len__(self) -> int:
        return sum(count for _, count in self._runs)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(repeat(length, count) for length, count in self._runs)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        return list(self)[index]


encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(LookupRequest | LookupCleanup).decode
decode_to_scheduler = msgspec.msgpack.Decoder(LookupReply).decode

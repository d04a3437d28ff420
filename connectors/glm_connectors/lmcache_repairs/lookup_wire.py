"""Messages between the repaired lookup client and servers: LMCache's own, with rank and attempt added.

Tags and field names are upstream's (lmcache.v1.lookup_client.async_lookup_message) and structs are maps on
the wire, so an unrepaired peer reads them and ignores what it does not know. Rank and attempt are what lets
a client tell a late reply from one to the present question.
"""

from __future__ import annotations

import msgspec


class LookupRequest(msgspec.Struct, tag="LookupRequestMsg"):
    """Scheduler to rank. hashes: one a chunk; offsets: tokens in each chunk."""

    lookup_id: str
    hashes: list[int]
    offsets: list[int]
    request_configs: dict[str, str] | None = None
    attempt: int = 0


class LookupCleanup(msgspec.Struct, tag="LookupCleanupMsg"):
    """Scheduler to rank: release what was loaded for this attempt."""

    lookup_id: str
    attempt: int = 0


class LookupReply(msgspec.Struct, tag="LookupResponseMsg"):
    """Rank to scheduler. rank -1: the sender has no repairs."""

    lookup_id: str
    num_hit_tokens: int
    rank: int = -1
    attempt: int = 0


encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(LookupRequest | LookupCleanup).decode
decode_to_scheduler = msgspec.msgpack.Decoder(LookupReply).decode

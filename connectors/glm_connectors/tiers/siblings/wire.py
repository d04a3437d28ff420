"""What siblings say to each other: msgpack, each message behind its length in four bytes, little-endian."""

from __future__ import annotations

import asyncio
import enum
import socket
import struct

import msgspec

_LENGTH = struct.Struct("<I")
_MOST = 16 << 20  # bytes of a message
_CREDENTIALS = struct.Struct("3i")  # UPSTREAM: struct ucred: pid, uid, gid


class Ending(enum.IntEnum):
    """What became of a page that is not lent, in the place of its address."""

    ABSENT = -1  # it is not here: ask Valkey
    MISS = -2  # Valkey has not got it
    FAILED = -3  # its get failed
    DOWN = -4  # Valkey is down
    COMING = -5  # it is on its way there: ask again


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """Owner, first. probe: the address of eight bytes that say `PROBE`. sample: of a byte of its pages' memory, which may
    be of a kind that can't be read; 0 for none."""

    probe: int
    sample: int


class Ask(msgspec.Struct, tag="ask", array_like=True):
    """Lend me these. seconds: after which an answer is due, whatever has come by then."""

    number: int
    keys: list[bytes]
    seconds: float


class Loan(msgspec.Struct, tag="loan", array_like=True):
    """Owner, to each `Ask`. places: for each key the address of its slot, header first, or an `Ending`; until `Return`.
    Empty where it was returned before it was answered, or could not be."""

    number: int
    places: list[int]


class Return(msgspec.Struct, tag="return", array_like=True):
    """They have been copied, or are not wanted any more."""

    number: int


PROBE = b"glmpages"
Message = Hello | Ask | Loan | Return
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def send(writer: asyncio.StreamWriter, message: Message) -> None:
    """Queues it; nothing where the connection has ended. Messages are small and answered, so what is queued is bounded
    by what is asked."""
    if writer.is_closing():
        return
    body = _encoder.encode(message)
    writer.write(_LENGTH.pack(len(body)) + body)


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None at the end. ValueError for what is none."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > _MOST:
            raise ValueError(f"a message of {length} bytes")
        return _decoder.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a message: {error}") from None


def user_of(writer: asyncio.StreamWriter) -> int:
    """Whose process is at the other end. An abstract socket has no permissions of its own."""
    connection = writer.get_extra_info("socket")
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])

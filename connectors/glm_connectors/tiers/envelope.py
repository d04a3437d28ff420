"""What stands before a page's bytes in its slot and in Valkey: enough to refuse anything that is not that page.

128 bytes, little-endian: magic (8), format version (2), header bytes (2), zero (4), fingerprint of the name
space (16), key (32), length of the page (8), xxh3-64 of the page (8), zero (48). The header is a function of
name space, key and page, so it is compared as a whole, zeros included. The slot is header and page in one
piece: a put writes it, and a get fills it, without a copy of ours.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal, Protocol

from xxhash import xxh3_64_intdigest

from glm_connectors.tiers.checksums import digests
from glm_connectors.tiers.layout import FINGERPRINT_BYTES, Namespace

HEADER_BYTES = 128
KEY_BYTES = 32
MAGIC = b"GLMPAGE\n"
VERSION = 1
_FIXED = struct.Struct(f"<8sHHI{FINGERPRINT_BYTES}s{KEY_BYTES}sQ")
_CHECKSUM = struct.Struct("<Q")
_AT = _FIXED.size
_ZEROS = bytes(HEADER_BYTES - _AT - _CHECKSUM.size)
_WHOLE = struct.Struct(f"{_FIXED.format}Q{len(_ZEROS)}s")

Fault = Literal["length", "magic", "version", "fingerprint", "key", "checksum"]
FAULTS: tuple[Fault, ...] = ("length", "magic", "version", "fingerprint", "key", "checksum")


class Sealed(Protocol):
    """A slot: a page of the pool."""

    @property
    def slot(self) -> memoryview:
        """Header and page, format "B"."""

    @property
    def address(self) -> int:
        """Where the page's first byte is, behind the header."""


class Envelope:
    """Seals and checks the slots of one name space."""

    def __init__(self, namespace: Namespace) -> None:
        self._fingerprint = namespace.fingerprint
        self._page_bytes = namespace.layout.page_bytes
        self.value_bytes = HEADER_BYTES + self._page_bytes
        self._prefix = f"glm:{VERSION}:{self._fingerprint.hex()}:"
        self._digests = digests()

    def name(self, key: bytes) -> str:
        """The page's key in Valkey. Hexadecimal: readable, and no byte of it is a cluster's hash tag."""
        return self._prefix + key.hex()

    def _head(self, key: bytes) -> bytes:
        return _FIXED.pack(MAGIC, VERSION, HEADER_BYTES, 0, self._fingerprint, key, self._page_bytes)

    def seal(self, slot: memoryview, key: bytes) -> None:
        """Writes the header of the page that is in `slot` [header + page bytes]."""
        self._write(slot, key, xxh3_64_intdigest(slot[HEADER_BYTES:]))

    def seal_all(self, pages: Sequence[Sealed], keys: Sequence[bytes]) -> None:
        """The same for several pages, whose checksums are one call (`checksums`)."""
        found = self._digests([page.address for page in pages], self._page_bytes)
        for page, key, digest in zip(pages, keys, found, strict=True):
            self._write(page.slot, key, digest)

    def _write(self, slot: memoryview, key: bytes, digest: int) -> None:
        _WHOLE.pack_into(
            slot, 0, MAGIC, VERSION, HEADER_BYTES, 0, self._fingerprint, key, self._page_bytes, digest, _ZEROS
        )

    def check(self, slot: memoryview, key: bytes, length: int) -> Fault | None:
        """Whether a value of `length` bytes that was read into `slot` is the page of `key`; None, or a fault.

        "checksum" also for a header that differs where it has no name: only damage does that.
        """
        return self._check_head(slot, key, length) or self._check_digest(
            slot, xxh3_64_intdigest(slot[HEADER_BYTES:])
        )

    def check_all(
        self, pages: Sequence[Sealed], keys: Sequence[bytes], lengths: Sequence[int]
    ) -> list[Fault | None]:
        """The same for several pages, whose checksums are one call."""
        faults = [
            self._check_head(page.slot, key, length)
            for page, key, length in zip(pages, keys, lengths, strict=True)
        ]
        fair = [number for number, fault in enumerate(faults) if fault is None]
        found = self._digests([pages[number].address for number in fair], self._page_bytes)
        for number, digest in zip(fair, found, strict=True):
            faults[number] = self._check_digest(pages[number].slot, digest)
        return faults

    def _check_head(self, slot: memoryview, key: bytes, length: int) -> Fault | None:
        """All but the checksum and the zeros behind it."""
        if length != self.value_bytes:
            return "length"
        head = slot[:_AT].tobytes()
        if head == self._head(key):
            return None
        magic, version, size, _zero, fingerprint, found_key, page = _FIXED.unpack(head)
        if magic != MAGIC:
            return "magic"
        if (version, size) != (VERSION, HEADER_BYTES):
            return "version"
        if fingerprint != self._fingerprint:
            return "fingerprint"
        if found_key != key:
            return "key"
        return "length" if page != self._page_bytes else "checksum"

    @staticmethod
    def _check_digest(slot: memoryview, digest: int) -> Fault | None:
        return None if slot[_AT:HEADER_BYTES] == _CHECKSUM.pack(digest) + _ZEROS else "checksum"

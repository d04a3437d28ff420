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
_ZEROS = bytes(HEADER_BYTES - _FIXED.size - 8)
_WHOLE = struct.Struct(f"{_FIXED.format}Q{len(_ZEROS)}s")  # with the checksum

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

    def seal(self, slot: memoryview, key: bytes) -> None:
        """Writes the header of the page that is in `slot` [header + page bytes]."""
        slot[:HEADER_BYTES] = self._header(key, xxh3_64_intdigest(slot[HEADER_BYTES:]))

    def seal_all(self, pages: Sequence[Sealed], keys: Sequence[bytes]) -> None:
        """The same for several pages, whose checksums are one call (`checksums`)."""
        found = self._digests([page.address for page in pages], self._page_bytes)
        for page, key, digest in zip(pages, keys, found, strict=True):
            page.slot[:HEADER_BYTES] = self._header(key, digest)

    def _header(self, key: bytes, digest: int) -> bytes:
        return _WHOLE.pack(
            MAGIC, VERSION, HEADER_BYTES, 0, self._fingerprint, key, self._page_bytes, digest, _ZEROS
        )

    def check(self, slot: memoryview, key: bytes, length: int) -> Fault | None:
        """Whether a value of `length` bytes that was read into `slot` is the page of `key`; None, or a fault.

        "checksum" also for a header that differs where it has no name: only damage does that.
        """
        if length != self.value_bytes:
            return "length"
        return self._check(slot, key, xxh3_64_intdigest(slot[HEADER_BYTES:]))

    def check_all(
        self, pages: Sequence[Sealed], keys: Sequence[bytes], lengths: Sequence[int]
    ) -> list[Fault | None]:
        """The same for several pages, whose checksums are one call."""
        faults: list[Fault | None] = ["length"] * len(pages)
        whole = [number for number, length in enumerate(lengths) if length == self.value_bytes]
        found = self._digests([pages[number].address for number in whole], self._page_bytes)
        for number, digest in zip(whole, found, strict=True):
            faults[number] = self._check(pages[number].slot, keys[number], digest)
        return faults

    def _check(self, slot: memoryview, key: bytes, digest: int) -> Fault | None:
        """A value of the right length, whose page has this checksum."""
        header = slot[:HEADER_BYTES].tobytes()
        if header == self._header(key, digest):
            return None
        magic, version, size, _zero, fingerprint, found_key, page = _FIXED.unpack_from(header)
        if magic != MAGIC:
            return "magic"
        if (version, size) != (VERSION, HEADER_BYTES):
            return "version"
        if fingerprint != self._fingerprint:
            return "fingerprint"
        if found_key != key:
            return "key"
        return "length" if page != self._page_bytes else "checksum"

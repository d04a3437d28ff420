"""What stands before a page's bytes in its slot and in Valkey: enough to refuse anything that is not that page.

128 bytes, little-endian: magic (8), format version (2), header bytes (2), zero (4), fingerprint of the name
space (16), key (32), length of the page (8), xxh3-64 of the page (8), zero (48). The header is a function of
name space, key and page, so it is compared as a whole, zeros included. The slot is header and page in one
piece: a put writes it, and a get fills it, without a copy of ours.
"""

from __future__ import annotations

import struct
from typing import Literal

from xxhash import xxh3_64_intdigest

from glm_connectors.tiers.layout import FINGERPRINT_BYTES, Namespace

HEADER_BYTES = 128
KEY_BYTES = 32
MAGIC = b"GLMPAGE\n"
VERSION = 1
_FIXED = struct.Struct(f"<8sHHI{FINGERPRINT_BYTES}s{KEY_BYTES}sQ")
_CHECKSUM = struct.Struct("<Q")
_AT = _FIXED.size
_ZEROS = bytes(HEADER_BYTES - _AT - _CHECKSUM.size)

Fault = Literal["length", "magic", "version", "fingerprint", "key", "checksum"]
FAULTS: tuple[Fault, ...] = ("length", "magic", "version", "fingerprint", "key", "checksum")


class Envelope:
    """Seals and checks the slots of one name space."""

    def __init__(self, namespace: Namespace) -> None:
        self._fingerprint = namespace.fingerprint
        self._page_bytes = namespace.layout.page_bytes
        self.value_bytes = HEADER_BYTES + self._page_bytes
        self._prefix = f"glm:{VERSION}:{self._fingerprint.hex()}:"

    def name(self, key: bytes) -> str:
        """The page's key in Valkey. Hexadecimal: readable, and no byte of it is a cluster's hash tag."""
        return self._prefix + key.hex()

    def _head(self, key: bytes) -> bytes:
        return _FIXED.pack(MAGIC, VERSION, HEADER_BYTES, 0, self._fingerprint, key, self._page_bytes)

    def seal(self, slot: memoryview, key: bytes) -> None:
        """Writes the header of the page that is in `slot` [header + page bytes]."""
        digest = _CHECKSUM.pack(xxh3_64_intdigest(slot[HEADER_BYTES:]))
        slot[:HEADER_BYTES] = self._head(key) + digest + _ZEROS

    def check(self, slot: memoryview, key: bytes, length: int) -> Fault | None:
        """Whether a value of `length` bytes that was read into `slot` is the page of `key`; None, or a fault.

        "checksum" also for a header that differs where it has no name: only damage does that.
        """
        if length != self.value_bytes:
            return "length"
        header = bytes(slot[:HEADER_BYTES])
        expected = self._head(key)
        if header[:_AT] != expected:
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
        digest = _CHECKSUM.pack(xxh3_64_intdigest(slot[HEADER_BYTES:]))
        return None if header[_AT:] == digest + _ZEROS else "checksum"

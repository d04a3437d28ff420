"""What one page of one rank consists of, and the name space in which its bytes may be used."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from blake3 import blake3

FINGERPRINT_BYTES = 16
_CONTEXT = "glm_connectors 2026 tiers: fingerprint of a name space"


@dataclass(frozen=True)
class PageLayout:
    """One page of `page_tokens` tokens of one rank: its parts, back to back, in this order.

    parts: (name, bytes) each, e.g. ("kv", main KV of all layers) and ("index", index keys of the layers that
    have an indexer of their own). The order and the sizes are part of the fingerprint: name what makes them
    up (layer count, dtype, bytes a token) in the part's name where two layouts could have equal sizes.
    ValueError for a layout without bytes, or with a name twice.
    """

    page_tokens: int
    parts: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.parts]
        if self.page_tokens < 1 or not self.parts or min(size for _, size in self.parts) < 1:
            raise ValueError(f"a page needs tokens, and parts with bytes; found {self}")
        if len(set(names)) != len(names):
            raise ValueError(f"a part's name occurs twice: {names}")

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page: the sum of its parts."""
        return sum(size for _, size in self.parts)

    def span(self, name: str) -> slice:
        """Where the part lies within a page's bytes. KeyError for an unknown name."""
        start = 0
        for part, size in self.parts:
            if part == name:
                return slice(start, start + size)
            start += size
        raise KeyError(name)


@dataclass(frozen=True)
class Namespace:
    """Everything besides the tokens that a page's bytes depend on: pages of two name spaces never meet.

    model: name or digest of the configuration. weights_revision: digest of the weights or their revision.
    dtype: of the stored KV. indexer: which layers have one, its dimensions and quantisation. parallel:
    what of the parallel layout changes a rank's bytes ("" where all ranks hold the same, as with MLA's KV
    under TP; ranks of a layout that splits pages must each have their own).
    """

    model: str
    weights_revision: str
    dtype: str
    layout: PageLayout
    indexer: str = ""
    parallel: str = ""

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes, the same in every process; in each key's name in Valkey and in each envelope."""
        hasher = blake3(derive_key_context=_CONTEXT)
        texts = [str(getattr(self, field.name)) for field in fields(self) if field.name != "layout"]
        texts += [str(self.layout.page_tokens)]
        texts += [text for name, size in self.layout.parts for text in (name, str(size))]
        for text in texts:
            data = text.encode()
            hasher.update(len(data).to_bytes(8, "little"))
            hasher.update(data)
        return hasher.digest(FINGERPRINT_BYTES)

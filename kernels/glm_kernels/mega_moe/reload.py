"""Telling transformed expert bytes from freshly loaded ones, so that a second weight load is transformed
exactly once more.

SGLang's loaders copy a checkpoint's rows straight into the parameters that the kernel reads (UPSTREAM:
build_sm90_mega_moe_experts_weights keeps a boolean, so what is loaded later stays untransformed). A flag
can't tell; the bytes can. After a transform the state keeps a 64-bit fingerprint of every part a loader
writes on its own; a part whose fingerprint still holds is transformed, any other was loaded since. An expert
of which only some parts changed is neither: that is refused, never guessed.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

_MIX_POSITION, _MIX_A, _MIX_B = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB  # odd, below 2**63


class PartState(enum.Enum):
    """What one expert's parameters hold."""

    LOADED = "loaded"  # checkpoint layout
    TRANSFORMED = "transformed"  # kernel layout


@dataclass(frozen=True)
class _Record:
    """`moved`: the parts whose bytes the transform changed. Only they can tell one layout from the other."""

    after: tuple[int, ...]
    moved: tuple[bool, ...]


@dataclass
class TransformState:
    """Fingerprints of one layer's transformed experts, kept with the layer; empty before the first."""

    records: dict[int, _Record] = field(default_factory=dict)

    def classify(self, expert: int, now: tuple[int, ...]) -> PartState:
        """Whether `expert`, whose parts have the fingerprints `now`, is loaded or transformed.

        Raises ValueError where only some of its parts were loaded since the transform.
        """
        record = self.records.get(expert)
        if record is None:
            return PartState.LOADED
        same = [a == b for a, b in zip(now, record.after, strict=True)]
        if all(same):
            return PartState.TRANSFORMED
        if any(kept and moved for kept, moved in zip(same, record.moved, strict=True)):
            changed = [i for i, kept in enumerate(same) if not kept]
            raise ValueError(
                f"expert {expert}: only parts {changed} of {len(same)} were loaded again since its weights "
                "were arranged for MegaMoE; load an expert whole (gate, up, down, scales) in one update"
            )
        return PartState.LOADED

    def record(self, expert: int, before: tuple[int, ...], after: tuple[int, ...]) -> None:
        """Remembers `expert` as transformed, from parts with fingerprints `before` to parts with `after`."""
        self.records[expert] = _Record(after, tuple(a != b for a, b in zip(after, before, strict=True)))


def fingerprints(parts: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """One 64-bit number a part; one device synchronisation for all of them."""
    return tuple(torch.stack([_fingerprint(part) for part in parts]).tolist())


def _fingerprint(part: torch.Tensor) -> torch.Tensor:
    """Position-dependent mix of the part's bytes, summed modulo 2**64; 0-d int64. Takes twice its memory."""
    raw = part.contiguous().view(torch.uint8).flatten()
    if raw.numel() % 8:
        raw = torch.nn.functional.pad(raw, (0, 8 - raw.numel() % 8))
    words = raw.view(torch.int64)
    mixed = (
        torch.arange(words.numel(), device=words.device).mul_(_MIX_POSITION).bitwise_xor_(words).mul_(_MIX_A)
    )
    mixed ^= mixed >> 32
    return mixed.mul_(_MIX_B).sum()

"""Real text in any amount, the same for a seed: paragraphs of a corpus in seeded order.

The default corpus is the language reference that CPython carries (pydoc_data.topics: half a megabyte of
English prose and code). `--text FILE` takes another, a document of one's own users, say.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

#: Bytes of text that a token stands for, until an endpoint has said how many it counts (`ab` asks it).
BYTES_PER_TOKEN = 4.0
_SHORTEST = 40  # characters: below it a paragraph is a heading or a rule


@functools.cache
def paragraphs(files: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Paragraphs of the corpus, in its order. Raises ValueError when there are fewer than two."""
    if files:
        source = "\n\n".join(Path(name).read_text(encoding="utf-8") for name in files)
    else:
        from pydoc_data.topics import topics

        source = "\n\n".join(topics[name] for name in sorted(topics))
    found = tuple(part.strip("\n") for part in source.split("\n\n") if len(part) >= _SHORTEST)
    if len(found) < 2:
        raise ValueError(f"--text: {', '.join(files)} holds {len(found)} paragraphs; it must hold at least 2")
    return found


def corpus_id(files: tuple[str, ...] = ()) -> str:
    """Names the corpus by content, so that two results can be told to have used the same."""
    digest = hashlib.sha256("\n\n".join(paragraphs(files)).encode()).hexdigest()[:12]
    return f"{','.join(Path(name).name for name in files) or 'pydoc_data.topics'}:{digest}"


class Text:
    """Draws texts of a wanted number of tokens."""

    def __init__(self, bytes_per_token: float = BYTES_PER_TOKEN, files: Sequence[str] = ()) -> None:
        if not bytes_per_token > 0:
            raise ValueError(f"--bytes-per-token is {bytes_per_token}; it must be above 0")
        self.bytes_per_token = bytes_per_token
        self.files = tuple(files)

    def draw(self, tokens: int, *seed: object) -> str:
        """About `tokens` tokens of text. Texts of different seeds differ from the first words on."""
        return self.exactly(round(tokens * self.bytes_per_token), *seed)

    def exactly(self, size: int, *seed: object) -> str:
        """Text of `size` bytes (UTF-8); shorter by up to 3 where a character would be cut."""
        parts: list[str] = []
        length = 0
        for part in self._shuffled(":".join(map(str, seed))):
            if length >= size:
                break
            parts.append(part)
            length += len(part.encode()) + 2
        return "\n\n".join(parts).encode()[:size].decode(errors="ignore")

    def _shuffled(self, seed: str) -> Iterator[str]:
        # The first line is unlike any other seed's, so that no page of a prefix cache is shared by chance.
        yield f"[{hashlib.sha256(seed.encode()).hexdigest()[:16]}]"
        order = random.Random(seed)
        while True:
            yield from order.sample(paragraphs(self.files), len(paragraphs(self.files)))

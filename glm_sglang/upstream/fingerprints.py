"""The recorded SHA-256 of every upstream symbol that a change rests on (`fingerprints.json`, written by
`record`).
"""

import functools
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from glm_sglang.errors import ContractError

FILE = Path(__file__).with_name("fingerprints.json")


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded, and beside which versions.

    versions  distribution -> version.
    files     path below site-packages -> SHA-256 of the whole file: a shortcut, so that an unchanged file
              isn't parsed.
    symbols   dotted path -> SHA-256 of the symbol's source (`source.fingerprint`).
    """

    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    symbols: dict[str, str] = field(default_factory=dict)


@functools.cache
def recorded() -> Recorded:
    """The record of this build. Raises ContractError where it is missing or unreadable."""
    try:
        content = orjson.loads(FILE.read_bytes())
        return Recorded(content["versions"], content["files"], content["symbols"])
    except (OSError, ValueError, KeyError) as error:
        raise ContractError(
            what="the record of upstream fingerprints can't be read",
            expected=f"{FILE.name} beside {__name__}",
            found=f"{type(error).__name__}: {error}",
            mend="reinstall glm-sglang; in a checkout: python -m glm_sglang.upstream.record",
        ) from error


def write(record: Recorded) -> None:
    """Write the record, sorted, one entry a line. Raises OSError."""
    content = {name: dict(sorted(getattr(record, name).items())) for name in ("versions", "files", "symbols")}
    FILE.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    recorded.cache_clear()

"""Is upstream what this fork was built on? Versions and fingerprints, without importing SGLang.

`python -m glm_sglang.upstream.check` runs it for both platforms' symbols and exits 1 with one message.
"""

import sys
from collections.abc import Iterable

from glm_sglang import settings
from glm_sglang.errors import ContractError
from glm_sglang.upstream import fingerprints, pins, rooms, source

RECORD = "python -m glm_sglang.upstream.record"


def check_symbols(symbols: Iterable[str], allow_untested: bool) -> tuple[str, ...]:
    """Compare each symbol's source with the record; returns those that differ.

    Raises ContractError for a missing or unrecorded symbol, always, and for a changed one unless
    `allow_untested`.
    """
    record = fingerprints.recorded()
    digests: dict[str, str] = {}
    changed: list[str] = []
    for symbol in symbols:
        expected = record.symbols.get(symbol)
        if expected is None:
            raise ContractError(
                what=f"no fingerprint is recorded for the upstream symbol {symbol}",
                expected=f"an entry in {fingerprints.FILE.name}",
                found="none",
                mend=f"read the symbol in the pinned version, then {RECORD}",
            )
        try:
            location = source.locate(symbol)
            if location.relative not in digests:
                digests[location.relative] = source.file_digest(location.file)
            if digests[location.relative] == record.files.get(location.relative):
                continue
            found = source.fingerprint(symbol)
        except source.SymbolMissingError as error:
            raise _differs(symbol, "is missing", expected, f"none: {error}") from error
        if found != expected:
            changed.append(symbol)
            if not allow_untested:
                raise _differs(symbol, "has changed", expected, f"sha256 {found[:16]}… in {location.file}")
    return tuple(changed)


def _differs(symbol: str, how: str, expected: str, found: str) -> ContractError:
    owner = symbol.partition(".")[0].replace("_", "-")
    pin = pins.declared().get(owner)
    beside = f" in {pin.name} {pin.version}" if pin else ""
    again = (
        f"pip install --force-reinstall --no-deps '{pin.name}=={pin.version}'"
        if pin
        else f"reinstall {owner}"
    )
    mend = again
    if how == "has changed":
        mend += f"; to run untested code all the same: {settings.ALLOW_UNTESTED.name}=1"
    return ContractError(
        what=f"the upstream symbol {symbol}, which this fork changes or rests on, {how}",
        expected=f"sha256 {expected[:16]}…{beside}",
        found=found,
        mend=mend,
    )


def main() -> int:
    """Check both platforms' symbols and every pin of the contract that is installed here."""
    try:
        pins.check_versions("reference")
        symbols = rooms.symbols(rooms.everything())
        changed = check_symbols(symbols, settings.allow_untested())
    except ContractError as error:
        print(f"glm-sglang: {error}", file=sys.stderr)
        return 1
    for symbol in changed:
        print(f"untested: {symbol} has changed", file=sys.stderr)
    print(f"{len(symbols) - len(changed)} upstream symbols are as recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main())

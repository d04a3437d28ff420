"""`python -m glm_sglang.upstream.record`: take the fingerprints of every symbol that the rooms name.

For whoever has read the changed symbols in the pinned versions; refuses to record beside other versions.
"""

import sys

from glm_sglang.errors import ContractError
from glm_sglang.upstream import fingerprints, pins, rooms, source


def take() -> fingerprints.Recorded:
    """The record for what is installed now.

    Raises ContractError, and SymbolMissingError for a path that names nothing.
    """
    pins.check_versions("reference")
    record = fingerprints.Recorded()
    for symbol in rooms.symbols(rooms.everything()):
        location = source.locate(symbol)
        record.symbols[symbol] = source.fingerprint(symbol)
        record.files[location.relative] = source.file_digest(location.file)
    owners = {symbol.partition(".")[0].replace("_", "-") for symbol in record.symbols}
    record.versions.update(
        {pin.name: pin.version for pin in pins.contract("reference") if pin.name in owners}
    )
    return record


def main() -> int:
    """Write the record and say what changed in it."""
    try:
        before = fingerprints.recorded().symbols if fingerprints.FILE.exists() else {}
        record = take()
    except (ContractError, source.SymbolMissingError) as error:
        print(f"glm-sglang: nothing recorded: {error}", file=sys.stderr)
        return 1
    fingerprints.write(record)
    for symbol in sorted(before.keys() | record.symbols.keys()):
        if before.get(symbol) != record.symbols.get(symbol):
            state = "gone" if symbol not in record.symbols else "changed" if symbol in before else "new"
            print(f"{state}: {symbol}")
    print(f"{len(record.symbols)} symbols in {len(record.files)} files recorded in {fingerprints.FILE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

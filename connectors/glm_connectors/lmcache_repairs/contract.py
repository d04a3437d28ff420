"""The contract with LMCache 0.5.6: each symbol that a repair replaces or leans on, by the SHA-256 of its
source.

Sources are read from the installed files and located with `ast`, so a check imports nothing (importing
LMCache's storage layer takes seconds, its EIC connector needs a client that is not on any registry). Raw
text is hashed and not `ast.dump`, whose output changes between Python versions.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from glm_connectors.lmcache_repairs.fingerprints import TESTED, VERSION

PACKAGE = "lmcache"
ALLOW_VARIABLE = "GLM_SGLANG_ALLOW_UNTESTED"
ABSENT = "absent"


@dataclass(frozen=True)
class Symbol:
    """A function or class of LMCache, as `module` and dotted `qualname`."""

    module: str
    qualname: str

    @property
    def sha256(self) -> str:
        """The tested hash. KeyError for a symbol that the table lacks (see `fingerprints`)."""
        return TESTED[str(self)]

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"


class ContractError(RuntimeError):
    """LMCache is not the one that the repairs were written for.

    Nothing has been changed when it is raised.
    """


@dataclass(frozen=True)
class Mismatch:
    """One line of a `ContractError`."""

    symbol: str
    expected: str
    found: str

    @property
    def tolerable(self) -> bool:
        """A changed symbol may be tried at one's own risk; one that is gone can't be."""
        return self.found != ABSENT

    def __str__(self) -> str:
        return f"{self.symbol}: expected {self.expected}, found {self.found}"


def root() -> Path:
    """Folder of the installed package, without importing it. ContractError where there is none."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ContractError(
            f"{PACKAGE} (distribution): expected {VERSION}, found {ABSENT}. "
            f"Remedy: install {PACKAGE}=={VERSION}."
        )
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def _definitions(path: Path) -> dict[str, str]:
    """SHA-256 of every class and function in a file, by dotted name; decorators belong to what they
    decorate.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found: dict[str, str] = {}

    def visit(body: Iterable[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                source = "\n".join(lines[first - 1 : node.end_lineno])
                found[prefix + node.name] = hashlib.sha256(source.encode()).hexdigest()
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(text).body, "")
    return found


def fingerprint(module: str, qualname: str, package_root: Path) -> str:
    """SHA-256 of a symbol's source under `package_root`, or `ABSENT`."""
    relative = Path(*module.split(".")[1:])
    for path in (package_root / relative.with_suffix(".py"), package_root / relative / "__init__.py"):
        if path.is_file():
            return _definitions(path).get(qualname, ABSENT)
    return ABSENT


def compare(symbols: Iterable[Symbol], package_root: Path) -> list[Mismatch]:
    """Every symbol under `package_root` whose source is not the tested one."""
    found = ((symbol, fingerprint(symbol.module, symbol.qualname, package_root)) for symbol in symbols)
    return [Mismatch(str(symbol), symbol.sha256, now) for symbol, now in found if now != symbol.sha256]


def installed_version() -> str:
    """Version of the installed distribution, or `ABSENT`."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return ABSENT


def check(symbols: Iterable[Symbol], *, allow_untested: bool) -> list[Mismatch]:
    """Compares the installed LMCache with the tested one.

    Returns the mismatches that `allow_untested` let pass. ContractError names each symbol, what was
    expected, what was found, and the remedy.
    """
    mismatches = compare(symbols, root())
    version = installed_version()
    if version != VERSION:
        mismatches.insert(0, Mismatch(f"{PACKAGE} (distribution)", VERSION, version))
    fatal = [m for m in mismatches if not (allow_untested and m.tolerable)]
    if fatal:
        lines = "\n  ".join(str(m) for m in fatal)
        raise ContractError(
            f"LMCache differs from the one that its repairs were tested with:\n  {lines}\n"
            f"Remedy: install {PACKAGE}=={VERSION}. To try changed (not absent) symbols at your own risk set "
            f"{ALLOW_VARIABLE}=1; it is now off or does not cover the above."
        )
    return mismatches


def _main() -> None:
    """Prints the table of the installed LMCache."""
    from glm_connectors.lmcache_repairs import REPAIRS

    package_root = root()
    for symbol in dict.fromkeys(symbol for repair in REPAIRS for symbol in repair.symbols):
        print(f'"{symbol}": "{fingerprint(symbol.module, symbol.qualname, package_root)}",')


if __name__ == "__main__":
    _main()

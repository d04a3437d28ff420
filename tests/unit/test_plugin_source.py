"""Fingerprints: found without importing, changed by any change of the source, by nothing else."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from glm_sglang.upstream import source

MODULE = '''
"""A module."""
import functools

TABLE = [1, 2]
TYPED: int = 3

@functools.cache
def plain(x):
    return x  # a comment

class Thing:
    limit = 4

    @classmethod
    def make(cls):
        return cls()

    @property
    def size(self):
        return 1

    @size.setter
    def size(self, value):
        pass

    class Inner:
        def deep(self):
            return 2

if TYPED:
    def either():
        return "a"
else:
    def either():
        return "b"
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `upkg` with a namespace folder below it, as sglang/srt is one."""
    (tmp_path / "upkg" / "bare").mkdir(parents=True)
    (tmp_path / "upkg" / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    (tmp_path / "upkg" / "bare" / "mod.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "upkg" / "bare" / "mod.py"
    for cache in (source._top_level, source._read, source._parse):
        cache.cache_clear()


def digest(name: str) -> str:
    for cache in (source._read, source._parse):
        cache.cache_clear()
    return source.fingerprint(f"upkg.bare.mod.{name}")


NAMES = [
    "plain",
    "Thing",
    "Thing.make",
    "Thing.size",
    "Thing.limit",
    "Thing.Inner.deep",
    "either",
    "TABLE",
    "TYPED",
]


def test_every_kind_of_symbol_has_its_own_fingerprint(package: Path) -> None:
    assert len({digest(name) for name in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("return x", "return x + 1", {"plain"}),
        ("# a comment", "# another", {"plain"}),
        ("@functools.cache\n", "", {"plain"}),
        ("return cls()", "return None", {"Thing", "Thing.make"}),
        ("self, value", "self, other", {"Thing", "Thing.size"}),
        ('return "b"', 'return "c"', {"either"}),
        ("TABLE = [1, 2]", "TABLE = [1, 2, 3]", {"TABLE"}),
        ("import functools\n", "import functools\nimport os\n", set()),
        ("limit = 4\n", "limit = 4   \n", set()),
    ],
)
def test_a_change_shows_in_what_it_changes_and_nowhere_else(
    package: Path, old: str, new: str, changed: set[str]
) -> None:
    before = {name: digest(name) for name in NAMES}
    assert old in MODULE
    package.write_text(MODULE.replace(old, new))
    assert {name for name in NAMES if digest(name) != before[name]} == changed


def test_the_place_is_named_below_the_packages_folder(package: Path) -> None:
    location = source.locate("upkg.bare.mod.Thing.make")
    assert (location.file, location.relative, location.qualname) == (
        package,
        "upkg/bare/mod.py",
        ("Thing", "make"),
    )


@pytest.mark.parametrize(
    ("symbol", "message"),
    [
        ("nopackage.x", "package 'nopackage' is not installed"),
        ("upkg.bare.mod.gone", "'gone' is not defined in upkg/bare/mod.py"),
        ("upkg.bare.mod.Thing.gone", "'Thing.gone' is not defined"),
        ("upkg.bare.gone.x", "'upkg.bare.gone' is not in the installed package"),
        ("upkg.bare.mod", "is a module, not a symbol"),
        ("upkg.bare.mod.functools", "'functools' is not defined"),
    ],
)
def test_what_is_not_there_is_missing(package: Path, symbol: str, message: str) -> None:
    with pytest.raises(source.SymbolMissingError, match=message):
        source.fingerprint(symbol)


def test_fingerprints_are_taken_without_importing_sglang() -> None:
    program = textwrap.dedent("""
        import sys
        from glm_sglang.upstream import check
        assert check.main() == 0
        print([m for m in ("sglang", "torch", "transformers") if m in sys.modules])
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr

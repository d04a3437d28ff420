"""Finds the source text of an upstream symbol by its dotted path, without importing anything.

Importing SGLang takes many seconds and GPU libraries; a fingerprint must take milliseconds in every process,
and must be the same under every Python version. So the text between a definition's first decorator and its
last line is taken from the file as it stands, comments included: with exact pins, equal text is equal code.
"""

import ast
import functools
import hashlib
import importlib.machinery
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class SymbolMissingError(LookupError):
    """The dotted path names no module on the path, or nothing of that name in the module."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where a symbol is defined.

    file      absolute path of the module's source.
    relative  the same path below the folder that holds the top-level package ("sglang/srt/…/x.py").
    qualname  the symbol's path inside the module ("Class.method").
    """

    file: Path
    relative: str
    qualname: tuple[str, ...]


def locate(symbol: str) -> Location:
    """The file that defines `symbol`, taking as much of its path for modules as the file system has.

    Raises SymbolMissingError.
    """
    parts = symbol.split(".")
    spec = _top_level(parts[0])
    if spec is None:
        raise SymbolMissingError(f"package {parts[0]!r} is not installed")
    if spec.submodule_search_locations is None:
        if spec.origin is None:
            raise SymbolMissingError(f"module {parts[0]!r} has no source file")
        file, used = Path(spec.origin), 1
    else:
        file, used = _walk([Path(folder) for folder in spec.submodule_search_locations], parts)
    if file.suffix != ".py":
        raise SymbolMissingError(f"module {'.'.join(parts[:used])!r} has no Python source ({file.name})")
    if used == len(parts):
        raise SymbolMissingError(f"{symbol!r} is a module, not a symbol in one")
    below = used if file.name == "__init__.py" else used - 1
    return Location(file, "/".join(file.parts[-below - 1 :]), tuple(parts[used:]))


@functools.cache
def _top_level(name: str) -> importlib.machinery.ModuleSpec | None:
    # A top-level name only: find_spec would import the parents of anything deeper.
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # a module put into sys.modules without a spec
        return None


def _walk(folders: list[Path], parts: list[str]) -> tuple[Path, int]:
    """The module file for the longest prefix of `parts`, and how many parts it used.

    As in the import system, a package with __init__.py beats a module, and a module beats a bare folder.
    """
    for used in range(1, len(parts)):
        below = [folder / parts[used] for folder in folders]
        packages = [folder for folder in below if (folder / "__init__.py").is_file()]
        modules = [module for folder in below if (module := folder.with_suffix(".py")).is_file()]
        bare = [folder for folder in below if folder.is_dir()]
        if not packages and modules:
            return modules[0], used + 1
        if not packages and not bare:
            break
        folders = packages[:1] or bare
    else:
        used = len(parts)
    for folder in folders:
        if (folder / "__init__.py").is_file():
            return folder / "__init__.py", used
    raise SymbolMissingError(f"{'.'.join(parts[: used + 1])!r} is not in the installed package")


def fingerprint(symbol: str) -> str:
    """SHA-256 (hex) of the symbol's source text.

    Several definitions of one name (branches of an `if`, property setters) count together, in order. Raises
    SymbolMissingError where there is none, also for a name that the module only imports: name the defining
    module then.
    """
    location = locate(symbol)
    text = _read(location.file)
    nodes: list[ast.AST] = [_parse(location.file)]
    for name in location.qualname:
        nodes = [found for node in nodes for found in _definitions(node, name)]
    if not nodes:
        raise SymbolMissingError(f"{'.'.join(location.qualname)!r} is not defined in {location.relative}")
    lines = text.splitlines()
    chunks = ["\n".join(line.rstrip() for line in lines[slice(*_lines(node))]) for node in nodes]
    return hashlib.sha256("\n".join(chunks).encode()).hexdigest()


def file_digest(file: Path) -> str:
    """SHA-256 (hex) of a source file: an equal file means that every symbol in it is equal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


@functools.lru_cache(maxsize=64)
def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@functools.lru_cache(maxsize=64)
def _parse(file: Path) -> ast.Module:
    return ast.parse(_read(file), filename=str(file))


def _definitions(scope: ast.AST, name: str) -> Iterator[ast.AST]:
    """Definitions of `name` directly in a module or class body, also inside its if/try/with blocks."""
    for node in ast.iter_child_nodes(scope):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if node.name == name:
                    yield node
            case ast.Assign(targets=targets):
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    yield node
            case ast.AnnAssign(target=ast.Name(id=found)) | ast.AugAssign(target=ast.Name(id=found)):
                if found == name:
                    yield node
            case ast.If() | ast.Try() | ast.With() | ast.ExceptHandler():
                yield from _definitions(node, name)


def _lines(node: ast.AST) -> tuple[int, int]:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])  # type: ignore[attr-defined]
    return first - 1, node.end_lineno  # type: ignore[attr-defined]

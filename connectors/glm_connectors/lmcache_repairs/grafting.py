"""How a repair reaches LMCache: methods are replaced on LMCache's own classes, when their module is first
imported.

Classes stay the objects that they were, so whoever imported one earlier has the repaired one. A module that
a process never imports costs nothing; one that is imported later is repaired before its importer sees it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

from glm_connectors.lmcache_repairs.contract import ContractError, Symbol


@dataclass(frozen=True)
class Graft:
    """Replaces `qualname` by `make(original)`; `original` is None where upstream has nothing of that name."""

    qualname: str
    make: Callable[[Any], Any]

    def apply(self, module: ModuleType) -> None:
        """Puts the replacement in place and looks again. ContractError where it did not stay."""
        *owners, name = self.qualname.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part)
        replacement = self.make(vars(owner).get(name))
        setattr(owner, name, replacement)
        if vars(owner).get(name) is not replacement:
            raise ContractError(
                f"{module.__name__}:{self.qualname}: expected the repaired symbol in place, found another. "
                "Remedy: remove what else patches it."
            )


def replace(qualname: str, function: Any) -> Graft:
    """A graft that needs nothing of the original."""
    return Graft(qualname, lambda _original: function)


@dataclass(frozen=True)
class Repair:
    """What is done to one module of LMCache. `symbols`: what is replaced or leaned on."""

    module: str
    symbols: tuple[Symbol, ...]
    grafts: tuple[Graft, ...]

    def apply(self, module: ModuleType) -> None:
        """Applies every graft to the imported module."""
        for graft in self.grafts:
            graft.apply(module)


class _RepairingLoader(Loader):
    """Runs the module's own loader, then the repairs, then steps out of the way."""

    def __init__(self, inner: Loader, repairs: Sequence[Repair]) -> None:
        self._inner = inner
        self._repairs = repairs

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        for repair in self._repairs:
            repair.apply(module)


class RepairOnImport(MetaPathFinder):
    """Finder for the modules that have a repair and are not imported yet."""

    def __init__(self) -> None:
        self._pending: defaultdict[str, list[Repair]] = defaultdict(list)

    def add(self, repair: Repair) -> None:
        """Repairs the module now if it is imported, else when it is."""
        module = sys.modules.get(repair.module)
        if module is not None and getattr(module.__spec__, "_initializing", False):
            raise ContractError(
                f"{repair.module}: expected not to be in the middle of its import, found that it is. "
                "Remedy: install the repairs before or after importing LMCache, not from within."
            )
        if module is not None:
            repair.apply(module)
            return
        if not self._pending:
            sys.meta_path.insert(0, self)
        self._pending[repair.module].append(repair)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        repairs = self._pending.get(fullname)
        if repairs is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _RepairingLoader(spec.loader, repairs)
        return spec

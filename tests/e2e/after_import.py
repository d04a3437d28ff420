"""For a `sitecustomize` on PYTHONPATH of a server under test, which finds this beside its own folder or above it."""

import importlib.abc
import importlib.util
import sys


def after_import(name, patch):
    """Calls `patch(module)` once the module of this name has been imported."""
    sys.meta_path.insert(0, _Finder(name, patch))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name, patch):
        self.name, self.patch = name, patch
        self.done = False

    def find_spec(self, name, path=None, target=None):
        if name != self.name or self.done:
            return None
        self.done = True
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            self.patch(module)

        spec.loader.exec_module = exec_module
        return spec

"""On PYTHONPATH of a server under test: puts one fault into the fork's contract, in one process or in all.

`CONTRACT_FAULT` holds {"fault": NAME, "where": "everywhere" | the name of the function that a child process
runs}. The fork itself knows nothing of it: its modules are patched right after they are imported, and what is
patched is what the machine would answer (a recorded hash, an installed version, a declared hook), never the
checks.
"""

import importlib.abc
import importlib.util
import json
import multiprocessing
import os
import sys

_FAULT = json.loads(os.environ.get("CONTRACT_FAULT", "{}"))
_CHANGED = "0" * 64


def _here():
    target = getattr(multiprocessing.current_process(), "_target", None)
    return _FAULT["where"] in ("everywhere", getattr(target, "__name__", ""))


def _declared_hook():
    """The extra hook that the fault needs, and the fingerprint recorded for it (None: the right one)."""
    from glm_sglang.upstream.hooks import Hook

    target, kind, function, digest = {
        "changed symbol": ("fault_upstream.greet", "around", "fault_changes:around", _CHANGED),
        "missing symbol": ("fault_upstream.gone", "around", "fault_changes:around", _CHANGED),
        "unrecorded symbol": ("fault_upstream.greet", "around", "fault_changes:around", "unrecorded"),
        "throwing hook": ("fault_upstream.greet", "around", "fault_changes_broken:around", None),
    }[_FAULT["fault"]]
    hook = Hook(
        target=target,
        kind=kind,
        function=function,
        why="a test",
        remove_when="the test ends",
        scope="installed",
    )
    return hook, digest


def _patch_rooms(rooms):
    hooks = rooms.hooks
    rooms.hooks = lambda: (*hooks(), _declared_hook()[0]) if _here() else hooks()


def _patch_fingerprints(fingerprints):
    recorded = fingerprints.recorded

    def with_fixture():
        from glm_sglang.upstream import source

        record = recorded()
        hook, digest = _declared_hook()
        if digest != "unrecorded":
            record.symbols[hook.target] = digest or source.fingerprint(hook.target)
        return record

    fingerprints.recorded = with_fixture


def _patch_pins(pins):
    installed = pins.installed
    pins.installed = lambda name: "0.0.1" if name == "lmcache" and _here() else installed(name)


if _FAULT.get("fault") == "wrong version":
    _PATCHES = {"glm_sglang.upstream.pins": _patch_pins}
elif _FAULT.get("fault") in ("none", None):
    _PATCHES = {}
else:
    _PATCHES = {
        "glm_sglang.upstream.rooms": _patch_rooms,
        "glm_sglang.upstream.fingerprints": _patch_fingerprints,
    }


class _PatchAfterImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        patch = _PATCHES.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


if _PATCHES:
    sys.meta_path.insert(0, _PatchAfterImport())

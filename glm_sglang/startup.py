"""A server's start in less CPU time. Importing SGLang is most of it: about ten CPU seconds in each process.

Nothing here changes what a server does once it serves, but for how soon it sees that a client has left.
"""

import gc
import importlib.util
import os
from collections.abc import MutableMapping
from pathlib import Path

from glm_sglang import offline

# UPSTREAM: sglang.srt.models.registry imports every module of sglang.srt.models that is not named in this variable.
DISABLED_MODELS = "SGLANG_DISABLED_MODEL_ARCHS"
#: Modules that register what a GLM-5.x checkpoint names: the model and its draft layer. They import what they need.
GLM_MODELS = frozenset({"glm4_moe", "glm4_moe_nextn"})

#: Seconds after which a server looks whether a client that waits for a whole answer is still there. UPSTREAM: 4, in which
#: a long prompt that nobody waits for is computed before others' (sglang.srt.managers.tokenizer_manager).
LOOKS = {"SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1"}

# Some 7,000 modules are imported and next to nothing of them is garbage: a sixth of the time goes into looking.
_WHILE_IMPORTING = (100_000, 50, 100)
_usual = gc.get_threshold()


def defer_collections() -> None:
    """Collect garbage rarely until `usual_collections`. Harmless where that is never called."""
    gc.set_threshold(*_WHILE_IMPORTING)


def usual_collections() -> None:
    """The interpreter's thresholds again, unless somebody has chosen others meanwhile."""
    if gc.get_threshold() == _WHILE_IMPORTING:
        gc.set_threshold(*_usual)


def see_who_leaves(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Have SGLang look every second for clients that have left; returns what was set. A value of the user's stays."""
    return offline.fill(LOOKS, environ)


def only_glm_models(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Have SGLang import GLM's model modules and no other family's; returns what was set.

    For a launcher that has already refused every other checkpoint. A value of the user's stays.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None or DISABLED_MODELS in environ:
        return {}
    folder = Path(spec.origin).parent / "srt" / "models"
    names = {
        entry.stem for entry in folder.iterdir() if entry.suffix == ".py" or (entry / "__init__.py").exists()
    }
    return offline.fill({DISABLED_MODELS: ",".join(sorted(names - GLM_MODELS - {"__init__"}))}, environ)

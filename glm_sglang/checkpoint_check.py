"""Is this a checkpoint that the fork serves? Asked before anything heavy is imported."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from glm_sglang.errors import UsageError

ARCHITECTURE = "GlmMoeDsaForCausalLM"


def check(model_path: str | None, environ: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """The checkpoint's config.json, or None for a path that SGLang must fetch itself and was allowed to.

    Raises UsageError for a missing flag, a path that isn't there, and a checkpoint of another model.
    """
    if not model_path:
        raise UsageError("--model-path is missing: the folder of a GLM-5.x checkpoint")
    folder = Path(model_path).expanduser()
    if not folder.exists():
        if "://" in model_path or ("HF_HUB_OFFLINE" in environ and _looks_like_hub_id(model_path)):
            return None
        if _looks_like_hub_id(model_path):
            raise UsageError(
                f"--model-path {model_path}: no such folder, and this launcher does not reach the hub "
                f"unasked; download it (hf download {model_path} --local-dir DIR) and give the folder, or "
                "set HF_HUB_OFFLINE=0"
            )
        raise UsageError(f"--model-path {model_path}: no such folder")
    if not folder.is_dir():
        raise UsageError(f"--model-path {model_path}: expected the folder of a checkpoint, found a file")
    config = read_config(folder)
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or ARCHITECTURE not in architectures:
        found = ", ".join(map(str, architectures)) if isinstance(architectures, list) else repr(architectures)
        raise UsageError(
            f"--model-path {model_path}: config.json says architectures {found}, this server is for "
            f"{ARCHITECTURE} (GLM-5 to GLM-5.3); serve other models with sglang.launch_server"
        )
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises UsageError where it is missing or no JSON object."""
    file = folder / "config.json"
    try:
        config = orjson.loads(file.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"--model-path {folder}: no config.json in it, so it is no checkpoint") from None
    except OSError as error:
        raise UsageError(f"--model-path {folder}: config.json can't be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise UsageError(f"--model-path {folder}: config.json is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(
            f"--model-path {folder}: config.json holds a {type(config).__name__}, expected an object"
        )
    return config


def _looks_like_hub_id(path: str) -> bool:
    """ "owner/name": one slash, nothing that only a file path has."""
    owner, slash, name = path.partition("/")
    return bool(slash and owner and name) and "/" not in name and not path.startswith((".", "~", "/"))

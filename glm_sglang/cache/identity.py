"""What a page's bytes depend on besides tokens: the name space in which they may be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blake3 import blake3
from glm_connectors.tiers import Namespace

from glm_sglang.cache.device_pages import DevicePages
from glm_sglang.errors import UsageError

_CONTEXT = "glm_sglang 2026 cache: identity of a checkpoint"
# What is read of each weight file: its head, which names and places every tensor, and samples of the values.
_HEAD_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 8
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")  # the first kind that is there
# Fields of config.json that say where it came from, not what it computes.
_UNRELATED = ("_name_or_path", "transformers_version")


def folder_of(model_path: str, revision: str | None, cache_dir: str | None = None) -> Path:
    """Where a model's files are: its folder, or for a name on the hub the snapshot of the commit that `revision` (None
    for main) is here. Local look-ups only.

    SGLang has loaded the weights by now, from that snapshot: it asks the hub before, which moves the revision here too.
    UsageError where there is none.
    """
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(model_path, revision=revision, cache_dir=cache_dir, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--glm-cache-url: which weights {model_path!r} (--revision {revision or 'main'}) names is not known on this "
            f"machine, and their pages must not be taken for others': give --model-path a folder, or --revision a commit "
            f"that is in Hugging Face's cache ({str(error).splitlines()[0]})"
        ) from None
    return Path(found)


def checkpoint_digest(folder: Path) -> str:
    """A digest of a checkpoint's weights: the same for copies of it, another for other weights.

    The folder's files are sampled (name, size, head, eight places), not read whole; a fine-tune differs in every sample.
    UsageError where it holds no weights that are known here.
    """
    hasher = blake3(derive_key_context=_CONTEXT)
    files = next((found for kind in _WEIGHTS if (found := sorted(folder.glob(kind)))), [])
    if not files:
        raise UsageError(
            f"--glm-cache-url: {folder} holds no weights ({', '.join(_WEIGHTS)}) by which to tell its pages from other "
            "models'; give --model-path a folder that does"
        )
    for file in files:
        size = file.stat().st_size
        hasher.update(f"{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            hasher.update(stream.read(_HEAD_BYTES))
            for part in range(1, _SAMPLES + 1):
                stream.seek(max(0, size * part // _SAMPLES - _SAMPLE_BYTES))
                hasher.update(stream.read(_SAMPLE_BYTES))
    return hasher.hexdigest()[:32]


def config_digest(folder: Path) -> str:
    """A digest of config.json, apart from fields about its origin. UsageError where there is none."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--glm-cache-url: no config.json in {folder} ({error}); --model-path needs one"
        ) from None
    kept = {key: value for key, value in config.items() if key not in _UNRELATED}
    return blake3(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:32]


def namespace(model: Any, pool: Any, pages: DevicePages) -> Namespace:
    """The name space of this rank's pages.

    model: SGLang's model arguments (model_path, revision, download_dir, load_format, quantization, dtype as resolved).
    Ranks of one model under TP, EP, CP and DP hold the same main KV and index keys of a token, so `parallel` is empty.
    Called once the weights are loaded. UsageError, naming the flag, where they cannot be told from others.
    """
    path, revision = str(model.model_path), getattr(model, "revision", None)
    load_format = str(getattr(model, "load_format", "auto"))
    dummy = load_format == "dummy"  # no weights are read, and none need be here
    weights = (
        "" if dummy else checkpoint_digest(folder_of(path, revision, getattr(model, "download_dir", None)))
    )
    overrides = str(getattr(model, "json_model_override_args", "") or "{}")
    return Namespace(
        model=f"{config_digest(folder_of(path, revision))} {overrides}",
        weights_revision=f"{weights} load {load_format}",
        dtype=f"{pool.store_dtype} compute {getattr(model, 'dtype', '')} quant {getattr(model, 'quantization', '')}",
        layout=pages.layout,
        indexer=f"topk kpool {pool.index_kpool}",
    )

"""What a page's bytes depend on besides tokens: the name space in which they may be used."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3
from glm_connectors.tiers import Namespace

from glm_sglang.cache.device_pages import DevicePages
from glm_sglang.errors import UsageError

_CONTEXT = "glm_sglang 2026 cache: identity of a checkpoint"
# Read of a weight file: of safetensors the head and the middle of every tensor, of others the first MiB and samples.
_HEAD_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 16
_SAMPLES = 8
_TENSOR_BYTES = 1 << 12
_SMALL_BYTES = 1 << 16  # a tensor up to this is read whole
_READERS = 16  # GLM-5.x has 120,000 tensors; a file system over a network takes a millisecond for each
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

    The folder's files are sampled, not read whole: name, size, head, and 4 KiB in the middle of every tensor (64 KiB and
    less: whole). A fine-tune differs there in whatever tensor it touched; a tensor of which a part was edited may not.
    UsageError where the folder holds no weights that are known here.
    """
    hasher = blake3(derive_key_context=_CONTEXT)
    files = next((found for kind in _WEIGHTS if (found := sorted(folder.glob(kind)))), [])
    if not files:
        raise UsageError(
            f"--glm-cache-url: {folder} holds no weights ({', '.join(_WEIGHTS)}) by which to tell its pages from other "
            "models'; give --model-path a folder that does"
        )
    with ThreadPoolExecutor(_READERS) as readers:
        for file in files:
            hasher.update(f"{file.name}:{file.stat().st_size}\n".encode())
            with file.open("rb") as stream:
                for sample in readers.map(
                    partial(os.pread, stream.fileno()), *zip(*_samples(file, stream), strict=True)
                ):
                    hasher.update(sample)
    return hasher.hexdigest()[:32]


def _samples(file: Path, stream: BinaryIO) -> list[tuple[int, int]]:
    """Where to read a weight file: (bytes, offset) each."""
    size = file.stat().st_size
    if file.suffix == ".safetensors":
        try:
            length = int.from_bytes(stream.read(8), "little")
            head = json.loads(stream.read(length) if length < size else b"")
            spans = sorted(entry["data_offsets"] for name, entry in head.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"--glm-cache-url: {file} is no safetensors file ({error}); --model-path needs whole weights"
            ) from None
        start = 8 + length
        samples = [(start, 0)]
        for begin, end in spans:
            taken = end - begin if end - begin <= _SMALL_BYTES else _TENSOR_BYTES
            samples.append((taken, start + (begin + end - taken) // 2))
        return samples
    places = (max(0, size * part // _SAMPLES - _SAMPLE_BYTES) for part in range(1, _SAMPLES + 1))
    return [(_HEAD_BYTES, 0)] + [(_SAMPLE_BYTES, place) for place in places]


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

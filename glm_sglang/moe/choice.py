"""Which path the MoE layers take: `--glm-moe auto|megamoe|stock`, decided by the launcher before SGLang is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glm_sglang import checkpoint_check, own_flags, settings
from glm_sglang.command_line import Request
from glm_sglang.errors import UsageError
from glm_sglang.moe import refusals
from glm_sglang.moe.facts import CAP_VARIABLE, DEFAULT_CAP, FIELDS, NUMBERS, VARIABLES, Checkpoint, Facts
from glm_sglang.platform_choice import PlatformName, visible_devices

MEGAMOE, STOCK = "megamoe", "stock"


@dataclass(frozen=True, slots=True)
class Decision:
    """The path and its reason, in one clause; in the log, in --glm-print-config and in /server_info."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"MoE layers run {self.path}: {self.reason}"

    def report(self) -> dict[str, str]:
        """As JSON."""
        return asdict(self)

    def hand_down(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Tells the processes that this one will start; `handed_down` reads it there."""
        environ[settings.MOE.name] = self.path
        environ[settings.MOE_REASON.name] = self.reason


def handed_down(environ: Mapping[str, str] = os.environ) -> Decision:
    """What the launcher decided; of a server that it did not start, what the environment asks for."""
    return Decision(settings.read(settings.MOE, environ), settings.read(settings.MOE_REASON, environ))


def decide(request: Request, platform: PlatformName, environ: Mapping[str, str] = os.environ) -> Decision:
    """The path for this command line. Raises UsageError for flags that exclude each other or what cannot work."""
    wanted = settings.read(settings.MOE, environ)
    backend = request.get("moe_a2a_backend", None)
    alias = request.get("moe_runner_backend", None) == MEGAMOE
    if wanted == STOCK:
        if backend == MEGAMOE or alias:
            raise UsageError(
                "--glm-moe is stock beside --moe-a2a-backend megamoe, whose own fallbacks give wrong answers for FP8 "
                "GLM-5.x; give --glm-moe megamoe, or leave --moe-a2a-backend out"
            )
        return Decision(STOCK, "--glm-moe stock")
    if wanted == MEGAMOE and backend not in (None, MEGAMOE):
        raise UsageError(f"--glm-moe is megamoe and --moe-a2a-backend {backend}; leave one of them out")
    asked = wanted == MEGAMOE or backend == MEGAMOE or alias
    if not asked and backend is not None:
        return Decision(STOCK, f"--moe-a2a-backend {backend}")
    if not asked and request.has(own_flags.NO_DEFAULTS):
        return Decision(
            STOCK,
            f"{own_flags.NO_DEFAULTS.option}, and neither {own_flags.MOE.option} nor a backend is given",
        )
    config = _config(request, environ)
    if config is None:
        if asked:
            raise UsageError(
                "--glm-moe megamoe needs a checkpoint's folder as --model-path, or one in the Hugging Face cache, to "
                "judge its experts"
            )
        return Decision(STOCK, "the checkpoint's folder is not there yet to judge its experts")
    found = facts(request, platform, Checkpoint.of(config), capability(platform), environ)
    return verdict(found, asked=asked)


def verdict(found: Facts, *, asked: bool) -> Decision:
    """MegaMoE where it is asked for, or the kernel is measured and the parallelism wants it.

    Raises UsageError where it is asked for and can't be.
    """
    reasons = refusals.find(found)
    if asked:
        if reasons:
            raise UsageError("MegaMoE cannot run here: " + "; ".join(reasons))
        return Decision(MEGAMOE, f"asked for; {_measured(found)}")
    if found.platform != "cuda":
        return Decision(STOCK, "the reference platform runs MegaMoE's reference with --glm-moe megamoe only")
    if found.number("ep_size") < 2:
        return Decision(STOCK, "no expert parallelism is asked for (--ep-size)")
    if reasons:
        return Decision(STOCK, reasons[0])
    if found.capability not in refusals.MEASURED:
        return Decision(STOCK, f"{_measured(found)}; --glm-moe megamoe runs it")
    return Decision(MEGAMOE, _measured(found))


def _measured(found: Facts) -> str:
    """What is known of this GPU and this EP size; EP sizes that no machine was at hand for are said to be so."""
    if found.platform != "cuda" or found.capability is None:
        return "the exact reference over gloo"
    gpu, ranks = "SM{}{}".format(*found.capability), found.ranks()
    sizes = refusals.MEASURED.get(found.capability)
    if sizes is None:
        return f"built and never measured on {gpu}"
    said = " and ".join(f"EP{size}" for size in sizes)
    known = f"FP8 blocks on {gpu} were compared with the reference and measured with {said}"
    return known if ranks in sizes else f"{known}; EP{ranks} runs the same code and was not measured"


def facts(
    request: Request,
    platform: PlatformName,
    checkpoint: Checkpoint,
    capability: tuple[int, int] | None,
    environ: Mapping[str, str],
) -> Facts:
    """What the command line says, as far as SGLang has not resolved it yet. Raises UsageError for a bad number."""
    flags: dict[str, Any] = {name: request.given[name] for name in FIELDS if name in request.given}
    for name in NUMBERS:
        if name in flags:
            flags[name] = number(f"--{name.replace('_', '-')}", flags[name])
    return Facts(
        platform="cuda" if platform == "cuda" else "reference",
        capability=capability,
        checkpoint=checkpoint,
        flags=flags,
        cap=cap(environ),
        variables=variables(environ),
    )


def cap(environ: Mapping[str, str] = os.environ) -> int:
    """The most tokens that one rank brings to one kernel call. Raises UsageError for no whole number."""
    return number(CAP_VARIABLE, environ.get(CAP_VARIABLE) or DEFAULT_CAP)


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """SGLang's variables that refusals ask for, where they are set."""
    return {name: environ[name] for name in VARIABLES if name in environ}


def number(name: str, value: Any) -> int:
    """`value` as an int. Raises UsageError naming the flag."""
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} is {value!r}, expected a whole number") from None


def _config(request: Request, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """The checkpoint's config.json: of a folder, or of a hub id's snapshot in the Hugging Face cache.

    Raises UsageError for a snapshot of another model; the launcher has asked that of a folder.
    """
    path = str(request.get("model_path", ""))
    folder = Path(path).expanduser()
    if folder.is_dir():
        return checkpoint_check.read_config(folder)
    snapshot = _snapshot(path, request.get("revision", None), environ)
    return None if snapshot is None else checkpoint_check.check(str(snapshot), environ)


def _snapshot(name: str, revision: str | None, environ: Mapping[str, str]) -> Path | None:
    """The folder where the cache holds a hub id's config.json; reads files only. None where it holds none."""
    # UPSTREAM: SGLANG_USE_MODELSCOPE, an EnvBool: then the name is one of another hub.
    if environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("true", "1", "yes", "y"):
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError:  # no hub id
        return None
    return Path(found).parent if isinstance(found, str) else None


def capability(platform: PlatformName) -> tuple[int, int] | None:
    """The least compute capability of the visible devices, by NVML: no CUDA context is made for the question.

    None on the reference platform.
    """
    return (
        min((device.capability for device in visible_devices()), default=None) if platform == "cuda" else None
    )

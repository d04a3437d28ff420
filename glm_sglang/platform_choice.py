"""Which device code serves: CUDA where GLM-5.x's kernels run, the PyTorch reference elsewhere.

The rule is a pure function of a setting, the visible devices and the scope. Detection asks NVML and reads
torch's version file, so neither the launcher nor `--help` imports torch or opens a CUDA context.
"""

import functools
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from glm_sglang import scope, settings
from glm_sglang.errors import UsageError
from glm_sglang.upstream.hooks import Scope

# Compute capability -> the name GLM-5.x's kernels (DeepGEMM, FlashMLA, MegaMoE) are built under.
SUPPORTED: dict[tuple[int, int], str] = {(9, 0): "SM90", (10, 0): "SM100", (10, 3): "SM103"}

PlatformName = Literal["reference", "cuda", "stock"]

INSTALL_GPU = "make setup-gpu in the checkout installs the GPU stack"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPU_ONLY = "sglang-kernel"  # a distribution that only the GPU environment holds
_DRIVER = Path("/proc/driver/nvidia")  # there while NVIDIA's kernel module is loaded, in containers too


@dataclass(frozen=True, slots=True)
class Device:
    """A CUDA device that a process would see: its name and compute capability."""

    name: str
    capability: tuple[int, int]

    @property
    def supported(self) -> bool:
        """Whether GLM-5.x's kernels are built for it."""
        return self.capability in SUPPORTED

    def __str__(self) -> str:
        return f"{self.name} (SM{self.capability[0]}{self.capability[1]})"


@dataclass(frozen=True, slots=True)
class Hardware:
    """What this machine offers.

    devices      CUDA devices visible to this process, by NVML and CUDA_VISIBLE_DEVICES.
    torch_cuda   CUDA version torch was built for; "" for a CPU build or where torch is not installed.
    accelerator  another kind of accelerator that torch found ("xpu", "npu", "hip" …); "" if none.
    unseen       why a device ought to be visible although none is; "" where there is no reason to think so.
    """

    devices: tuple[Device, ...]
    torch_cuda: str
    accelerator: str = ""
    unseen: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """The platform that serves, and why.

    "stock": this fork leaves the server alone (a stock launcher on a machine with an accelerator).
    """

    platform: PlatformName
    reason: str


def choose(setting: str, hardware: Hardware, where: Scope) -> Choice:
    """The platform for `setting` ("auto", "reference", "cuda") on `hardware` in this scope.

    Raises UsageError where "cuda" is asked for and can't be had, and where "auto" finds no device that ought to be
    there: a GPU node that serves on its CPU would look healthy.
    """
    supported = [device for device in hardware.devices if device.supported]
    names = ", ".join(str(device) for device in hardware.devices) or "no CUDA device"
    if hardware.unseen:
        names += f", though {hardware.unseen}"
    if setting == "reference":
        return Choice("reference", f"{settings.PLATFORM.name}=reference")
    if setting == "cuda":
        if not supported:
            raise UsageError(
                f"{settings.PLATFORM.name}=cuda needs a CUDA device of {', '.join(SUPPORTED.values())}, "
                f"found {names}; allowed here: auto, reference"
            )
        if not hardware.torch_cuda:
            raise UsageError(
                f"{settings.PLATFORM.name}=cuda needs a CUDA build of torch, found a CPU build beside "
                f"{names}; {INSTALL_GPU}"
            )
        return Choice("cuda" if where == "launcher" else "stock", f"{settings.PLATFORM.name}=cuda")
    if where == "installed" and (hardware.devices or hardware.accelerator or hardware.unseen):
        return Choice("stock", f"a stock launcher on {hardware.accelerator or names} is left alone")
    if hardware.unseen:
        raise UsageError(
            f"{names}; nvidia-smi says why. {settings.PLATFORM.name}=reference serves on the CPU all the same"
        )
    if not supported:
        return Choice("reference", f"{names}; GLM-5.x's kernels need {', '.join(SUPPORTED.values())}")
    if not hardware.torch_cuda:
        return Choice("reference", f"{names}, but torch is a CPU build ({INSTALL_GPU})")
    return Choice("cuda", str(supported[0]))


def torch_cuda_version() -> str:
    """CUDA version of the installed torch, read from its version file; "" for a CPU build or no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    version_file = Path(spec.origin).with_name("version.py")
    if not version_file.is_file():
        return ""
    found = re.search(r"^cuda\s*(?::[^=]*)?=\s*'([^']+)'", version_file.read_text(), re.MULTILINE)
    return found.group(1) if found else ""


def visible_devices(environ: Mapping[str, str] = os.environ) -> tuple[Device, ...]:
    """The CUDA devices a process with this environment would see, by NVML; () where NVML answers nothing."""
    return select_visible(_ask_nvml()[0], environ.get(_VISIBLE))


def detect(environ: Mapping[str, str] = os.environ, accelerator: str = "") -> Hardware:
    """What this machine offers a process with this environment, and whether a GPU seems to be missing."""
    devices, error = _ask_nvml()
    wanted = environ.get(_VISIBLE)
    visible = select_visible(devices, wanted)
    unseen = "" if visible or hides_all(wanted) else _missing(len(devices), wanted, error)
    return Hardware(visible, torch_cuda_version(), accelerator, unseen)


def hides_all(visible: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES was set to hide every device: empty, or an invalid index first."""
    return visible is not None and visible.partition(",")[0].strip() in ("", "-1", "NoDevFiles")


def _missing(devices: int, wanted: str | None, error: str) -> str:
    """Why a CUDA device ought to be visible where none is; "" without a reason."""
    if devices:
        return f"NVML sees {devices} ({_VISIBLE} is {wanted!r})"
    said = f" (NVML: {error})" if error else ""
    if _installed(_GPU_ONLY):
        return f"this environment holds the GPU stack ({_GPU_ONLY}){said}"
    return f"NVIDIA's driver is loaded ({_DRIVER}){said}" if _DRIVER.exists() else ""


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _ask_nvml() -> tuple[dict[str, Device], str]:
    """Every CUDA device of the machine by UUID, in NVML's order; and why NVML gave none, "" where it answered."""
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        return {}, "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {}, str(error)
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return {
            str(pynvml.nvmlDeviceGetUUID(handle)): Device(
                str(pynvml.nvmlDeviceGetName(handle)),
                _capability(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
            )
            for handle in handles
        }, ""
    except pynvml.NVMLError as error:
        return {}, str(error)
    finally:
        pynvml.nvmlShutdown()


def _capability(pair: Sequence[int]) -> tuple[int, int]:
    return int(pair[0]), int(pair[1])


def select_visible(devices: Mapping[str, Device], visible: str | None) -> tuple[Device, ...]:
    """Apply CUDA_VISIBLE_DEVICES to devices keyed by UUID, in NVML's order.

    As CUDA does, the list ends at the first entry that names no device. A MIG entry counts as some device of
    the machine: NVML's parent has the same capability as its slices. Indices are NVML's; on a machine of
    mixed devices CUDA's own order may differ, which matters only there.
    """
    ordered = tuple(devices.values())
    if visible is None:
        return ordered
    chosen: list[Device] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdecimal() and int(entry) < len(ordered):
            chosen.append(ordered[int(entry)])
        elif entry.startswith("MIG-") and ordered:
            chosen.append(ordered[0])
        else:
            matches = [device for uuid, device in devices.items() if entry and uuid.startswith(entry)]
            if len(matches) != 1:
                break
            chosen.append(matches[0])
    return tuple(chosen)


def other_accelerator() -> str:
    """The kind of a non-CUDA accelerator, asked of torch only where SGLang has imported it already; "" if
    none.
    """
    import sys

    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "accelerator"):
        return ""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return "" if kind is None else str(kind.type)


def hide_cuda() -> None:
    """Keep torch, here and in every process started from here, from seeing CUDA devices.

    For the reference platform.
    """
    os.environ[_VISIBLE] = ""


@functools.cache
def current() -> Choice:
    """The choice for this process, made once.

    Under our launcher it was made there and handed down in GLM_SGLANG_PLATFORM. Raises UsageError.
    """
    where = scope.current()
    setting = settings.read(settings.PLATFORM)
    if scope.in_launcher_child() and setting != "auto":
        return Choice("reference" if setting == "reference" else "cuda", "chosen by the launcher")
    accelerator = other_accelerator() if where == "installed" else ""
    return choose(setting, detect(accelerator=accelerator), where)

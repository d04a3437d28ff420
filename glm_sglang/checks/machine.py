"""Is the machine fit: devices, driver, memory, limits and ports?"""

import os
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from glm_sglang.checks.finding import Finding, not_needed, right, wrong
from glm_sglang.errors import UsageError

GIB = 1 << 30
# The whole demo peaks below this (issue 2); a GPU node also pins host memory for the cache.
NEEDED_MEMORY = {"reference": 8 * GIB, "cuda": 64 * GIB}
NEEDED_SHM = {"reference": GIB // 4, "cuda": 4 * GIB}  # shared-memory transports of UCX, gloo and NCCL
NEEDED_FILES = 4096  # sockets of a server under load; SGLang asks for 65535
# CUDA 13, which torch's wheels are built for, needs this driver (NVIDIA's compatibility table).
OLDEST_DRIVER = 580


def platform() -> tuple[str, Iterator[Finding]]:
    """The platform a server would serve on here, and how that was chosen."""
    from glm_sglang import platform_choice

    hardware = platform_choice.detect()
    try:
        from glm_sglang import settings

        chosen = platform_choice.choose(settings.read(settings.PLATFORM), hardware, "launcher")
    except UsageError as error:
        # A GPU node whose GPUs do not answer is examined as the GPU node that it is.
        name = "cuda" if hardware.unseen else "reference"
        mend = "what nvidia-smi says, or " if hardware.unseen else ""
        return name, iter([wrong("platform", str(error), f"{mend}set or unset GLM_SGLANG_PLATFORM")])
    return chosen.platform, iter([right("platform", f"{chosen.platform}: {chosen.reason}")])


def devices(platform: str) -> Iterator[Finding]:
    """GPUs: capability, driver, NVLink, and whether torch can use them."""
    from glm_sglang import platform_choice

    found = platform_choice.visible_devices()
    if not found:
        if platform == "cuda":
            mend = "nvidia-smi says why (install NVIDIA's driver, docker run --gpus all); GLM_SGLANG_PLATFORM=reference"
            yield wrong("GPU", "none visible", f"{mend} serves on the CPU")
        else:
            yield not_needed("GPU", "none visible")
        return
    cuda = platform_choice.torch_cuda_version()
    for index, device in enumerate(found):
        if device.supported:
            yield right(f"GPU {index}", str(device))
        else:
            yield not_needed(f"GPU {index}", f"{device}: not used, the reference platform serves")
    if not cuda and any(device.supported for device in found):
        yield wrong(
            "torch",
            "a CPU build beside a supported GPU",
            platform_choice.INSTALL_GPU,
        )
    yield from _driver(platform)


def _driver(platform: str) -> Iterator[Finding]:
    import pynvml  # type: ignore[import-untyped]

    pynvml.nvmlInit()
    try:
        version = str(pynvml.nvmlSystemGetDriverVersion())
        if platform == "cuda" and int(version.partition(".")[0]) < OLDEST_DRIVER:
            yield wrong("NVIDIA driver", version, f"install driver {OLDEST_DRIVER} or newer")
        else:
            yield right("NVIDIA driver", version)
        count = pynvml.nvmlDeviceGetCount()
        links = [_links(index) for index in range(count)]
    finally:
        pynvml.nvmlShutdown()
    if count < 2:
        yield not_needed("NVLink", "one GPU")
    elif all(links):
        yield right("NVLink", f"{min(links)} links up on each of {count} GPUs")
    elif platform == "cuda":
        yield wrong(
            "NVLink",
            f"links up by GPU: {links}",
            "nvidia-smi nvlink --status; MegaMoE needs every GPU linked",
        )


def _links(index: int) -> int:
    """NVLink links of a GPU that are up."""
    import pynvml

    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    up = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            up += int(pynvml.nvmlDeviceGetNvLinkState(handle, link))
        except pynvml.NVMLError:
            break
    return up


def memory(platform: str) -> Iterator[Finding]:
    """Memory that a process could have now, the cgroup's limit included."""
    available = _meminfo("MemAvailable")
    limit = _cgroup_limit()
    free = available if limit is None else min(available, limit)
    needed = NEEDED_MEMORY[platform]
    text = f"{free / GIB:.1f} GiB available, {needed / GIB:.0f} wanted"
    yield (
        right("memory", text)
        if free >= needed
        else wrong("memory", text, "free memory or raise the container's limit")
    )


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return 0


def _cgroup_limit(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left under the cgroup v2 limit, None where there is none. The page cache is counted as used there, and the
    kernel gives it back where a process wants more.
    """
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        lines = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    cached = sum(int(bytes_) for name, bytes_ in lines if name in ("inactive_file", "active_file"))
    return None if limit == "max" else int(limit) - used + cached


def shared_memory(platform: str) -> Iterator[Finding]:
    """Room in /dev/shm."""
    free = shutil.disk_usage("/dev/shm").free
    text = f"{free / GIB:.2f} GiB free in /dev/shm, {NEEDED_SHM[platform] / GIB:.2f} wanted"
    mend = "mount -o remount,size=8G /dev/shm; in a container: docker run --shm-size 8g"
    yield right("shared memory", text) if free >= NEEDED_SHM[platform] else wrong("shared memory", text, mend)


def limits(platform: str) -> Iterator[Finding]:
    """ulimits: open files, and locked memory for pinned and registered buffers."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = _amount(files)
    if files == resource.RLIM_INFINITY or files >= NEEDED_FILES:
        yield right("open files (ulimit -n)", text)
    else:
        yield wrong("open files (ulimit -n)", text, "ulimit -n 65535; in a container: --ulimit nofile=65535")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = _amount(locked)
    if locked == resource.RLIM_INFINITY:
        yield right("locked memory (ulimit -l)", text)
    elif platform == "cuda":
        mend = (
            "ulimit -l unlimited; in a container: --ulimit memlock=-1 (InfiniBand registration fails without)"
        )
        yield wrong("locked memory (ulimit -l)", text, mend)
    else:
        yield not_needed("locked memory (ulimit -l)", f"{text}; matters for InfiniBand only")


def _amount(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def cores_and_numa(platform: str) -> Iterator[Finding]:
    """Cores that this process may use, and memory nodes."""
    cores = len(os.sched_getaffinity(0))
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    text = f"{cores} cores on {nodes} memory node{'s' if nodes > 1 else ''}"
    if cores < 2:
        yield wrong(
            "cores", text, "give it two cores at least: scheduler and tokenizer would wait for each other"
        )
    else:
        yield right("cores", text)
    if platform == "cuda" and nodes > 1 and shutil.which("numactl") is None:
        yield wrong(
            "NUMA",
            f"{nodes} memory nodes, no numactl",
            "apt-get install numactl (SGLang binds schedulers with it)",
        )


def ports() -> Iterator[Finding]:
    """The default ports of a prefill server on loopback."""
    from glm_sglang import launch_server

    for flag, port in (
        ("--port", launch_server.DEFAULT_PORT),
        ("--disaggregation-bootstrap-port", launch_server.DEFAULT_BOOTSTRAP_PORT),
    ):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((launch_server.DEFAULT_HOST, port))
            except OSError as error:
                yield not_needed(f"port {port}", f"{error.strerror}; give another with {flag}")
            else:
                yield right(f"port {port}", f"free on {launch_server.DEFAULT_HOST}")

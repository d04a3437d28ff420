"""Which NUMA node a GPU hangs on, and keeping a thread's memory there. Linux's sysfs; no library."""

from __future__ import annotations

import os
from pathlib import Path

_SYS = Path("/sys")


def node_of(pci_address: str, sys: Path = _SYS) -> int | None:
    """The node of a PCI device such as `0000:1b:00.0`; None where the machine has one node or does not say."""
    try:
        node = int((sys / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cpus_of(node: int, sys: Path = _SYS) -> set[int]:
    """CPUs of a node; empty for a node of memory alone, or one that is not there."""
    try:
        text = (sys / f"devices/system/node/node{node}/cpulist").read_text().strip()
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def keep_thread_on(node: int, sys: Path = _SYS) -> bool:
    """Binds the calling thread to the node's CPUs that it may use, so that pages it touches first come from there (the
    kernel's default policy). False, and nothing done, where it may use none of them.
    """
    allowed = cpus_of(node, sys) & os.sched_getaffinity(0)
    if allowed:
        os.sched_setaffinity(0, allowed)
    return bool(allowed)

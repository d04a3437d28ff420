"""What is asked of the endpoints: seeded workloads over real text, by name."""

from benchmarks.workloads.catalogue import WORKLOADS, add_arguments, build
from benchmarks.workloads.model import Load, Session, Turn, Workload

__all__ = ["WORKLOADS", "Load", "Session", "Turn", "Workload", "add_arguments", "build"]

"""One of several ranks of a GPU test, each with a GPU and a process of its own."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def worker(rank: int, ranks: int, work: Callable[[int, int], None], store: Path, failures: Path) -> None:
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    torch.cuda.set_device(rank)
    torch.set_float32_matmul_precision("highest")
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        device_id=torch.device("cuda", rank),
    )
    try:
        work(rank, ranks)
    except BaseException:
        (failures / f"rank{rank}.txt").write_text(traceback.format_exc())
        raise
    dist.barrier()
    dist.destroy_process_group()

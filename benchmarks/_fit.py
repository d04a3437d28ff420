"""What servers of a model take of one GPU's memory, from its sizes, and which of them are up at the same time.

    python -m benchmarks._fit --config MODEL/config.json --tokens 28672 --step 2048 --buckets 512,2048 --servers 2

Exit status: 0 where they fit beside each other, 2 where not. Decided before a server starts: one that runs out of memory
says so after a minute, and may take the others along.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson

from glm_sglang import platform_choice
from glm_sglang.prefill_graph import footprint
from glm_sglang.tiny_model.shape import FP8_BLOCK

GIB = 1 << 30
# What a server of true widths takes beside the parts below, rounded up: CUDA context and modules (1 GiB), workspaces of
# cuBLAS, FlashInfer and the sparse attention, a step's index logits, blocks that do not pack.
REST = 4 * GIB
SPARE = 2 * GIB  # of the GPU, for the driver and what was forgotten
_BF16, _F32 = 2, 4


class FitError(ValueError):
    """Servers that do not fit; names the flags to change, what was found and what is there."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one server by what they are for.

    graphs: the pool of its prefill graphs; steps: what its largest eager step leaves in the allocator.
    """

    weights: int
    kv: int
    graphs: int
    steps: int
    rest: int = REST

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())

    def gib(self) -> dict[str, float]:
        """The same in GiB, for a result."""
        found = {name: round(value / GIB, 2) for name, value in asdict(self).items()}
        return found | {"total": round(self.total / GIB, 2)}


def weight_bytes(config: Mapping[str, Any]) -> int:
    """An FP8 checkpoint with all its experts on one GPU, as SGLang holds it on SM90: linear weights in E4M3 with a scale
    for every 128 × 128; router, index weights, norms, embedding and head in BF16; and in BF16 once more both halves of
    `kv_b_proj`.

    UPSTREAM: DeepseekV2WeightLoaderMixin.post_load_weights (w_kc, w_vc).
    """
    c = SimpleNamespace(**config)
    nope, value, rank = c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank
    hidden, q_rank, heads = c.hidden_size, c.q_lora_rank, c.num_attention_heads
    split = heads * (nope + value)
    attention = (
        _fp8(q_rank, hidden)
        + _fp8(rank + c.qk_rope_head_dim, hidden)
        + _fp8(heads * (nope + c.qk_rope_head_dim), q_rank)
        + _fp8(split, rank)
        + _fp8(hidden, heads * value)
        + split * rank * _BF16
        + (2 * hidden + q_rank + rank) * _BF16
    )
    indexer = (
        _fp8(c.index_n_heads * c.index_head_dim, q_rank)
        + _fp8(c.index_head_dim, hidden)
        + (c.index_n_heads * hidden + 2 * c.index_head_dim) * _BF16
    )
    expert = 2 * _fp8(c.moe_intermediate_size, hidden) + _fp8(hidden, c.moe_intermediate_size)
    router = c.n_routed_experts * (hidden * _BF16 + _F32)
    sparse = (c.n_routed_experts + c.n_shared_experts) * expert + router
    dense = 2 * _fp8(c.intermediate_size, hidden) + _fp8(hidden, c.intermediate_size)
    layers, first = c.num_hidden_layers, c.first_k_dense_replace
    ends = (2 * c.vocab_size * hidden + hidden) * _BF16
    return int(
        layers * attention + _full(config) * indexer + (layers - first) * sparse + first * dense + ends
    )


def _fp8(rows: int, columns: int) -> int:
    return rows * columns + _F32 * -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK)


def _full(config: Mapping[str, Any]) -> int:
    """Layers with an indexer of their own."""
    return sum(kind == "full" for kind in config["indexer_types"])


def kv_bytes(config: Mapping[str, Any], tokens: int) -> int:
    """KV of so many tokens, BF16, which is what SM90 holds unless told otherwise; index keys in E4M3 with a scale."""
    latent = (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * _BF16
    index = config["index_head_dim"] + _F32
    return int(tokens * (config["num_hidden_layers"] * latent + _full(config) * index))


def need(config: Mapping[str, Any], tokens: int, step: int, buckets: Sequence[int] = ()) -> Need:
    """One server on one GPU. tokens: of KV; step: rows of its largest step; buckets: of its prefill graphs, if any."""
    sizes = footprint.Sizes.of(SimpleNamespace(**config), attention_tp=1, moe_tp=1)
    graphs = footprint.memory(sizes, 0).of(buckets)
    row = footprint.row_bytes(sizes)
    return Need(weight_bytes(config), kv_bytes(config, tokens), graphs, row * step)


def waves(needs: Mapping[str, int], room: int, at_once: int = 0) -> list[list[str]]:
    """Who is up together, in order: each wave takes who still fits. at_once: so many in each, 0 for as many as fit.

    Raises FitError where one alone does not fit, or `at_once` do not.
    """
    found: list[list[str]] = []
    left = 0
    for name, taken in needs.items():
        if found and (len(found[-1]) < at_once if at_once else taken <= left):
            found[-1].append(name)
            left -= taken
        else:
            found.append([name])
            left = room - taken
        if left < 0:
            together = " + ".join(f"{one} {needs[one] / GIB:.1f}" for one in found[-1])
            fewer = "fewer servers at once, " if len(found[-1]) > 1 else ""
            raise FitError(
                f"{together} GiB do not fit into the {room / GIB:.1f} GiB of this GPU that are there: give {fewer}fewer "
                "layers or experts, fewer tokens of KV, or smaller steps"
            )
    return found


def gpu_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """Memory of the first visible GPU, by NVML, less what is spared; 0 where there is none to ask. All of it, not what is
    free: kernels may be compiling on it that have ended when servers load.
    """
    if not platform_choice.visible_devices(environ):
        return 0
    import pynvml  # type: ignore[import-untyped]

    first = environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip()
    pynvml.nvmlInit()
    try:
        by = pynvml.nvmlDeviceGetHandleByIndex if first.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID
        handle = by(int(first) if first.isdecimal() else first)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) - SPARE
    finally:
        pynvml.nvmlShutdown()


def counts(text: str) -> list[int]:
    """Whole numbers, separated by commas; none of "". Raises ValueError."""
    return [int(part) for part in text.split(",") if part]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for servers that do not fit beside each other."""
    p = argparse.ArgumentParser(prog="python -m benchmarks._fit", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--config", type=Path, required=True, help="config.json of the model")
    p.add_argument("--tokens", type=int, required=True, help="of a server's KV")
    p.add_argument("--step", type=int, required=True, help="rows of its largest step")
    p.add_argument("--buckets", type=counts, default=(), help="of its prefill graphs, separated by commas")
    p.add_argument("--servers", type=int, default=1, help="up at the same time (default %(default)s)")
    p.add_argument("--gpu-gib", type=float, help="what the GPU has (default: the first one's, by NVML)")
    args = p.parse_args(argv)
    one = need(orjson.loads(args.config.read_bytes()), args.tokens, args.step, args.buckets)
    room = int(args.gpu_gib * GIB) - SPARE if args.gpu_gib else gpu_bytes()
    print(f"each of {args.servers} servers takes, in GiB: {one.gib()}", flush=True)
    try:
        if room:
            waves({f"server {i + 1}": one.total for i in range(args.servers)}, room, args.servers)
    except FitError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

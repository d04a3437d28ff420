"""What the hardware allows a prefill node: input tokens per second at each context length, were nothing but arithmetic
in the way; a measured run's share of it; bytes that a token moves between GPUs and into the cache.

    python -m benchmarks.roofline --model /models/GLM-5.3-FP8/config.json --gpu h200 --json
    python -m benchmarks.roofline --gpu b300 --measured 128k=94000
    python -m benchmarks.roofline --gpu h200 --result benchmarks/results/h200/gpu_idle_78_layers_deep_gemm.json

A result of benchmarks.gpu_idle brings its model (depth, dense layers, indexers, experts) and GPU count along: the share
is that of a step in a queue, of `--endpoint`, and `steps` has those of all arms, in a queue and alone.

FLOP a token: 2 · active weights, + sparse MLA 2·layers·heads·min(ctx, top-k)·(2·kv_rank + rope) in the
absorbed form, + indexer 2·(full layers)·index heads·index dim·ctx; averaged over the positions of a prompt.
Weights and indexer run in FP8, MLA in BF16.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from benchmarks import _result
from benchmarks.workloads.catalogue import lengths, tokens


@dataclass(frozen=True)
class Gpu:
    """Dense peaks in FLOP/s, NVLink in bytes/s a direction; and where they are from."""

    fp8: float
    bf16: float
    nvlink: float
    source: str


GPUS = {
    "h200": Gpu(1.979e15, 0.9895e15, 450e9, "NVIDIA H200 datasheet (SXM, without sparsity)"),
    "b300": Gpu(4.5e15, 2.25e15, 900e9, "assumed: NVIDIA's B300 figures vary by SKU and clocks"),
}


@dataclass(frozen=True)
class Model:
    """The sizes of a `glm_moe_dsa` config.json that arithmetic depends on."""

    layers: int
    dense_layers: int
    hidden: int
    heads: int
    q_rank: int
    kv_rank: int
    rope: int
    nope: int
    value: int
    dense_width: int
    expert_width: int
    experts: int
    top_k: int
    shared_experts: int
    index_heads: int
    index_dim: int
    index_topk: int
    full_layers: int

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Model:
        """Reads config.json. Raises ValueError for another model type or a field that is missing."""
        if config.get("model_type") != "glm_moe_dsa":
            raise ValueError(f"--model: model_type is {config.get('model_type')!r}; it must be 'glm_moe_dsa'")
        try:
            layers = int(config["num_hidden_layers"])
            # Without the list every layer has an indexer of its own (GLM-5, GLM-5.1).
            types = config.get("indexer_types") or ["full"] * layers
            return cls(
                layers=layers,
                dense_layers=int(config["first_k_dense_replace"]),
                hidden=int(config["hidden_size"]),
                heads=int(config["num_attention_heads"]),
                q_rank=int(config["q_lora_rank"]),
                kv_rank=int(config["kv_lora_rank"]),
                rope=int(config["qk_rope_head_dim"]),
                nope=int(config["qk_nope_head_dim"]),
                value=int(config["v_head_dim"]),
                dense_width=int(config["intermediate_size"]),
                expert_width=int(config["moe_intermediate_size"]),
                experts=int(config["n_routed_experts"]),
                top_k=int(config["num_experts_per_tok"]),
                shared_experts=int(config["n_shared_experts"]),
                index_heads=int(config["index_n_heads"]),
                index_dim=int(config["index_head_dim"]),
                index_topk=int(config["index_topk"]),
                full_layers=sum(kind == "full" for kind in types),
            )
        except KeyError as error:
            raise ValueError(f"--model: config.json has no {error.args[0]}") from None

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers

    @property
    def active_weights(self) -> int:
        """Weights that a prompt token multiplies with: no embedding, and no head, which only the last one meets."""
        attention = (
            self.hidden * self.q_rank
            + self.q_rank * self.heads * (self.nope + self.rope)
            + self.hidden * (self.kv_rank + self.rope)
            + self.kv_rank * self.heads * (self.nope + self.value)
            + self.heads * self.value * self.hidden
        )
        indexer = (
            self.q_rank * self.index_heads * self.index_dim
            + self.hidden * self.index_dim
            + self.hidden * self.index_heads
        )
        experts = 3 * self.hidden * self.expert_width * (self.top_k + self.shared_experts)
        return (
            self.layers * attention
            + self.full_layers * indexer
            + self.dense_layers * 3 * self.hidden * self.dense_width
            + self.moe_layers * (experts + self.hidden * self.experts)
        )


@dataclass(frozen=True)
class Work:
    """FLOP a token, averaged over a prompt's positions."""

    weights: float
    mla: float
    indexer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.mla + self.indexer

    def seconds(self, gpu: Gpu, gpus: int) -> float:
        """Time of a token at full peak: FP8 for weights and indexer, BF16 for attention."""
        return ((self.weights + self.indexer) / gpu.fp8 + self.mla / gpu.bf16) / gpus


def work(model: Model, context: int) -> Work:
    """The work of a token of a prompt of `context` tokens, all of which are computed."""
    keys = min(context, model.index_topk)
    # Position i attends min(i, top-k) keys, counted from 1.
    attended = (keys * (keys + 1) / 2 + (context - keys) * model.index_topk) / context
    seen = (context + 1) / 2
    return Work(
        weights=2.0 * model.active_weights,
        mla=2.0 * model.layers * model.heads * attended * (2 * model.kv_rank + model.rope),
        indexer=2.0 * model.full_layers * model.index_heads * model.index_dim * seen,
    )


def step_seconds(model: Model, gpu: Gpu, gpus: int, rows: int, prefix: int = 0) -> float:
    """Time at full peak of a step of `rows` new tokens behind `prefix` cached ones."""
    whole, before = (work(model, n).seconds(gpu, gpus) * n if n else 0.0 for n in (prefix + rows, prefix))
    return whole - before


def kv_bytes(model: Model) -> dict[str, int]:
    """Cache bytes a token over all layers, FP8: latent with a scale for every 128, BF16 rope part; index key, scale."""
    main = model.kv_rank + 4 * math.ceil(model.kv_rank / 128) + 2 * model.rope
    index = model.index_dim + 4
    return {
        "main": main * model.layers,
        "index": index * model.full_layers,
        "total": main * model.layers + index * model.full_layers,
    }


def wire_bytes(model: Model, gpus: int) -> dict[str, float]:
    """Bytes that one prompt token sends over NVLink, all layers and GPUs together, with even routing.

    gathered: all-gather of rows (E4M3, a scale for every 128) and reduce-scatter of BF16 sums. megamoe: the
    row to, and a BF16 row back from, every chosen expert on another GPU. cp_gather: KV and index keys,
    as the cache holds them, to every other context-parallel rank.
    """
    row, back = model.hidden + model.hidden / 32, 2.0 * model.hidden
    elsewhere = (gpus - 1) / gpus
    return {
        "gathered": (gpus - 1) * (row + back) * model.moe_layers,
        "megamoe": model.top_k * elsewhere * (row + back) * model.moe_layers,
        "cp_gather": float(kv_bytes(model)["total"] * (gpus - 1)),
    }


def glm_5_3() -> dict[str, Any]:
    """config.json of GLM-5.3 as far as its sizes go."""
    from glm_sglang.tiny_model.shape import Shape, hf_config

    kinds = "".join("F" if i < 3 or (i - 2) % 4 == 0 else "S" for i in range(78))
    shape = Shape(
        layers=78,
        dense_layers=3,
        indexer_types=kinds,
        hidden=6144,
        heads=64,
        q_lora_rank=2048,
        intermediate=12288,
        moe_intermediate=2048,
        experts=256,
        experts_per_token=8,
        index_topk=2048,
        vocab=154880,
        max_position=202752,
    )
    return hf_config(shape, "fp8")


def measured(text: str) -> tuple[int, float]:
    """`128k=94000`: tokens per second of a node at a context length."""
    context, equals, rate = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} must be CONTEXT=TOKENS_PER_S, e.g. 128k=94000")
    return tokens(context), float(rate)


def from_result(path: Path, endpoint: str) -> dict[int, float]:
    """Cold tokens per second by length of a `long_context` run of benchmarks.ab: length over median TTFT, at
    concurrency 1. Raises ValueError for another result.
    """
    result = orjson.loads(path.read_bytes())
    if result.get("kind") != "ab" or result.get("workload") != "long_context":
        raise ValueError(
            f"--result: {path} is no long_context result of benchmarks.ab, and none of benchmarks.gpu_idle"
        )
    found: dict[int, float] = {}
    for point in result["points"]:
        if point["point"] != "concurrency 1":
            continue
        if endpoint not in point["endpoints"]:
            raise ValueError(f"--endpoint is {endpoint!r}; allowed: {', '.join(point['endpoints'])}")
        for label, times in point["endpoints"][endpoint]["by_label"].items():
            if label != "all" and times["ttft_ms"]["median"]:
                prompt = times["prompt_tokens"] / times["requests"]
                found[tokens(label)] = prompt / (times["ttft_ms"]["median"]["value"] / 1e3)
    return found


@dataclass(frozen=True)
class Idle:
    """What a result of benchmarks.gpu_idle says. steps: milliseconds in a queue and of a lone client, by arm and case."""

    layers: int
    dense_layers: int
    experts: int
    indexers: int
    gpus: int
    steps: dict[str, dict[str, tuple[float, float]]]

    @classmethod
    def read(cls, path: Path) -> Idle | None:
        """None for another result. Raises ValueError for one that does not say what its model is."""
        result = orjson.loads(path.read_bytes())
        if result.get("question") != "gpu_idle":
            return None
        steps = {
            arm: {
                case: (times["step_ms_saturated"], times["client_ms"])
                for case, times in found.get("untraced", {}).items()
            }
            for arm, found in result["arms"].items()
        }
        names = ("layers", "dense_layers", "experts", "indexers")
        try:
            sizes = {name: int(result["model"][name]) for name in names}
        except KeyError as error:
            raise ValueError(f"--result: {path} has no {error.args[0]} of its model") from None
        return cls(**sizes, gpus=int(result["machine"]["gpus"]), steps=steps)

    def model(self) -> Model:
        """GLM-5.3's widths at this depth."""
        return replace(
            Model.from_config(glm_5_3()),
            layers=self.layers,
            dense_layers=self.dense_layers,
            experts=self.experts,
            full_layers=self.indexers,
        )

    def rates(self, endpoint: str) -> dict[int, float]:
        """Tokens per second in a queue, of the cases without a cached prefix. Raises ValueError for no such arm."""
        if endpoint not in self.steps:
            raise ValueError(f"--endpoint is {endpoint!r}; allowed: {', '.join(self.steps)}")
        cases = self.steps[endpoint].items()
        return {int(case): int(case) / ms[0] * 1e3 for case, ms in cases if case.isdecimal()}

    def shares(self, gpu: Gpu) -> list[dict[str, Any]]:
        """Every arm's cases: milliseconds, those of the roof, and its share of them."""
        found = []
        for arm, cases in self.steps.items():
            for case, (queued, alone) in cases.items():
                rows, _, prefix = case.partition("+")
                roof = 1e3 * step_seconds(self.model(), gpu, self.gpus, int(rows), int(prefix or 0))
                found.append(
                    {
                        "arm": arm,
                        "rows": int(rows),
                        "prefix": int(prefix or 0),
                        "roof_ms": round(roof, 3),
                        "step_ms_saturated": queued,
                        "client_ms": alone,
                        "share": round(roof / queued, 4),
                        "share_alone": round(roof / alone, 4),
                    }
                )
        return found


def points(
    model: Model, gpu: Gpu, gpus: int, contexts: list[int], rates: dict[int, float]
) -> list[dict[str, Any]]:
    """The roof at every context length, and the share that was reached where it was measured."""
    found = []
    for context in sorted({*contexts, *rates}):
        one = work(model, context)
        roof = 1 / one.seconds(gpu, gpus)
        rate = rates.get(context)
        wire = wire_bytes(model, gpus)
        found.append(
            {
                "context": context,
                "flop_per_token": one.total,
                "flop_weights": one.weights,
                "flop_mla": one.mla,
                "flop_indexer": one.indexer,
                "roof_tokens_per_s": round(roof, 1),
                "measured_tokens_per_s": rate,
                "share": None if rate is None else round(rate / roof, 4),
                # Time on the wire over time in the tensor cores, per token; above 0 it must be hidden.
                "wire_over_compute": {
                    name: round(size / gpus / gpu.nvlink * roof, 4) for name, size in wire.items()
                },
            }
        )
    return found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.roofline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--model", type=Path, help="a config.json, or its folder (GLM-5.3's sizes)")
    p.add_argument("--gpu", choices=GPUS, required=True)
    p.add_argument("--gpus", type=int, help="in a node (8; those of a gpu_idle result)")
    p.add_argument(
        "--contexts",
        type=lengths,
        metavar="4k,16k,…",
        help="(4k,16k,32k,64k,128k; the steps of a gpu_idle result)",
    )
    p.add_argument("--measured", type=measured, action="append", default=[], metavar="128k=TOKENS_PER_S")
    p.add_argument("--result", type=Path, help="of benchmarks.ab (long_context) or benchmarks.gpu_idle")
    p.add_argument("--endpoint", default="", help="whose rates to take of --result (of gpu_idle: ours)")
    _result.add_arguments(p)
    return p


def main() -> int:
    """Exit status: 0, or 2 for a model or a result that cannot be read."""
    args = parser().parse_args()
    try:
        idle = Idle.read(args.result) if args.result is not None else None
        if idle is not None and (args.model or args.gpus):
            raise ValueError("--result brings its model and its GPUs along: give neither --model nor --gpus")
        if idle is not None:
            name = (
                f"GLM-5.3's widths, {idle.layers} layers ({idle.dense_layers} dense), {idle.experts} experts"
            )
        elif args.model is None:
            config, name = glm_5_3(), "GLM-5.3"
        else:
            path = args.model / "config.json" if args.model.is_dir() else args.model
            config, name = orjson.loads(path.read_bytes()), path.parent.name or str(path)
        model = idle.model() if idle is not None else Model.from_config(config)
        rates = dict(args.measured)
        if idle is not None:
            rates |= idle.rates(args.endpoint or "ours")
        elif args.result is not None:
            rates |= from_result(args.result, args.endpoint)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    gpu, gpus = GPUS[args.gpu], idle.gpus if idle is not None else args.gpus or 8
    contexts = args.contexts or ([] if idle is not None else lengths("4k,16k,32k,64k,128k"))
    wire = wire_bytes(model, gpus)
    kv = kv_bytes(model)
    result = {
        "model": name,
        "gpu": args.gpu,
        "gpus": gpus,
        "peaks": {
            "fp8_flops": gpu.fp8,
            "bf16_flops": gpu.bf16,
            "nvlink_bytes_per_s": gpu.nvlink,
            "source": gpu.source,
        },
        "active_weights": model.active_weights,
        "per_token": {
            "kv_bytes": kv["total"],
            "kv_bytes_main": kv["main"],
            "kv_bytes_index": kv["index"],
            **{f"nvlink_bytes_{key}": round(value) for key, value in wire.items()},
        },
        "points": points(model, gpu, gpus, contexts, rates),
        **({"steps": idle.shares(gpu), "result": args.result.name} if idle is not None else {}),
        "not_measured": [] if rates else ["roofline: no measured run was given; only the roof is known"],
    }
    for point in result["points"]:
        reached = (
            ""
            if point["share"] is None
            else f"  measured {point['measured_tokens_per_s']:,.0f} = {point['share']:.1%}"
        )
        print(
            f"{point['context']:>7} tokens  {point['flop_per_token'] / 1e9:6.1f} GFLOP/token  "
            f"{point['roof_tokens_per_s']:>9,.0f} tokens/s{reached}",
            file=sys.stderr,
        )
    for step in result.get("steps", ()):
        print(
            f"{step['arm']:>7}, {step['rows']:>5} rows behind {step['prefix']:>5}: {step['roof_ms']:.1f} ms at the roof; "
            f"{step['step_ms_saturated']:.1f} in a queue = {step['share']:.1%}, "
            f"{step['client_ms']:.1f} alone = {step['share_alone']:.1%}",
            file=sys.stderr,
        )
    _result.finish("roofline", result, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())

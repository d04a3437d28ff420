"""`python -m glm_sglang.tiny_model OUT --dtype fp8|bf16|float32`: writes the checkpoint, prints its sizes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from pathlib import Path

from glm_sglang.tiny_model.shape import DTYPES, PRESETS, Shape, ShapeError

_HELP = {
    "layers": "decoder layers",
    "dense_layers": "leading layers with a dense MLP; the rest are MoE",
    "indexer_types": "a letter a layer: F runs its own indexer, S shares the last F layer's top-k",
    "hidden": "hidden size: 512, 1024, 2048 or 6144",
    "heads": "attention heads: a divisor of 64",
    "q_lora_rank": "rank of the query projection: a multiple of 128",
    "intermediate": "width of a dense MLP: a multiple of 128",
    "moe_intermediate": "width of an expert: a multiple of 256",
    "experts": "routed experts",
    "experts_per_token": "routed experts that a token uses",
    "index_topk": "tokens the indexer keeps: 2048 on a GPU; fewer make short prompts sparse on a CPU",
    "vocab": "vocabulary size: a multiple of 64, at least 320",
    "max_position": "longest context",
    "seed": "seed of all weights",
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    build = argparse.ArgumentParser(
        prog="python -m glm_sglang.tiny_model", description="Write a small GLM-5.3-shaped checkpoint."
    )
    build.add_argument(
        "out", type=Path, metavar="OUT", help="directory to create, or an earlier such checkpoint to replace"
    )
    build.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bf16",
        help="fp8: 128x128 blocks, the rest bf16 (default %(default)s)",
    )
    build.add_argument(
        "--preset", choices=sorted(PRESETS), default="cpu", help="sizes to start from (default %(default)s)"
    )
    build.add_argument("--force", action="store_true", help="replace OUT whatever it holds")
    for field in fields(Shape):
        kind = str if field.name == "indexer_types" else int
        values = ", ".join(f"{name} {getattr(shape, field.name)}" for name, shape in PRESETS.items())
        build.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            default=None,
            help=f"{_HELP[field.name]} ({values})",
        )
    return build


def shape_from(args: argparse.Namespace) -> Shape:
    """The preset with the given flags over it. Raises ShapeError."""
    given = {f.name: getattr(args, f.name) for f in fields(Shape) if getattr(args, f.name) is not None}
    if "layers" in given and "indexer_types" not in given:
        given["indexer_types"] = ""  # follow the number of layers
    return replace(PRESETS[args.preset], **given)


def _refuse(reason: object) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 written or already there, 2 when a flag or OUT is wrong."""
    args = parser().parse_args(argv)
    try:
        shape = shape_from(args)
        from glm_sglang.tiny_model.checkpoint import OutputError, write

        try:
            about = write(args.out, shape, args.dtype, force=args.force)
        except OutputError as error:
            return _refuse(error)
        except OSError as error:
            return _refuse(f"OUT is {args.out}, and it cannot be written: {error}")
    except ShapeError as error:
        return _refuse(error)
    state = "wrote" if about["written"] else "already there:"
    print(
        f"{state} {args.out}: {args.dtype}, {shape.layers} layers ({shape.indexer_types}),"
        f" hidden {shape.hidden}, {shape.experts} experts top-{shape.experts_per_token},"
        f" index top-k {shape.index_topk}, {about['parameters'] / 1e6:.1f}M parameters,"
        f" {about['bytes'] / 2**20:.1f} MiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

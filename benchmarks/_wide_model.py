"""A checkpoint of GLM-5.x's true widths and few layers, for timing: random FP8 bytes, balanced routing, no meaning.

SGLang's `--load-format dummy` would send every token to the same experts (its routers are nearly zero), so the weights
are written: random matrices, one a shape, copied, under routers of unit logits. Where a token meets all experts anyway,
or there is no disk for the layers that are wanted, `weights=False` leaves them to that format.

Under unit queries a head's softmax is nearly flat, and an answer hardly knows what a page of its prompt holds; `sharp` of
4 lets each head look at a few tokens, so that an answer tells a wrong page from a right one.

    python -m benchmarks._wide_model FOLDER --layers 78 --experts 8 --no-weights

writes the ablation's model: of 78 layers it has GLM-5.3's dense layers and indexers, of fewer as large a share.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from glm_sglang.tiny_model import tokenizer
from glm_sglang.tiny_model.quantise import FP8_MAX
from glm_sglang.tiny_model.shape import FP8_BLOCK, Shape, generation_config, hf_config

MARKER = "wide_model.json"
SHARP = 4.0
POSITIONS = 163_840  # 128k tokens and a second turn
LAYERS_A_DENSE = 26  # GLM-5.3: three of 78


def true_widths(layers: int, experts: int) -> Shape:
    """GLM-5.x's sizes but for layers, experts and vocabulary; the first layer is dense."""
    return Shape(
        layers=layers,
        hidden=6144,
        heads=64,
        q_lora_rank=2048,
        intermediate=12288,
        moe_intermediate=2048,
        experts=experts,
        experts_per_token=8,
        index_topk=2048,
        max_position=131072,
    )


def in_proportion(layers: int, experts: int) -> Shape:
    """True widths; of 78 layers GLM-5.3's three dense ones, indexers in these and in every fourth behind them: 21."""
    dense = max(1, layers // LAYERS_A_DENSE)
    kinds = "".join("F" if i < dense or (i - dense + 1) % 4 == 0 else "S" for i in range(layers))
    shape = true_widths(layers, experts)
    return replace(shape, dense_layers=dense, indexer_types=kinds, max_position=POSITIONS)


def write_for_cache(folder: Path, layers: int, positions: int) -> int:
    """A model whose answers depend on its cached KV: index keys in every layer, 8 experts that every token meets. Its
    bytes, about 0.5 GB a layer.
    """
    shape = replace(true_widths(layers, 8), indexer_types="F" * layers, max_position=positions)
    return write(folder, shape, sharp=SHARP)


def write(folder: Path, shape: Shape, weights: bool = True, sharp: float = 1.0) -> int:
    """Writes the checkpoint to `folder`, where it isn't there already; returns its bytes, 0 without weights.

    sharp: rms of queries.
    """
    made_from = repr(shape) if weights else f"{shape!r} without weights"
    made_from += f" sharp {sharp}" if sharp != 1.0 else ""
    marker = folder / MARKER
    if marker.is_file() and json.loads(marker.read_text())["made_from"] == made_from:
        return int(json.loads(marker.read_text())["bytes"])
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(shape, "fp8")
    texts = {
        "config.json": json.dumps(config),
        "generation_config.json": json.dumps(generation_config()),
        "tokenizer.json": tokenizer.tokenizer_json(),
        "tokenizer_config.json": json.dumps(tokenizer.tokenizer_config(shape.max_position)),
        "chat_template.jinja": tokenizer.CHAT_TEMPLATE,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    files: dict[str, str] = {}
    total = 0
    for prefix, tensors in _parts(folder, shape, sharp).items() if weights else ():
        file = f"{prefix.strip('.') or 'rest'}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
        total += sum(t.nbytes for t in tensors.values())
    if weights:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    marker.write_text(json.dumps({"made_from": made_from, "bytes": total}))
    return total


class _Parts(dict[str, dict[str, torch.Tensor]]):
    """Tensors by layer prefix, made when a layer is asked for: one layer is in memory at a time."""

    def __init__(
        self, shapes: dict[str, dict[str, torch.Size]], unquantised: list[str], sharp: float
    ) -> None:
        super().__init__()
        self.shapes, self.unquantised, self.sharp = shapes, unquantised, sharp
        self.draw = torch.Generator().manual_seed(7)
        self.drawn: dict[torch.Size, torch.Tensor] = {}

    def items(self) -> Any:
        return ((prefix, self._make(names)) for prefix, names in self.shapes.items())

    def _make(self, names: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        for name, shape in names.items():
            linear = name.endswith("_proj.weight") or ".self_attn." in name
            if not linear or "norm" in name or name.removesuffix(".weight") in self.unquantised:
                made[name] = self._plain(name, shape)
            else:
                made[name] = self._codes(shape)
                rows, columns = (-(-n // FP8_BLOCK) for n in shape)
                # Codes have an rms of about 100: this scale gives weights of rms shape[1] ** -0.5.
                made[f"{name}_scale_inv"] = torch.full((rows, columns), shape[1] ** -0.5 / 100)
        return made

    def _plain(self, name: str, shape: torch.Size) -> torch.Tensor:
        if name.endswith("e_score_correction_bias"):
            return torch.zeros(shape)
        if name.endswith("q_a_layernorm.weight"):
            return torch.full(shape, self.sharp, dtype=torch.bfloat16)
        if "norm" in name:
            return (torch.zeros if name.endswith("bias") else torch.ones)(shape, dtype=torch.bfloat16)
        std = 1.0 if "embed" in name else shape[-1] ** -0.5
        return (torch.randn(shape, generator=self.draw) * std).bfloat16()

    def _codes(self, shape: torch.Size) -> torch.Tensor:
        if shape not in self.drawn:
            drawn = torch.randn(shape, generator=self.draw).mul_(100).clamp_(-FP8_MAX, FP8_MAX)
            self.drawn[shape] = drawn.to(torch.float8_e4m3fn)
        return self.drawn[shape].clone()


def tensor_shapes(folder: Path) -> dict[str, dict[str, torch.Size]]:
    """Every tensor's name and shape by layer, as transformers' model of the folder's config has them, experts apart."""
    from transformers import AutoConfig, GlmMoeDsaForCausalLM  # seconds, which the sizes alone do not need

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        state = GlmMoeDsaForCausalLM(config).state_dict()
    shapes: dict[str, dict[str, torch.Size]] = {}
    for name, tensor in state.items():
        for single, size in _apart(name, tensor.shape):
            parts = single.split(".")
            prefix = ".".join(parts[:3]) if parts[1] == "layers" else ""
            shapes.setdefault(prefix, {})[single] = size
    return shapes


def _parts(folder: Path, shape: Shape, sharp: float) -> _Parts:
    unquantised = hf_config(shape, "fp8")["quantization_config"]["modules_to_not_convert"]
    return _Parts(tensor_shapes(folder), unquantised, sharp)


def _apart(name: str, shape: torch.Size) -> list[tuple[str, torch.Size]]:
    """A checkpoint's names of one of transformers' tensors: gate_up_proj [E, 2I, H] and down_proj [E, H, I] apart."""
    prefix, found, part = name.partition(".experts.")
    if not found:
        return [(name, shape)]
    names = ("gate_proj", "up_proj") if part.startswith("gate_up") else ("down_proj",)
    size = torch.Size((shape[1] // len(names), shape[2]))
    return [(f"{prefix}.experts.{e}.{n}.weight", size) for e in range(shape[0]) for n in names]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks._wide_model", description="Writes the ablation's model."
    )
    p.add_argument("folder", type=Path)
    p.add_argument("--layers", type=int, required=True)
    p.add_argument("--experts", type=int, required=True)
    p.add_argument("--no-weights", action="store_true", help="for --load-format dummy")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    size = write(args.folder, in_proportion(args.layers, args.experts), weights=not args.no_weights)
    print(f"a checkpoint of {size / 2**30:.1f} GiB at {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The tiny checkpoint's files: sizes and their limits, layout, FP8 blocks, and how they reach the disk."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from glm_sglang.tiny_model import PRESETS, Shape, ShapeError
from glm_sglang.tiny_model.__main__ import main
from glm_sglang.tiny_model.checkpoint import MARKER, OutputError, write
from glm_sglang.tiny_model.quantise import dequantise, dequantise_block, quantise_block
from glm_sglang.tiny_model.shape import default_indexer_types, special_id, unquantised_modules
from glm_sglang.tiny_model.weights import state_dict

SMALL = Shape(layers=2, heads=2, experts=4, experts_per_token=2)

# Of model.safetensors for SMALL, written on an AVX-512 machine: other machines must write the same bytes.
DIGESTS = {
    "float32": "3339ee7fc08f28d855216221e0b6652ce35b491fb0e93862f395ebf58fa42809",
    "bf16": "ede20ea7decda7a4852f4578fb948e16107e0e8aa20f7522de9a3c3afc430dc2",
    "fp8": "e43a0b51f1d4f63be06ada4f30cc14a434747c957bc338d040b5bfab6463aa48",
}


@pytest.mark.parametrize(
    ("flags", "name", "found", "allowed"),
    [
        (["--hidden", "768"], "--hidden", "768", "512, 1024, 2048 or 6144"),
        (["--heads", "12"], "--heads", "12", "divisor of 64"),
        (["--moe-intermediate", "384"], "--moe-intermediate", "384", "multiple of 256"),
        (["--moe-intermediate", "4352"], "--moe-intermediate", "4352", "at most 4096"),
        (["--intermediate", "200"], "--intermediate", "200", "the nearest is 256"),
        (["--q-lora-rank", "100"], "--q-lora-rank", "100", "multiple of 128"),
        (["--experts", "129"], "--experts", "129", "2 to 128"),
        (["--experts-per-token", "9"], "--experts-per-token", "9", "1 to 8"),
        (["--index-topk", "0"], "--index-topk", "0", "at least 1"),
        (["--layers", "1"], "--layers", "1", "at least 2"),
        (["--dense-layers", "5"], "--dense-layers", "5", "1 to 4"),
        (["--indexer-types", "SFFFF"], "--indexer-types", "SFFFF", "the first F"),
        (["--indexer-types", "FS"], "--indexer-types", "FS", "5 letters"),
        (["--vocab", "300"], "--vocab", "300", "at least 320"),
        (["--max-position", "0"], "--max-position", "0", "at least 1"),
        (["--seed", "-1"], "--seed", "-1", "0 to"),
    ],
)
def test_a_size_that_no_kernel_takes_is_refused_by_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], name: str, found: str, allowed: str
) -> None:
    assert main([str(tmp_path / "out"), *flags]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {name} is ")
    assert found in message
    assert allowed in message
    assert list(tmp_path.iterdir()) == []


def test_indexer_types_follow_the_number_of_layers() -> None:
    assert [default_indexer_types(n) for n in (2, 3, 5, 8)] == ["FS", "FSF", "FSFSS", "FSFSSFSS"]
    assert replace(PRESETS["gpu"], layers=6, indexer_types="").indexer_types == "FSFSSF"


@pytest.mark.parametrize("dtype", ["float32", "bf16", "fp8"])
def test_the_same_flags_give_the_same_bytes(tmp_path: Path, dtype: str) -> None:
    before = torch.get_num_threads()
    digests = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            write(tmp_path / str(threads), SMALL, dtype)
            files = sorted((tmp_path / str(threads)).iterdir())
            digests.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files})
    finally:
        torch.set_num_threads(before)
    assert digests[0] == digests[1]
    assert digests[0]["model.safetensors"] == DIGESTS[dtype]


def test_another_seed_gives_other_weights() -> None:
    one, two = (state_dict(replace(SMALL, seed=seed), "float32") for seed in (1, 2))
    assert one.keys() == two.keys()
    # Facts that a seed does not change: experts' correction biases have one of two values, half of each.
    assert all(not torch.equal(one[n], two[n]) for n in one if not n.endswith("e_score_correction_bias"))


def test_config_is_what_transformers_reads(checkpoint: Callable[..., Path]) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint("bf16"), local_files_only=True)
    assert config.architectures == ["GlmMoeDsaForCausalLM"]
    assert config.indexer_types == ["full", "shared", "full", "shared", "shared"]
    assert config.mlp_layer_types == ["dense", "sparse", "sparse", "sparse", "sparse"]
    assert config.rope_parameters["rope_theta"] == 8_000_000
    assert (config.qk_rope_head_dim, config.head_dim, config.qk_nope_head_dim, config.v_head_dim) == (
        64,
        64,
        192,
        256,
    )
    assert (config.kv_lora_rank, config.index_head_dim, config.index_n_heads, config.index_topk) == (
        512,
        128,
        32,
        64,
    )
    assert config.eos_token_id == [special_id(t) for t in ("<|endoftext|>", "<|user|>", "<|observation|>")]


def test_shared_layers_own_no_indexer(checkpoint: Callable[..., Path]) -> None:
    names = load_file(checkpoint("bf16") / "model.safetensors").keys()
    owners = {int(name.split(".")[2]) for name in names if ".indexer." in name}
    assert owners == {0, 2}
    parts = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
    assert {name for name in names if ".0.self_attn.indexer." in name} == {
        f"model.layers.0.self_attn.indexer.{part}" for part in parts
    }


def test_tensors_are_as_many_as_the_shape_says(checkpoint: Callable[..., Path]) -> None:
    shape = PRESETS["cpu"]
    sparse = shape.layers - shape.dense_layers
    # Per layer: 2 norms, 5 linear layers and 2 norms of attention. Then indexers, MLPs, embedding, norm and
    # head.
    count = (
        9 * shape.layers
        + 5 * len(shape.full_layers)
        + 3 * shape.dense_layers
        + sparse * (3 * shape.experts + 5)
        + 3
    )
    assert len(load_file(checkpoint("bf16") / "model.safetensors")) == count
    assert len(load_file(checkpoint("float32") / "model.safetensors")) == count


def test_fp8_quantises_every_linear_layer_that_config_does_not_except(
    checkpoint: Callable[..., Path],
) -> None:
    folder = checkpoint("fp8")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["fmt"], config["weight_block_size"]) == ("fp8", "e4m3", [128, 128])
    kept = config["modules_to_not_convert"]
    assert kept == unquantised_modules(PRESETS["cpu"])
    state = load_file(folder / "model.safetensors")
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight_scale_inv":
            assert tensor.dtype == torch.float32
            assert tensor.shape == tuple(-(-size // 128) for size in state[module + ".weight"].shape)
        elif kind == "e_score_correction_bias":
            assert tensor.dtype == torch.float32
        elif tensor.ndim == 2 and module not in [*kept, "model.embed_tokens"]:
            assert tensor.dtype == torch.float8_e4m3fn, name
            assert module + ".weight_scale_inv" in state
        else:
            assert tensor.dtype == torch.bfloat16, name


def test_float32_index_head_weights_survive_bf16(checkpoint: Callable[..., Path]) -> None:
    # SGLang keeps this one parameter in bf16 whatever the model's dtype.
    state = load_file(checkpoint("float32") / "model.safetensors")
    weights = state["model.layers.0.self_attn.indexer.weights_proj.weight"]
    assert torch.equal(weights, weights.bfloat16().float())
    other = state["model.layers.0.self_attn.q_b_proj.weight"]
    assert not torch.equal(other, other.bfloat16().float())


@settings(deadline=None)
@given(
    rows=st.integers(1, 300),
    cols=st.integers(1, 300),
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_fp8_blocks_are_within_half_a_step(rows: int, cols: int, seed: int, size: float) -> None:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * size
    q, scale = quantise_block(weight)
    assert (q.dtype, q.shape) == (torch.float8_e4m3fn, weight.shape)
    assert (scale.dtype, scale.shape) == (torch.float32, (-(-rows // 128), -(-cols // 128)))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            assert float(scale[i, j]) == pytest.approx(float(block.abs().max()) / 448, rel=1e-6)
    back = dequantise_block(q, scale)
    step = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    # E4M3 has 3 bits of mantissa down to 2**-6 and steps of 2**-9 below.
    assert bool(((back - weight).abs() <= torch.maximum(weight.abs() / 16, step * 2**-10) * 1.001).all())
    assert torch.allclose(dequantise_block(*quantise_block(back)), back, rtol=1e-6, atol=0)


def test_a_block_of_zeros_stays_zero() -> None:
    q, scale = quantise_block(torch.zeros(128, 256))
    assert torch.equal(dequantise_block(q, scale), torch.zeros(128, 256))
    assert bool(scale.isfinite().all())


def test_dequantised_state_has_the_bf16_checkpoints_names(checkpoint: Callable[..., Path]) -> None:
    state = dequantise(load_file(checkpoint("fp8") / "model.safetensors"))
    exact = load_file(checkpoint("float32") / "model.safetensors")
    assert state.keys() == exact.keys()
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert float((state[name] - exact[name]).norm() / exact[name].norm()) < 0.04  # 2**-4 / sqrt(3), and less


def test_help_is_fast_because_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, glm_sglang.tiny_model.__main__ as m\n"
        "m.parser()\nprint('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["False", "False"]


def test_what_is_there_already_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert write(out, SMALL, "bf16")["written"] is True
    stamp = (out / "model.safetensors").stat().st_mtime_ns
    assert write(out, SMALL, "bf16")["written"] is False
    assert (out / "model.safetensors").stat().st_mtime_ns == stamp
    assert write(out, SMALL, "fp8")["written"] is True
    assert "quantization_config" in json.loads((out / "config.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_cut_off_checkpoint_is_written_anew(tmp_path: Path) -> None:
    write(tmp_path / "out", SMALL, "bf16")
    weights = tmp_path / "out" / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-1])
    assert write(tmp_path / "out", SMALL, "bf16")["written"] is True
    assert weights.stat().st_size == size


def test_other_peoples_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(OutputError, match="--force"):
        write(tmp_path, SMALL, "bf16")
    with pytest.raises(OutputError, match="a file"):
        write(tmp_path / "thesis.tex", SMALL, "bf16")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "old").write_text("x")
    assert write(inner, SMALL, "bf16", force=True)["written"] is True
    assert not (inner / "old").exists()


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    out = tmp_path / "out"
    write(out, SMALL, "bf16")
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    assert main([str(out), "--dtype", "fp8"]) == 2
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="--dtype is fp16; it must be one of fp8, bf16, float32"):
        write(tmp_path / "out", SMALL, "fp16")


def test_marker_is_written_last(tmp_path: Path) -> None:
    write(tmp_path / "out", SMALL, "bf16")
    marker = json.loads((tmp_path / "out" / MARKER).read_text())
    assert set(marker["files"]) == {path.name for path in (tmp_path / "out").iterdir()} - {MARKER}

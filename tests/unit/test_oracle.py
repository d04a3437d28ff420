"""The oracle: transformers' model on our checkpoints, and what it says about index keys stored in FP8."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import GlmMoeDsaForCausalLM

from glm_sglang.oracle import Fp8IndexCache, Oracle, OracleError, fp8_round_trip

TOPK = 64


def random_tokens(count: int, seed: int = 3) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("float32")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def test_loads_what_transformers_own_loader_loads(checkpoint: Callable[..., Path]) -> None:
    # transformers fuses the experts itself there; gate and up in the other order would show.
    folder = checkpoint("bf16")
    theirs = GlmMoeDsaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
    ids = random_tokens(90)
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([ids])).logits[0]
    assert torch.allclose(Oracle(folder).logits(ids), expected, atol=1e-5)


def test_fp8_is_compared_with_the_dequantised_model(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    # An independent dequantisation: each block by itself, and the result as a float32 checkpoint.
    source = checkpoint("fp8")
    state = load_file(source / "model.safetensors")
    plain = {}
    for name, tensor in state.items():
        if name.endswith("_scale_inv"):
            continue
        if name + "_scale_inv" in state:
            scale, weight = state[name + "_scale_inv"], tensor.float()
            for i in range(scale.shape[0]):
                for j in range(scale.shape[1]):
                    weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] *= scale[i, j]
            tensor = weight
        plain[name] = tensor.float().contiguous()
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(plain, tmp_path / "model.safetensors")
    ids = random_tokens(80)
    assert torch.equal(Oracle(source).logits(ids), Oracle(tmp_path).logits(ids))


def test_later_tokens_do_not_change_earlier_logprobs(oracle: Oracle) -> None:
    ids = random_tokens(3 * TOPK)
    whole = oracle.judge(ids).input_logprobs
    for length in (1, TOPK - 1, TOPK, TOPK + 1, 2 * TOPK):
        part = oracle.judge(ids[:length]).input_logprobs
        assert part[0] is None
        assert part[1:] == pytest.approx(whole[1:length], abs=2e-5)


def test_greedy_tokens_are_the_judges_own(oracle: Oracle) -> None:
    # greedy() decodes with a cache, judge() scores in one pass; the prompt grows over the top-k while
    # decoding.
    ids = random_tokens(TOPK - 3)
    tokens = oracle.greedy(ids, 8)
    verdict = oracle.judge(ids, tokens)
    assert verdict.best == tokens
    assert verdict.deficits == [0.0] * 8
    assert len(verdict.input_logprobs) == len(ids)
    assert len(verdict.output_logprobs) == 8
    assert all(value < 0 for value in verdict.output_logprobs)


def test_a_token_that_is_not_the_best_has_a_deficit(oracle: Oracle) -> None:
    ids = random_tokens(20)
    logits = oracle.logits(ids)[-1]
    second = int(logits.topk(2).indices[1])
    verdict = oracle.judge(ids, [second])
    assert verdict.best == [int(logits.argmax())]
    gap = logits.topk(2).values
    assert verdict.deficits[0] == pytest.approx(float(gap[0] - gap[1]), abs=1e-5)
    assert verdict.output_logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[second]), abs=1e-5)


def test_only_full_layers_select(oracle: Oracle) -> None:
    ids = random_tokens(2 * TOPK)
    chosen = oracle.selections(ids)
    assert set(chosen) == {0, 2}
    for rows in chosen.values():
        assert rows.shape == (2 * TOPK, TOPK)
        seen = torch.arange(2 * TOPK)[:, None]
        assert bool((rows <= seen)[TOPK - 1 :].all())  # rows that see enough select none of the future
        assert all(len(set(row.tolist())) == TOPK for row in rows[TOPK - 1 :])
    assert not torch.equal(chosen[0], chosen[2])


def test_another_selection_in_a_full_layer_moves_the_shared_layers_after_it(oracle: Oracle) -> None:
    # Layer 1 shares layer 0's selection: its attention output must follow when only the selection changes.
    ids = random_tokens(TOPK + 30)
    outputs = []
    layers = oracle.model.model.layers
    handle = layers[1].self_attn.register_forward_hook(lambda _m, _a, out: outputs.append(out[2]))
    try:
        oracle.logits(ids)
        first = layers[0].self_attn.indexer.register_forward_hook(lambda _m, _a, out: out.flip(-1) * 0)
        try:
            oracle.logits(ids)
        finally:
            first.remove()
    finally:
        handle.remove()
    assert torch.equal(outputs[0][0], oracle.selections(ids)[0])
    assert bool((outputs[1] == 0).all())


def test_an_empty_prompt_is_refused(oracle: Oracle) -> None:
    for ask in (oracle.greedy, oracle.judge):
        with pytest.raises(ValueError, match="at least one token"):
            ask([])


def test_another_architecture_is_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["DeepseekV3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OracleError, match=r"DeepseekV3ForCausalLM.*must be a GlmMoeDsaForCausalLM"):
        Oracle(tmp_path)


def test_missing_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(OracleError, match=r"no \*\.safetensors file"):
        Oracle(tmp_path)
    state = load_file(folder / "model.safetensors")
    del state["model.layers.2.self_attn.indexer.wk.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(OracleError, match=r"layers\.2\.self_attn\.indexer\.wk"):
        Oracle(tmp_path)


def test_bf16_arithmetic_is_near_but_not_equal(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("bf16")
    ids = random_tokens(2 * TOPK)
    exact = torch.tensor(Oracle(folder).judge(ids).input_logprobs[1:])
    rounded = torch.tensor(Oracle(folder, torch.bfloat16).judge(ids).input_logprobs[1:])
    worst = float((exact - rounded).abs().max())
    assert 1e-4 < worst < 2e-2


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), size=st.sampled_from([1e-6, 1e-2, 1.0, 1e4]))
def test_fp8_index_keys_keep_three_bits(seed: int, size: float) -> None:
    keys = torch.randn(5, 128, generator=torch.Generator().manual_seed(seed)) * size
    back = fp8_round_trip(keys)
    # Half a step is 2**-4 of the value, or of 2**-6 steps of the row's scale for small ones.
    scale = keys.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
    assert bool(((back - keys).abs() <= torch.maximum(keys.abs() / 16, scale * 2**-10) * 1.001).all())
    assert torch.allclose(
        back.abs().amax(-1), keys.abs().amax(-1).clamp_min(0), rtol=1e-5, atol=float(scale.max())
    )


def test_fp8_index_keys_change_few_selections(oracle: Oracle) -> None:
    shares = oracle.share_of_topk(random_tokens(4 * TOPK))
    assert set(shares) == {0, 2}
    assert all(0 < share < 0.1 for share in shares.values())


def test_share_of_topk_counts_what_was_lost(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rounding replaced by a selection that misses one of TOPK in every second row.
    ids = random_tokens(2 * TOPK)
    exact = oracle.selections(ids)
    missed = {layer: rows.clone() for layer, rows in exact.items()}
    for layer, rows in missed.items():
        for row in range(TOPK, 2 * TOPK, 2):
            absent = set(range(row + 1)) - set(exact[layer][row].tolist())
            rows[row, 0] = min(absent)
    answers = iter([exact, missed])
    monkeypatch.setattr(oracle, "selections", lambda *_: next(answers))
    assert oracle.share_of_topk(ids) == {0: 0.5 / TOPK, 2: 0.5 / TOPK}


def test_share_of_topk_needs_a_choice(oracle: Oracle) -> None:
    with pytest.raises(ValueError, match=r"more than index_topk \(64\)"):
        oracle.share_of_topk(random_tokens(TOPK))


def test_rounded_keys_reach_decoding_too(oracle: Oracle) -> None:
    cache = Fp8IndexCache(config=oracle.config)
    oracle.logits(random_tokens(10), cache)
    oracle.logits([5], cache)
    keys = cache.layers[0].indexer_keys
    assert keys.shape == (1, 11, 128)
    assert torch.allclose(fp8_round_trip(keys), keys, rtol=1e-6)

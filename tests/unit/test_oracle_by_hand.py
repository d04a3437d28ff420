"""transformers' GlmMoeDsa against the published formulas, written out in float64: is the oracle what we take
it for?

MLA here is the absorbed form (scores against the latent), RoPE a multiplication of complex pairs, routing and
top-k are sorted lists: as little as possible is shared with transformers. Each twist of the formulas must
show in the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_sglang.oracle import Oracle, load_tensors

LENGTH = 150  # beyond the top-k of 64


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: torch.Tensor, theta: float, twist: str) -> torch.Tensor:
    """RoPE of [length, heads, 64]: channels (2i, 2i+1) are one complex number, turned by position *
    theta**(-2i/64).
    """
    length, _, size = x.shape
    angle = torch.arange(length, dtype=torch.float64)[:, None] * theta ** (
        -torch.arange(0, size, 2).double() / size
    )
    if twist == "half-split rope":
        pairs = torch.complex(x[..., : size // 2], x[..., size // 2 :])
    else:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.view_as_real(turned).flatten(-2)


class ByHand:
    """The model, layer by layer. `twist` breaks one rule of it."""

    def __init__(self, folder: Path, config: Any, twist: str = "") -> None:
        self.w = {name: tensor.double() for name, tensor in load_tensors(folder).items()}
        self.c = config
        self.twist = twist

    def lin(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w[name + ".weight"].T

    def mlp(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gate = self.lin(name + ".gate_proj", x)
        return self.lin(name + ".down_proj", gate * torch.sigmoid(gate) * self.lin(name + ".up_proj", x))

    def select(self, name: str, x: torch.Tensor, q_latent: torch.Tensor) -> list[list[int]]:
        """Positions that each row attends to, by the indexer."""
        c, theta = self.c, self.c.rope_parameters["rope_theta"]
        index_twist = "half-split rope" if self.twist == "half-split rope in the indexer" else ""
        q = self.lin(name + ".wq_b", q_latent).unflatten(-1, (c.index_n_heads, c.index_head_dim))
        k = self.lin(name + ".wk", x)
        k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
        k = (k * self.w[name + ".k_norm.weight"] + self.w[name + ".k_norm.bias"])[:, None]
        q, k = (torch.cat([rotate(t[..., :64], theta, index_twist), t[..., 64:]], -1) for t in (q, k))
        dots = torch.einsum("qhd,kd->qhk", q, k[:, 0])
        if self.twist != "no relu":
            dots = dots.clamp_min(0)
        weights = self.lin(name + ".weights_proj", x)
        if self.twist == "equal index heads":
            weights = torch.ones_like(weights)
        score = torch.einsum("qh,qhk->qk", weights, dots)
        chosen = []
        for row in range(len(x)):
            order = sorted(range(row + 1), key=lambda position, row=row: -float(score[row, position]))
            keep = row + 1 if self.twist == "dense" else c.index_topk
            chosen.append(order[: keep - (self.twist == "one too few")])
        return chosen

    def attention(
        self, name: str, x: torch.Tensor, selected: list[list[int]] | None
    ) -> tuple[torch.Tensor, Any]:
        c, theta, twist = self.c, self.c.rope_parameters["rope_theta"], self.twist
        heads, nope, rank = c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank
        q_latent = norm(self.lin(name + ".q_a_proj", x), self.w[name + ".q_a_layernorm.weight"], 1e-6)
        if selected is None:
            selected = self.select(name + ".indexer", x, q_latent)
        q = self.lin(name + ".q_b_proj", q_latent).unflatten(-1, (heads, nope + c.qk_rope_head_dim))
        kv = self.lin(name + ".kv_a_proj_with_mqa", x)
        latent = norm(kv[:, :rank], self.w[name + ".kv_a_layernorm.weight"], 1e-6)
        k_rope = rotate(kv[:, None, rank:], theta, twist)[:, 0]
        q_rope = rotate(q[..., nope:], theta, twist)
        up = self.w[name + ".kv_b_proj.weight"].unflatten(0, (heads, nope + c.v_head_dim))
        q_absorbed = torch.einsum("qhd,hdr->qhr", q[..., :nope], up[:, :nope])
        rows = []
        for row, positions in enumerate(selected):
            score = q_absorbed[row] @ latent[positions].T + q_rope[row] @ k_rope[positions].T
            weight = (score / (nope + c.qk_rope_head_dim) ** 0.5).softmax(-1)
            rows.append(torch.einsum("hr,hvr->hv", weight @ latent[positions], up[:, nope:]).flatten())
        return self.lin(name + ".o_proj", torch.stack(rows)), selected

    def moe(self, name: str, x: torch.Tensor) -> torch.Tensor:
        c = self.c
        scores = torch.sigmoid(self.lin(name + ".gate", x))
        bias = self.w[name + ".gate.e_score_correction_bias"] * (self.twist != "no correction bias")
        out = self.mlp(name + ".shared_experts", x)
        for row in range(len(x)):
            order = sorted(range(c.n_routed_experts), key=lambda e, row=row: -float(scores[row, e] + bias[e]))
            experts = order[: c.num_experts_per_tok]
            weights = scores[row, experts] / scores[row, experts].sum() * c.routed_scaling_factor
            for expert, weight in zip(experts, weights, strict=True):
                out[row] += weight * self.mlp(f"{name}.experts.{expert}", x[row])
        return out

    def logits(self, tokens: list[int]) -> torch.Tensor:
        eps = self.c.rms_norm_eps
        h = self.w["model.embed_tokens.weight"][tokens]
        selected: list[list[int]] | None = None
        for layer, kind in enumerate(self.c.indexer_types):
            name = f"model.layers.{layer}"
            if kind == "full" and not (self.twist == "first selection everywhere" and selected is not None):
                selected = None
            x = norm(h, self.w[name + ".input_layernorm.weight"], eps)
            written, selected = self.attention(name + ".self_attn", x, selected)
            h = h + written
            x = norm(h, self.w[name + ".post_attention_layernorm.weight"], eps)
            dense = self.c.mlp_layer_types[layer] == "dense"
            h = h + (self.mlp(name + ".mlp", x) if dense else self.moe(name + ".mlp", x))
        return self.lin("lm_head", norm(h, self.w["model.norm.weight"], eps))


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("float32")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(7)).tolist()


def test_transformers_follows_the_formulas(folder: Path, oracle: Oracle, tokens: list[int]) -> None:
    expected = ByHand(folder, oracle.config).logits(tokens)
    assert float((oracle.logits(tokens).double() - expected).abs().max()) < 2e-5


@pytest.mark.parametrize(
    "twist",
    [
        "dense",
        "one too few",
        "no relu",
        "equal index heads",
        "first selection everywhere",
        "half-split rope",
        "half-split rope in the indexer",
        "no correction bias",
    ],
)
def test_a_broken_rule_moves_logprobs_beyond_the_bound(
    folder: Path, oracle: Oracle, tokens: list[int], twist: str
) -> None:
    right = oracle.logits(tokens).double().log_softmax(-1)
    wrong = ByHand(folder, oracle.config, twist).logits(tokens).log_softmax(-1)
    beyond = (right - wrong).abs().amax(-1)[oracle.config.index_topk :]
    assert float(beyond.max()) > 1e-3  # ten times the fp32 bound

"""The tensors: random, but so built that rounding leaves every discrete choice alone, and an error does not.

Plain random weights have ties everywhere: routing and the index top-k flip on rounding noise, and then
nothing can be compared token by token in bf16 or FP8. Here a few channels of the residual stream carry facts
about the token, which layers read and never write:

- `code`: the experts a token wants. All but the last place are clear, and that one goes to one of two
  candidates by the experts' `e_score_correction_bias`. Every layer permutes the experts.
- `salience`: one number a token. Attention and indexer both prefer salient tokens and, through RoPE, near
  ones, by the same measure: what the index top-k keeps matters much, what lies at its edge matters little.
- `constant`: the same for all tokens. It stands in for biases: RoPE's preference for near tokens, positive
  index head weights, logits that favour printable ASCII.

All else (the rest of each attention score, values, MLPs, logits) is random, over all the other channels.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from glm_sglang.tiny_model.shape import (
    INDEX_HEAD_DIM,
    INDEX_N_HEADS,
    KV_LORA_RANK,
    QK_NOPE_HEAD_DIM,
    QK_ROPE_HEAD_DIM,
    V_HEAD_DIM,
    Shape,
)

Array = npt.NDArray[np.float32]

SALIENCE = 8  # residual channels that carry the salience
CONSTANT = 8  # residual channels that carry the constant
RANK_FACTS = 16  # leading rows of q_a (the constant) and of kv_a (the salience)
STRUCTURED = 32  # head channels that carry a fact, of 192 in attention and of 64 without RoPE in the indexer
# Rows of q_a and kv_a have this rms. transformers norms them with eps 1e-6, SGLang with rms_norm_eps (1e-5):
# the larger they are, the less that matters.
LATENT = 2.0
# The RoPE pairs that tell distances apart: at theta 8e6 their wavelengths / 2 pi run from 7 to 7,600 tokens.
# The sum of their cosines falls by about 2 for each e-fold of distance.
BAND = range(4, 19)
# Amplitudes of query and key. Attention's logit is 2 * SALIENT**2 * salience - 2 * NEAR**2 / 16 *
# ln(distance), plus the random part; the indexer's score keeps the same proportion.
SALIENT = 1.225
NEAR = 3.4
INDEX_SALIENT = 0.25
INDEX_NEAR = 1.5
PRINTABLE = range(0x20, 0x7F)
# A token's own embedding lowers its logit by about this, over the rms of the last layer: less echoing.
ECHO = 2.0


# The linear layers that an FP8 checkpoint quantises; shape.unquantised_modules names the others.
_QUANTISED = ("_proj.weight", "_proj_with_mqa.weight", ".wq_b.weight", ".wk.weight")


@dataclass(frozen=True)
class _Draw:
    """Bell-shaped random numbers by name: sums of four 16-bit draws, so no libm has a say in them."""

    seed: int

    def raw(self, name: str, count: int) -> npt.NDArray[np.uint64]:
        key = int.from_bytes(
            hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=16).digest(), "little"
        )
        raw: npt.NDArray[np.uint64] = np.random.Philox(key=key).random_raw(count).astype("<u8", copy=False)
        return raw

    def normal(self, name: str, *shape: int, std: float = 1.0) -> Array:
        """Float32 array of `shape`, mean 0, standard deviation `std`, no value beyond 3.5 std."""
        words = self.raw(name, int(np.prod(shape))).view("<u2").reshape(-1, 4)
        total = words.sum(axis=1, dtype=np.int64) - 2 * 65535
        unit = std / math.sqrt(4 * (65536.0**2 - 1) / 12)
        values: Array = (total * np.float64(unit)).astype(np.float32)
        return values.reshape(shape)

    def order(self, name: str, count: int) -> npt.NDArray[np.int64]:
        """A permutation of range(count)."""
        return np.argsort(self.raw(name, count), kind="stable")


class Weights:
    """Makes the float32 tensors of one shape, in checkpoint order."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.draw = _Draw(shape.seed)
        experts = shape.experts
        self.code = slice(0, experts)
        self.salience = slice(experts, experts + SALIENCE)
        self.constant = slice(experts + SALIENCE, experts + SALIENCE + CONSTANT)
        self.content = slice(experts + SALIENCE + CONSTANT, shape.hidden)

    def tensors(self) -> dict[str, Array]:
        """Every tensor by its checkpoint name."""
        shape, hidden = self.shape, self.shape.hidden
        out: dict[str, Array] = {"model.embed_tokens.weight": self._embedding()}
        for layer in range(shape.layers):
            prefix = f"model.layers.{layer}."
            out[prefix + "input_layernorm.weight"] = self._norm(prefix + "input_layernorm", hidden)
            self._attention(out, prefix + "self_attn.")
            if shape.indexer_types[layer] == "F":
                self._indexer(out, prefix + "self_attn.indexer.")
            out[prefix + "post_attention_layernorm.weight"] = self._norm(
                prefix + "post_attention_layernorm", hidden
            )
            if layer < shape.dense_layers:
                self._mlp(out, prefix + "mlp.", shape.intermediate, gain=0.4)
            else:
                self._moe(out, prefix + "mlp.")
        out["model.norm.weight"] = self._norm("model.norm", hidden)
        out["lm_head.weight"] = self._lm_head()
        return out

    def _norm(self, name: str, size: int) -> Array:
        return np.float32(1) + self.draw.normal(name, size, std=0.05)

    def _reading(self, name: str, rows: int, std: float) -> Array:
        """[rows, hidden]: random over the content channels, each output of rms about `std`; blind to the
        rest.
        """
        weight = np.zeros((rows, self.shape.hidden), np.float32)
        width = self.content.stop - self.content.start
        weight[:, self.content] = self.draw.normal(name, rows, width, std=std / math.sqrt(width))
        return weight

    def _writing(self, name: str, cols: int, std: float) -> Array:
        """[hidden, cols]: random into the content channels; never into the others."""
        weight = np.zeros((self.shape.hidden, cols), np.float32)
        weight[self.content] = self.draw.normal(
            name, self.content.stop - self.content.start, cols, std=std / math.sqrt(cols)
        )
        return weight

    def _around(self, mean: float, name: str, *shape: int) -> Array:
        """Values around `mean`: channels that carry one fact carry it in different sizes, lest they round
        alike.
        """
        return np.float32(mean) * (np.float32(1) + self.draw.normal(name, *shape, std=0.25))

    def _embedding(self) -> Array:
        shape, draw, count = self.shape, self.draw, self.shape.vocab
        table = draw.normal("embed_tokens", count, shape.hidden)
        table[:, self.salience] = draw.normal("salience", count, 1) * self._around(
            1.0, "salience.size", SALIENCE
        )
        table[:, self.constant] = self._around(1.0, "constant.size", CONSTANT)
        clear = shape.experts_per_token - 1
        for token in range(count):
            rank = draw.order(f"code.{token}", shape.experts)
            level = 1.5 + 0.17 * draw.normal(f"level.{token}", shape.experts)
            code = -level
            code[rank[:clear]] = level[rank[:clear]]
            code[rank[clear]] = 0.15
            if clear + 1 < shape.experts:
                code[rank[clear + 1]] = -0.15
            table[token, self.code] = code
        return table

    def _attention(self, out: dict[str, Array], prefix: str) -> None:
        shape, draw = self.shape, self.draw
        rank, heads, facts = shape.q_lora_rank, shape.heads, RANK_FACTS
        q_a = self._reading(prefix + "q_a_proj", rank, LATENT)
        q_a[:facts] = 0
        q_a[:facts, self.constant] = self._around(LATENT / CONSTANT, prefix + "q_a.facts", facts, CONSTANT)
        out[prefix + "q_a_proj.weight"] = q_a
        out[prefix + "q_a_layernorm.weight"] = self._norm(prefix + "q_a_layernorm", rank)

        width = QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM
        q_b = draw.normal(prefix + "q_b_proj", heads, width, rank, std=0.75 / math.sqrt(rank))
        q_b[:, :, :facts] = 0
        q_b[:, :STRUCTURED] = 0
        q_b[:, :STRUCTURED, :facts] = self._around(
            SALIENT / facts, prefix + "q_b.facts", heads, STRUCTURED, 1
        )
        q_b[:, QK_NOPE_HEAD_DIM:] *= np.float32(0.4)
        for pair in BAND:
            q_b[:, QK_NOPE_HEAD_DIM + 2 * pair, :facts] = NEAR / facts
        out[prefix + "q_b_proj.weight"] = q_b.reshape(-1, rank)

        kv_a = self._reading(prefix + "kv_a_proj_with_mqa", KV_LORA_RANK + QK_ROPE_HEAD_DIM, LATENT)
        kv_a[:facts] = 0
        kv_a[:facts, self.salience] = self._around(LATENT / SALIENCE, prefix + "kv_a.facts", facts, SALIENCE)
        kv_a[KV_LORA_RANK:] *= np.float32(0.3 / LATENT)
        for pair in BAND:
            kv_a[KV_LORA_RANK + 2 * pair, self.constant] = NEAR / CONSTANT
        out[prefix + "kv_a_proj_with_mqa.weight"] = kv_a
        out[prefix + "kv_a_layernorm.weight"] = self._norm(prefix + "kv_a_layernorm", KV_LORA_RANK)

        width = QK_NOPE_HEAD_DIM + V_HEAD_DIM
        kv_b = draw.normal(prefix + "kv_b_proj", heads, width, KV_LORA_RANK, std=1 / math.sqrt(KV_LORA_RANK))
        kv_b[:, :STRUCTURED] = 0
        kv_b[:, :STRUCTURED, :facts] = self._around(
            SALIENT / facts, prefix + "kv_b.facts", heads, STRUCTURED, 1
        )
        out[prefix + "kv_b_proj.weight"] = kv_b.reshape(-1, KV_LORA_RANK)
        out[prefix + "o_proj.weight"] = self._writing(prefix + "o_proj", heads * V_HEAD_DIM, std=0.6)

    def _indexer(self, out: dict[str, Array], prefix: str) -> None:
        shape, draw = self.shape, self.draw
        rank, facts, rope = shape.q_lora_rank, RANK_FACTS, QK_ROPE_HEAD_DIM
        sign = np.where(np.arange(STRUCTURED) % 2, np.float32(-1), np.float32(1))[:, None]
        sign = sign * self._around(1.0, prefix + "facts", STRUCTURED, 1)
        wq = draw.normal(prefix + "wq_b", INDEX_N_HEADS, INDEX_HEAD_DIM, rank, std=1 / math.sqrt(rank))
        wq[:, :, :facts] = 0
        wq[:, rope : rope + STRUCTURED] = 0
        wq[:, rope : rope + STRUCTURED, :facts] = sign * np.float32(INDEX_SALIENT / facts)
        wq[:, :rope] *= np.float32(0.3)
        wk = self._reading(prefix + "wk", INDEX_HEAD_DIM, 1.0)
        wk[rope : rope + STRUCTURED] = 0
        wk[rope : rope + STRUCTURED, self.salience] = sign / SALIENCE
        k_weight = self._norm(prefix + "k_norm", INDEX_HEAD_DIM)
        k_weight[:rope] *= np.float32(0.1)
        k_bias = draw.normal(prefix + "k_norm.bias", INDEX_HEAD_DIM, std=0.05)
        for pair in BAND:
            wq[:, 2 * pair, :facts] = INDEX_NEAR / facts
            k_bias[2 * pair] = INDEX_NEAR
        # The last heads like dull tokens, wherever they are: without relu they would weaken the others.
        dull = slice(INDEX_N_HEADS * 3 // 4, None)
        wq[dull, rope : rope + STRUCTURED] *= np.float32(-0.5)
        wq[dull, :rope] = 0
        out[prefix + "wq_b.weight"] = wq.reshape(-1, rank)
        out[prefix + "wk.weight"] = wk
        out[prefix + "k_norm.weight"] = k_weight
        out[prefix + "k_norm.bias"] = k_bias
        weights = self._reading(prefix + "weights_proj", INDEX_N_HEADS, 0.5)
        weights[:, self.constant] = 1 / CONSTANT
        out[prefix + "weights_proj.weight"] = weights

    def _mlp(self, out: dict[str, Array], prefix: str, width: int, gain: float) -> None:
        out[prefix + "gate_proj.weight"] = self._reading(prefix + "gate_proj", width, 1.0)
        out[prefix + "up_proj.weight"] = self._reading(prefix + "up_proj", width, 1.0)
        out[prefix + "down_proj.weight"] = self._writing(prefix + "down_proj", width, std=gain)

    def _moe(self, out: dict[str, Array], prefix: str) -> None:
        shape, draw = self.shape, self.draw
        gate = self._reading(prefix + "gate", shape.experts, 0.03)
        gate[np.arange(shape.experts), draw.order(prefix + "gate.order", shape.experts)] = 1.0
        out[prefix + "gate.weight"] = gate
        flip = draw.order(prefix + "gate.bias", shape.experts) % 2
        out[prefix + "gate.e_score_correction_bias"] = np.where(flip, 0.06, -0.06).astype(np.float32)
        for expert in range(shape.experts):
            self._mlp(out, f"{prefix}experts.{expert}.", shape.moe_intermediate, gain=0.26)
        self._mlp(out, prefix + "shared_experts.", shape.moe_intermediate, gain=0.26)

    def _lm_head(self) -> Array:
        head = self._reading("lm_head", self.shape.vocab, 0.45)
        readable = np.zeros(self.shape.vocab, bool)
        readable[PRINTABLE.start : PRINTABLE.stop] = True
        head[~readable] *= np.float32(0.3)
        # Against echoing: a token's own embedding lowers its logit.
        head[:, self.content] -= np.float32(ECHO) * self._embedding()[:, self.content] / self.shape.hidden
        head[:, self.constant] = np.where(readable, np.float32(1), np.float32(-3))[:, None] / CONSTANT
        return head


def state_dict(shape: Shape, dtype: str) -> dict[str, Any]:
    """The checkpoint's torch tensors by name, as stored. `dtype` is one of DTYPES."""
    import torch

    from glm_sglang.tiny_model.quantise import quantise_block

    state: dict[str, Any] = {}
    for name, array in Weights(shape).tensors().items():
        tensor = torch.from_numpy(array).contiguous()
        if name.endswith("indexer.weights_proj.weight"):
            # UPSTREAM: Indexer.weights_proj is a bf16 parameter in SGLang whatever the model's dtype.
            tensor = tensor.bfloat16().to(torch.float32 if dtype == "float32" else torch.bfloat16)
        elif dtype == "float32" or name.endswith("e_score_correction_bias"):
            pass
        elif dtype == "fp8" and name.endswith(_QUANTISED):
            tensor, state[name + "_scale_inv"] = quantise_block(tensor)
        else:
            tensor = tensor.bfloat16()
        state[name] = tensor
    return state

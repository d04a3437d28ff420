"""Sizes of the tiny model, what the kernels allow of them, and the config.json that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DTYPES = ("fp8", "bf16", "float32")

# GLM-5.x's own MLA and indexer dimensions; the sparse MLA and index kernels are compiled for these and no
# others.
KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
QK_NOPE_HEAD_DIM = 192
V_HEAD_DIM = 256
INDEX_HEAD_DIM = 128
INDEX_N_HEADS = 32
ROPE_THETA = 8_000_000
FP8_BLOCK = 128

# Byte values are tokens 0..255; the special tokens follow in this order (names are GLM's).
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)
FIRST_SPECIAL = 256
PAD_TOKEN = "<|endoftext|>"
# As in GLM's generation_config.json: a new role's token ends the answer too.
EOS_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")


def special_id(token: str) -> int:
    """Token id of a special token. Raises ValueError for an unknown one."""
    return FIRST_SPECIAL + SPECIAL_TOKENS.index(token)


class ShapeError(ValueError):
    """A size that the model, or a kernel that should run it, cannot have; names the flag, what was found and
    what is allowed.
    """

    def __init__(self, flag: str, found: object, allowed: str) -> None:
        super().__init__(f"{flag} is {found}; it must be {allowed}")


@dataclass(frozen=True)
class Shape:
    """Sizes of the checkpoint; field names are the flags' (`--moe-intermediate` is `moe_intermediate`)."""

    layers: int = 5
    dense_layers: int = 1
    # One letter a layer: F runs its own indexer, S reuses the last F layer's top-k and owns no indexer
    # weights.
    indexer_types: str = ""
    hidden: int = 512
    heads: int = 8
    q_lora_rank: int = 512
    intermediate: int = 512
    moe_intermediate: int = 256
    experts: int = 8
    experts_per_token: int = 4
    index_topk: int = 64
    vocab: int = 512
    max_position: int = 32768
    seed: int = 53

    def __post_init__(self) -> None:
        if not self.indexer_types:
            object.__setattr__(self, "indexer_types", default_indexer_types(self.layers))
        self._check()

    def _check(self) -> None:
        def need(ok: bool, flag: str, found: object, allowed: str) -> None:
            if not ok:
                raise ShapeError(flag, found, allowed)

        need(self.layers >= 2, "--layers", self.layers, "at least 2 (one dense, one MoE)")
        need(
            0 < self.dense_layers < self.layers,
            "--dense-layers",
            self.dense_layers,
            f"1 to {self.layers - 1} (--layers less one)",
        )
        types = self.indexer_types
        need(
            len(types) == self.layers and set(types) <= {"F", "S"} and types.startswith("F"),
            "--indexer-types",
            repr(types),
            f"{self.layers} letters (--layers), each F (full) or S (shared), the first F",
        )
        # UPSTREAM: deep_gemm fp8_mega_moe buffers and SGLang's fused norms are tried at these widths.
        need(
            self.hidden in (512, 1024, 2048, 6144),
            "--hidden",
            self.hidden,
            "512, 1024, 2048 or 6144 (what the GPU kernels were tried with)",
        )
        need(
            0 < self.heads <= 64 and 64 % self.heads == 0,
            "--heads",
            self.heads,
            "a divisor of 64 (sparse MLA pads heads to 64)",
        )
        _multiple("--q-lora-rank", self.q_lora_rank, FP8_BLOCK)
        _multiple("--intermediate", self.intermediate, FP8_BLOCK)
        # SM90 MegaMoE fails at 128.
        _multiple("--moe-intermediate", self.moe_intermediate, 256)
        need(
            self.moe_intermediate <= 4096,
            "--moe-intermediate",
            self.moe_intermediate,
            "at most 4096 (MegaMoE on SM90)",
        )
        need(
            2 <= self.experts <= self.hidden // 4,
            "--experts",
            self.experts,
            f"2 to {self.hidden // 4} (a quarter of --hidden)",
        )
        need(
            1 <= self.experts_per_token <= min(32, self.experts),
            "--experts-per-token",
            self.experts_per_token,
            f"1 to {min(32, self.experts)} (--experts; MegaMoE takes 32 at most)",
        )
        need(self.index_topk >= 1, "--index-topk", self.index_topk, "at least 1 (2048 on a GPU)")
        low = FIRST_SPECIAL + len(SPECIAL_TOKENS)
        need(
            self.vocab >= low and self.vocab % 64 == 0,
            "--vocab",
            self.vocab,
            f"a multiple of 64, at least {-(-low // 64) * 64} ({low} tokens have names)",
        )
        need(self.max_position > 0, "--max-position", self.max_position, "at least 1")
        need(0 <= self.seed < 2**63, "--seed", self.seed, "0 to 2**63 - 1")

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers that run their own indexer."""
        return tuple(i for i, kind in enumerate(self.indexer_types) if kind == "F")


def _multiple(flag: str, value: int, unit: int) -> None:
    if value <= 0 or value % unit:
        near = max(unit, round(value / unit) * unit)
        raise ShapeError(flag, value, f"a positive multiple of {unit} (the nearest is {near})")


def default_indexer_types(layers: int) -> str:
    """F S F S S F S S …: a full layer after a shared one, and one and two shared layers in a row."""
    return "".join("F" if i == 0 or (i >= 2 and (i - 2) % 3 == 0) else "S" for i in range(layers))


PRESETS: dict[str, Shape] = {
    # At least 500 tokens/s of reference prefill on two cores; prompts beyond 64 tokens are sparse.
    "cpu": Shape(),
    # The sizes of the GPU probes; its kernels select exactly 2048 (UPSTREAM: dsa_indexer topk kernels).
    "gpu": Shape(
        hidden=1024,
        heads=16,
        intermediate=1024,
        moe_intermediate=512,
        experts=16,
        index_topk=2048,
        max_position=65536,
    ),
}


def unquantised_modules(shape: Shape) -> list[str]:
    """Linear modules that an FP8 checkpoint keeps in bf16, as `modules_to_not_convert` lists them."""
    names = ["lm_head"]
    names += [f"model.layers.{i}.self_attn.indexer.weights_proj" for i in shape.full_layers]
    names += [f"model.layers.{i}.mlp.gate" for i in range(shape.dense_layers, shape.layers)]
    return names


def hf_config(shape: Shape, dtype: str) -> dict[str, Any]:
    """config.json: the fields of GLM-5.3's, with this shape's sizes. `dtype` is one of DTYPES."""
    sparse = shape.layers - shape.dense_layers
    config: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32" if dtype == "float32" else "bfloat16",
        "eos_token_id": [special_id(token) for token in EOS_TOKENS],
        "ep_size": 1,
        "first_k_dense_replace": shape.dense_layers,
        "head_dim": QK_ROPE_HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "index_head_dim": INDEX_HEAD_DIM,
        "index_n_heads": INDEX_N_HEADS,
        "index_topk": shape.index_topk,
        "indexer_rope_interleave": True,
        "indexer_types": ["full" if kind == "F" else "shared" for kind in shape.indexer_types],
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "kv_lora_rank": KV_LORA_RANK,
        "max_position_embeddings": shape.max_position,
        "mlp_layer_types": ["dense"] * shape.dense_layers + ["sparse"] * sparse,
        "moe_intermediate_size": shape.moe_intermediate,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": shape.heads,
        "num_experts_per_tok": shape.experts_per_token,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.heads,
        "num_nextn_predict_layers": 0,
        "pad_token_id": special_id(PAD_TOKEN),
        "pretraining_tp": 1,
        "q_lora_rank": shape.q_lora_rank,
        "qk_head_dim": QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM,
        "qk_nope_head_dim": QK_NOPE_HEAD_DIM,
        "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "transformers_version": "5.19.0",
        "use_cache": True,
        "v_head_dim": V_HEAD_DIM,
        "vocab_size": shape.vocab,
    }
    if dtype == "fp8":
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": unquantised_modules(shape),
            "quant_method": "fp8",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        }
    return config


def generation_config() -> dict[str, Any]:
    """generation_config.json. No sampling defaults: a request that names none is decoded as it asks, greedy
    at temperature 0.
    """
    return {
        "_from_model_config": True,
        "eos_token_id": [special_id(token) for token in EOS_TOKENS],
        "pad_token_id": special_id(PAD_TOKEN),
        "transformers_version": "5.19.0",
    }

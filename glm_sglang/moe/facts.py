"""What MegaMoE's refusals are decided from, as plain values: from a command line or from resolved arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: UPSTREAM: environ.Envs has it as the most tokens a rank may have; here, as the most it brings to one kernel call.
CAP_VARIABLE = "SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK"
DEFAULT_CAP = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The routed experts of a checkpoint; `block` is `weight_block_size`, None where it is not FP8."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    block: tuple[int, ...] | None
    dtype: str = "bfloat16"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Checkpoint:
        """From config.json's values. Raises KeyError for a config that isn't a GLM-5.x one."""
        quantised = config.get("quantization_config") or {}
        block = quantised.get("weight_block_size") if quantised.get("quant_method") == "fp8" else None
        return cls(
            hidden=int(config["hidden_size"]),
            intermediate=int(config["moe_intermediate_size"]),
            experts=int(config["n_routed_experts"]),
            top_k=int(config["num_experts_per_tok"]),
            block=None if block is None else tuple(int(n) for n in block),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One server's facts. `capability` is the device's, None on the reference platform.

    `flags` holds ServerArgs fields by name; absent ones have SGLang's default.
    """

    platform: str
    capability: tuple[int, int] | None
    checkpoint: Checkpoint
    flags: Mapping[str, Any]
    cap: int = DEFAULT_CAP

    def number(self, name: str, default: int = 1) -> int:
        """A flag's whole number; `default` where it is absent or None."""
        value = self.flags.get(name)
        return default if value is None else int(value)

    def on(self, name: str) -> bool:
        """Whether a switch or list is set."""
        return bool(self.flags.get(name))


#: The fields that `refusals` asks for.
FIELDS = (
    "attn_cp_size",
    "attn_dp_size",
    "chunked_prefill_size",
    "cp_strategy",
    "dtype",
    "elastic_ep_backend",
    "enable_eplb",
    "enable_lora",
    "enable_prefill_cp",
    "enable_single_batch_overlap",
    "enable_two_batch_overlap",
    "enable_w4a4_mxfp4_megamoe",
    "enable_waterfill",
    "ep_num_redundant_experts",
    "ep_size",
    "init_expert_location",
    "lora_paths",
    "moe_a2a_backend",
    "moe_dp_size",
    "nnodes",
    "pp_size",
    "speculative_algorithm",
    "tp_size",
)

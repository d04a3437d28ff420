"""What MegaMoE's refusals are decided from, as plain values: from a command line or from resolved arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: UPSTREAM: environ.Envs has it as the most tokens a rank may have; here, as the most it brings to one kernel call.
CAP_VARIABLE = "SGLANG_OPT_DEEPGEMM_MEGA_MOE_NUM_MAX_TOKENS_PER_RANK"
DEFAULT_CAP = 8192

# UPSTREAM: each DP rank then keeps its token count to itself.
SKIP_GATHER = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"
# UPSTREAM: True where unset, and of no effect on models of deepseek_v2.py, which set no mega_shared_l1_weights.
FUSE_SHARED = "SGLANG_OPT_DEEPGEMM_MEGA_MOE_FUSE_SHARED_EXPERTS"
_TRUE = ("true", "1", "yes", "y")  # UPSTREAM: environ.EnvBool


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

    `flags` holds ServerArgs fields by name; absent ones have SGLang's default. `variables` holds SGLang's environment
    variables of VARIABLES, where they are set.
    """

    platform: str
    capability: tuple[int, int] | None
    checkpoint: Checkpoint
    flags: Mapping[str, Any]
    cap: int = DEFAULT_CAP
    variables: Mapping[str, str] = field(default_factory=dict)

    def number(self, name: str, default: int = 1) -> int:
        """A flag's whole number; `default` where it is absent or None."""
        value = self.flags.get(name)
        return default if value is None else int(value)

    def on(self, name: str) -> bool:
        """Whether a switch or list is set."""
        return bool(self.flags.get(name))

    def true(self, variable: str) -> bool:
        """Whether an environment variable is set to one of SGLang's words for true."""
        return self.variables.get(variable, "").lower() in _TRUE

    def ranks(self) -> int:
        """Ranks that the experts are spread over: all of --tp-size."""
        return self.number("tp_size")

    def attention_dp(self) -> tuple[int, str]:
        """Attention-DP groups, and what the user said to get them ("" for one group).

        UPSTREAM: handle_deprecated_dp_attention and context_parallel_attn_dp_size read --dp-size as attention DP.
        """
        size, replicas = self.number("attn_dp_size"), self.number("dp_size")
        if size > 1:
            return size, f"--attn-dp-size is {size}"
        for switch in ("enable_dp_attention", "enable_prefill_cp"):
            if replicas > 1 and self.on(switch):
                return replicas, f"--dp-size is {replicas} (attention DP by --{switch.replace('_', '-')})"
        return 1, ""


#: The fields that `refusals` asks for, with whole numbers as values…
NUMBERS = (
    "attn_cp_size",
    "attn_dp_size",
    "cpu_offload_gb",
    "dp_size",
    "dwdp_size",
    "ep_num_redundant_experts",
    "ep_size",
    "moe_dp_size",
    "nnodes",
    "offload_group_size",
    "pp_size",
    "tp_size",
)
#: …and all of them.
FIELDS = (
    *NUMBERS,
    "cp_strategy",
    "disable_shared_experts_fusion",
    "dtype",
    "elastic_ep_backend",
    "enable_dp_attention",
    "enable_eplb",
    "enable_lora",
    "enable_paged_experts",
    "enable_prefill_cp",
    "enable_single_batch_overlap",
    "enable_two_batch_overlap",
    "enable_w4a4_mxfp4_megamoe",
    "enable_waterfill",
    "enforce_shared_experts_fusion",
    "init_expert_location",
    "load_format",
    "lora_paths",
    "moe_a2a_backend",
    "remote_instance_weight_loader_start_seed_via_transfer_engine",
    "speculative_algorithm",
    "weight_cache_mode",
)
#: The environment variables that it asks for.
VARIABLES = (SKIP_GATHER, FUSE_SHARED)

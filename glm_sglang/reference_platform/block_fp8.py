"""FP8 128×128-block checkpoints: loaded as FP8 values and block scales, dequantised once, then run unquantised.

E4M3 values are exact in bf16 and fp32, so weights are created in the model's dtype and the loader's copy is exact; the
block scales load beside them through SGLang's own sharding, and are multiplied in after loading.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE, FusedMoeWeightScaleSupported
from sglang.srt.layers.parameter import BlockQuantScaleParameter, ModelWeightParameter
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.layers.quantization.utils import is_layer_skipped
from sglang.srt.utils import set_weight_attrs

BLOCK = 128


def dequantise_blocks(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """values [..., n, k] holding E4M3 numbers, scales [..., ⌈n/128⌉, ⌈k/128⌉] fp32 → values · scales in values' dtype."""
    n, k = values.shape[-2:]
    expanded = scales.repeat_interleave(BLOCK, -2)[..., :n, :].repeat_interleave(BLOCK, -1)[..., :k]
    return (values.float() * expanded).to(values.dtype)


class ReferenceFp8Config(QuantizationConfig):  # type: ignore[misc]
    """quantization_config of a GLM-5.x FP8 checkpoint."""

    def __init__(self, ignored_layers: list[str]) -> None:
        super().__init__()
        self.ignored_layers = ignored_layers
        self.weight_block_size = [BLOCK, BLOCK]

    @classmethod
    def get_name(cls) -> str:
        return "fp8"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ReferenceFp8Config:
        """Raises ValueError where the checkpoint's blocks are not 128×128."""
        block = config.get("weight_block_size")
        if block != [BLOCK, BLOCK]:
            raise ValueError(
                f"quantization_config.weight_block_size is {block}; the reference platform reads [128, 128] only"
            )
        return cls(cls.get_from_keys_or(config, ["ignored_layers", "modules_to_not_convert"], None) or [])

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            if is_layer_skipped(prefix, self.ignored_layers, fused_mapping=self.packed_modules_mapping):
                return UnquantizedLinearMethod()
            return ReferenceFp8LinearMethod(self)
        if isinstance(layer, FusedMoE):
            return ReferenceFp8MoEMethod(self)
        return None

    def get_scaled_act_names(self) -> list[str]:
        return []


class ReferenceFp8LinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """A linear layer whose weight is `weight · weight_scale_inv` by block.

    UPSTREAM: linear.WEIGHT_LOADER_V2_SUPPORTED names, by class name, the methods whose block scales are sharded; this
    room's registration adds this class.
    """

    def __init__(self, quant_config: ReferenceFp8Config) -> None:
        super().__init__()
        self.quant_config = quant_config

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        def parameter(cls: type, rows: int, columns: int, dtype: torch.dtype) -> Any:
            data = torch.ones(rows, columns, dtype=dtype)
            return cls(data=data, input_dim=1, output_dim=0, weight_loader=extra["weight_loader"])

        rows = sum(output_partition_sizes)
        layer.register_parameter(
            "weight", parameter(ModelWeightParameter, rows, input_size_per_partition, params_dtype)
        )
        rows, columns = (
            sum(-(-n // BLOCK) for n in output_partition_sizes),
            -(-input_size_per_partition // BLOCK),
        )
        layer.register_parameter(
            "weight_scale_inv", parameter(BlockQuantScaleParameter, rows, columns, torch.float32)
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight.data = dequantise_blocks(layer.weight.data, layer.weight_scale_inv.data)
        layer.weight_scale_inv.data.fill_(1.0)


class ReferenceFp8MoEMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """Experts whose weights carry block scales."""

    def __init__(self, quant_config: ReferenceFp8Config) -> None:
        super().__init__()
        self.quant_config = quant_config

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        if intermediate_size_per_partition % BLOCK:
            raise ValueError(
                f"moe_intermediate_size per rank is {intermediate_size_per_partition}, not a multiple of {BLOCK}; "
                "lower --tp or use --ep-size so that an expert is not split"
            )
        super().create_weights(
            layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra
        )
        width, hidden = -(-intermediate_size_per_partition // BLOCK), -(-hidden_size // BLOCK)
        for name, shape in (("w13", (2 * width, hidden)), ("w2", (hidden, width))):
            scale = torch.nn.Parameter(torch.ones(num_experts, *shape), requires_grad=False)
            layer.register_parameter(f"{name}_weight_scale_inv", scale)
            set_weight_attrs(scale, {**extra, "quant_method": FusedMoeWeightScaleSupported.BLOCK.value})

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        for name in ("w13", "w2"):
            weight, scale = getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale_inv")
            for expert in range(weight.shape[0]):
                weight.data[expert] = dequantise_blocks(weight.data[expert], scale.data[expert])
            scale.data.fill_(1.0)

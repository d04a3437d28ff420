"""The platform class that SGLang asks for everything device-dependent."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from glm_sglang.reference_platform import defaults

if TYPE_CHECKING:
    from sglang.srt.layers.quantization.base_config import QuantizationConfig

#: Key under which this room's forwards are registered with SGLang's BaseFusedOp; ops without one run forward_native.
DISPATCH_KEY = "glm_reference"


class ReferencePlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """CPU, PyTorch only. Out of tree, so SGLang neither imports its CPU kernels nor expects CUDA."""

    _enum = PlatformEnum.OOT
    device_name = "glm-reference"
    device_type = "cpu"
    supported_quantization = ["fp8"]  # noqa: RUF012 (a class attribute of SRTPlatform)
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        """Sets, where the user has not, what SGLang's child processes inherit."""
        # UPSTREAM: TokenizerManager waits a minute for CUDA core dumps before it ends a server whose scheduler died.
        os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "false")
        # UPSTREAM: a few small functions (topk.py, sampler.py) are torch.compile'd; on a CPU that is a C++ compiler's run
        # of half a minute in the first request.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fills what the user left open; a switch has no third state, so one that is off counts as open."""
        for name, value in defaults.server_args_defaults().items():
            if name != "attention_backend" and getattr(server_args, name) in (None, False):
                setattr(server_args, name, value)
        if server_args.dtype == "auto" and (exact := defaults.exact_dtype(server_args.model_path)):
            server_args.dtype = exact

    def get_default_attention_backend(self) -> str:
        return defaults.ATTENTION_BACKEND

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def get_dispatch_key_name(self) -> str:
        return DISPATCH_KEY

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """The DSA pool that keeps index keys exactly, unless GLM_SGLANG_INDEX_KEYS=fp8 asks for the GPU's layout."""
        if kind != "dsa":
            return None
        from glm_sglang.reference_platform.index_keys import ReferenceDSATokenToKVPool

        return ReferenceDSATokenToKVPool

    def get_quantization_config(self, quantization: str) -> type[QuantizationConfig] | None:
        """FP8 block weights, dequantised once after loading. Raises ValueError for any other format."""
        if quantization != "fp8":
            raise ValueError(
                f"quantization {quantization!r} does not run on the reference platform; allowed: fp8 with "
                "weight_block_size [128, 128], or an unquantised checkpoint"
            )
        from glm_sglang.reference_platform.block_fp8 import ReferenceFp8Config

        return ReferenceFp8Config

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Derives the absorbed MLA weights again, now from dequantised kv_b_proj.

        UPSTREAM: DeepseekV2WeightLoaderMixin.post_load_weights runs before process_weights_after_loading, when an FP8
        kv_b_proj holds unscaled values.
        """
        if getattr(model, "quant_config", None) is not None:
            model.post_load_weights()  # type: ignore[operator]

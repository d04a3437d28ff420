"""The functions behind this room's hooks: places where SGLang's GLM path asks a question only CUDA can answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from glm_sglang.reference_platform.defaults import ATTENTION_BACKEND, checkpoint_config


@contextmanager
def _no_device_capability() -> Iterator[None]:
    """torch.cuda.get_device_capability answers (0, 0) inside, instead of raising where there is no CUDA."""
    asked = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: (0, 0)
    try:
        yield
    finally:
        torch.cuda.get_device_capability = asked


def model_adjustments(original: Callable[[Any], None], server_args: Any) -> None:
    """Around handle_model_specific_adjustments. UPSTREAM: it reads the CUDA capability of DSA models unguarded."""
    with _no_device_capability():
        original(server_args)


def choose_backend(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around the resolution step handle_cpu_backends: MLA + DSA models attend with this room's backend.

    UPSTREAM: for device cpu that step names intel_amx, whose kernels are in no registry's package. Other models get
    torch_native. An explicit --attention-backend stays.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    if view.tp_size > 1:
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", cores_of_ranks(view.tp_size))
    chosen = view.attention_backend
    previous(server_args)
    if chosen is None and view.device == "cpu":
        architectures = checkpoint_config(view.model_path).get("architectures", ())
        backend = ATTENTION_BACKEND if "GlmMoeDsaForCausalLM" in architectures else "torch_native"
        declare_resolution(server_args, "glm_sglang.reference_platform", attention_backend=backend)


def cores_of_ranks(ranks: int) -> str:
    """This process's cores dealt out to `ranks` ranks, as SGLang reads them: "0,1|2,3".

    UPSTREAM: ModelRunner.init_threads_binding asserts a NUMA node for every rank unless the variable names the cores.
    With fewer cores than ranks, ranks share them.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    groups = [[cores[(rank * share + i) % len(cores)] for i in range(share)] for rank in range(ranks)]
    return "|".join(",".join(map(str, group)) for group in groups)


def kv_cache_dtype(view: Any) -> dict[str, Any]:
    """For _dsa_kv_cache_dtype_default: the pool keeps the model's dtype. Raises ValueError for a quantised one."""
    if view.kv_cache_dtype not in ("auto", "bf16", "bfloat16"):
        raise ValueError(
            f"--kv-cache-dtype {view.kv_cache_dtype} does not run on the reference platform; allowed: auto, bfloat16"
        )
    return {}


def split_backends(view: Any) -> dict[str, Any]:
    """For _dsa_split_backend_resolution: there is one attention backend here and no split."""
    return {}


def rope_wrapper(original: Callable[..., Any], *args: Any, device: str | None = None, **kwargs: Any) -> Any:
    """Around get_rope_wrapper. UPSTREAM: for device "cpu" it takes a path that knows deepseek_yarn only."""
    return original(*args, device=None if device == "cpu" else device, **kwargs)


def indexer_precision(result: Any, self: Any, *_: Any, **__: Any) -> None:
    """After Indexer.__init__: head weights in the model's dtype. UPSTREAM: weights_proj is bf16 whatever the model is."""
    self.weights_proj.weight.data = self.weights_proj.weight.data.to(torch.get_default_dtype())


def register_resolution() -> None:
    """Puts `choose_backend` into SGLang's argument resolution."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_cpu_backends")(choose_backend)


def resolution_registered() -> bool:
    """Whether `register_resolution` is in effect."""
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS

    return choose_backend in _HOOKS.get("handle_cpu_backends", ())


def register_backend() -> None:
    """Makes `--attention-backend glm_reference` known to the flag, to the factory, and to the MLA dispatch."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.layers.linear import WEIGHT_LOADER_V2_SUPPORTED
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    from sglang.srt.server_args import add_attention_backend_choices

    from glm_sglang.reference_platform import experts, indexer
    from glm_sglang.reference_platform.attention import ReferenceMlaBackend
    from glm_sglang.reference_platform.block_fp8 import ReferenceFp8LinearMethod, ReferenceFp8MoEMethod
    from glm_sglang.reference_platform.platform import DISPATCH_KEY

    add_attention_backend_choices([ATTENTION_BACKEND])
    register_attention_backend(ATTENTION_BACKEND)(ReferenceMlaBackend)
    WEIGHT_LOADER_V2_SUPPORTED.append(ReferenceFp8LinearMethod.__name__)
    AttentionBackendRegistry.register(ATTENTION_BACKEND, lambda attn, batch: AttnForwardMethod.MLA)
    BaseFusedOp.register_oot_forward(Indexer, indexer.forward, DISPATCH_KEY)
    for method in (UnquantizedFusedMoEMethod, ReferenceFp8MoEMethod):
        BaseFusedOp.register_oot_forward(method, experts.moe_forward, DISPATCH_KEY)


def backend_registered() -> bool:
    """Whether everything in `register_backend` is in place."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    from glm_sglang.reference_platform import indexer
    from glm_sglang.reference_platform.platform import DISPATCH_KEY

    return (
        ATTENTION_BACKEND in ATTENTION_BACKEND_CHOICES
        and ATTENTION_BACKEND in ATTENTION_BACKENDS
        and ATTENTION_BACKEND in AttentionBackendRegistry._handlers
        and BaseFusedOp._oot_forward_registry.get(DISPATCH_KEY, {}).get(Indexer) is indexer.forward
    )

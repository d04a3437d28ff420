"""Keys of dense attention: the reference by definition, the kernel against it in Triton's interpreter, the hook on
SGLang's own method."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from glm_kernels.concat_mha_k import concat_mha_k, concat_mha_k_reference
from glm_kernels.concat_mha_k.kernel import _concat
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from glm_sglang.attention import hooks, keys


def test_the_reference_by_definition() -> None:
    k_nope = torch.arange(2 * 3 * 8).view(2, 3, 8).bfloat16()
    k_pe = -torch.arange(2 * 8).view(2, 1, 8).bfloat16()
    got = concat_mha_k_reference(k_nope, k_pe)
    for token in range(2):
        for head in range(3):
            assert got[token, head, :8].tolist() == [8.0 * (3 * token + head) + d for d in range(8)]
            assert got[token, head, 8:].tolist() == [-(8.0 * token + d) for d in range(8)]


def test_the_kernel_and_the_hook_equal_reference_and_upstream_in_the_interpreter() -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    script = Path(__file__).with_name("interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # 5 sizes × 4 token counts × 3 gaps, and two of other strides
    assert done.stdout.splitlines()[-1] == "62 and the hook"


@pytest.mark.parametrize("heads", [8, 64])
def test_glms_keys_move_in_16_byte_accesses_for_hopper(heads: int) -> None:
    """All loads before the first store; what a program writes is its threads' stores of 16 bytes, no more."""
    block = min(32, heads)
    constants = {"H": heads, "DN": 192, "DR": 64, "UNIT": 8, "HEADS": block, "WIDE": 256}
    tensors = dict.fromkeys(("k", "k_nope", "k_pe"), "*bf16")
    strides = dict.fromkeys(("nope_token", "nope_head", "pe_token"), "i32")
    source = ASTSource(
        fn=_concat,
        signature=tensors | strides | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in range(3)},
    )
    text = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    found = re.findall(r"(?:ld|st)\.global\S*", text)
    stores = block * 256 * 2 // 16 // 128
    assert [line[:2] for line in found] == ["ld"] * (2 * stores) + ["st"] * stores
    assert all(".v4.b32" in line for line in found)


A, PE = torch.zeros(2, 3, 24).bfloat16(), torch.zeros(2, 1, 8).bfloat16()


@pytest.mark.parametrize(
    ("k_nope", "k_pe", "message"),
    [
        (A.float(), PE, "dtypes are torch.float32"),
        (A, PE[:1], r"\[T, 1, Dr\]"),
        (A, PE[:, 0], r"\[T, 1, Dr\]"),
        (A[..., :20], PE, "widths are 20 and 8"),
        (A, PE[..., :0], "widths are 24 and 0"),
        (A.transpose(1, 2)[:, :, :0], PE, "widths are 0"),
        (A.expand(2, 3, 24)[..., ::3], PE, "strides in a head are 3"),
        (A, PE.to("meta"), "devices"),
    ],
)
def test_what_is_no_pair_of_parts_is_refused(k_nope: torch.Tensor, k_pe: torch.Tensor, message: str) -> None:
    for function in (concat_mha_k, concat_mha_k_reference):
        with pytest.raises(ValueError, match=message):
            function(k_nope, k_pe)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((128, 128, 64), torch.bfloat16),  # concat_mla_k's
        ((64, 128, 64), torch.bfloat16),  # concat_and_cast_mha_k_triton's, which may cast
        ((64, 192, 0), torch.bfloat16),  # no rope
        ((64, 192, 64), torch.float16),
    ],
)
def test_what_upstreams_kernels_take_stays_theirs(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    heads, nope, rope = sizes
    of = SimpleNamespace(num_local_heads=heads, qk_nope_head_dim=nope, qk_rope_head_dim=rope)
    k_nope, k_pe = torch.zeros(1, heads, nope, dtype=dtype), torch.zeros(1, 1, rope, dtype=dtype)

    def original(*args: Any) -> tuple[Any, ...]:
        return args

    assert keys.concat_mha_k(original, of, k_nope, k_pe, "batch") == (of, k_nope, k_pe, "batch")


def test_the_hook_takes_what_upstreams_method_is_given() -> None:
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha import (
        DeepseekMHAForwardMixin,
    )

    (hook,) = hooks.HOOKS
    upstream = inspect.signature(DeepseekMHAForwardMixin._concat_and_cast_mha_k)
    assert hook.target.endswith(f".{DeepseekMHAForwardMixin._concat_and_cast_mha_k.__qualname__}")
    assert [*upstream.parameters] == ["self", "k_nope", "k_pe", "forward_batch"]
    assert len(inspect.signature(keys.concat_mha_k).parameters) == len(upstream.parameters) + 1


def test_the_hook_goes_in_on_a_gpu_and_reaches_the_models_attention() -> None:
    """In a process of its own: the change stays."""
    script = """
from types import SimpleNamespace
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from glm_sglang.upstream import install, rooms
hooks = [hook for hook in rooms.active(rooms.hooks(), "cuda", "launcher") if "_concat_and_cast" in hook.target]
originals = {hook.target: install._original(hook, tested=True) for hook in hooks}
for hook in hooks:
    function = install.load(hook.function, hook.why)
    HookRegistry.register(hook.target, function, HookType(hook.kind))
HookRegistry.apply_hooks()
install._verify(hooks[0], function)
from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA
install._verify_no_stale_binding(originals)
assert install.carries(DeepseekV2AttentionMLA._concat_and_cast_mha_k, function)
print(len(hooks), "in place")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "1 in place"

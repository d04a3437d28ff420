"""What the attention room changes in SGLang."""

from __future__ import annotations

from glm_sglang.upstream.hooks import Hook

_FORWARD = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha"

HOOKS: tuple[Hook, ...] = (
    Hook(
        target=f"{_FORWARD}.DeepseekMHAForwardMixin._concat_and_cast_mha_k",
        kind="around",
        function="glm_sglang.attention.keys:concat_mha_k",
        why="with widths that are no powers of two keys are assembled by two strided copies a layer",
        remove_when="SGLang's concat_and_cast_mha_k_triton takes any width",
        also=(
            f"{_FORWARD}.DeepseekMHAForwardMixin.forward_normal_prepare",
            "sglang.srt.utils.common.next_power_of_2",
        ),
        platform="cuda",
    ),
)

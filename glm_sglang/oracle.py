"""What GLM should answer: transformers' `GlmMoeDsaForCausalLM` on the same weights, eager PyTorch on the CPU.

The oracle shares no code with SGLang or with the reference platform. FP8 checkpoints are dequantised first.
It computes in float32 unless told otherwise, for bf16 and FP8 checkpoints too: a server's rounding is then
compared with the exact answer and not with another rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, DynamicCache, GlmMoeDsaForCausalLM

from glm_sglang.tiny_model.quantise import FP8_MAX, dequantise


class OracleError(RuntimeError):
    """The checkpoint is not one that the oracle can run; says what was found and what is allowed."""


@dataclass(frozen=True)
class Verdict:
    """What the oracle makes of a prompt of n tokens and m tokens given after it. Logprobs are natural."""

    # Of prompt token i given those before it; the first is None, as in SGLang's answers. Length n.
    input_logprobs: list[float | None]
    # Of each given token. Length m.
    output_logprobs: list[float]
    # The oracle's own choice at each of the m places, given the tokens before it; ties go to the smaller id.
    best: list[int]
    # Logit of `best` less that of the given token: 0 where they agree.
    deficits: list[float]


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors as stored. Raises OracleError when `folder` has no safetensors file."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        make = f"python -m glm_sglang.tiny_model {folder}"
        raise OracleError(f"{folder} has no *.safetensors file; it must be a checkpoint ({make})")
    state: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            state.update({name: tensors.get_tensor(name) for name in tensors.keys()})  # noqa: SIM118
    return state


def fuse_experts(state: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """Stacks per-expert tensors as transformers keeps them: gate_up_proj [E, 2I, H], gate first; down_proj
    [E, H, I].
    """
    fused = {name: tensor for name, tensor in state.items() if ".mlp.experts." not in name}
    for prefix in sorted({name.partition(".experts.")[0] for name in state if ".mlp.experts." in name}):

        def part(expert: int, name: str, prefix: str = prefix) -> torch.Tensor:
            return state[f"{prefix}.experts.{expert}.{name}.weight"]

        pairs = [torch.cat([part(e, "gate_proj"), part(e, "up_proj")]) for e in range(experts)]
        fused[f"{prefix}.experts.gate_up_proj"] = torch.stack(pairs)
        fused[f"{prefix}.experts.down_proj"] = torch.stack([part(e, "down_proj") for e in range(experts)])
    return fused


def fp8_round_trip(keys: torch.Tensor) -> torch.Tensor:
    """Index keys [..., 128] as a GPU's index cache returns them: E4M3 with one fp32 scale a row (132 bytes).

    UPSTREAM: dsa/fused_store_index_cache.cuh: scale = max(amax, 1e-4) / 448.
    """
    scale = keys.float().abs().amax(-1, keepdim=True).clamp_min(1e-4) / FP8_MAX
    return ((keys.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(keys.dtype)


class Fp8IndexCache(DynamicCache):  # type: ignore[misc]
    """transformers' cache, with index keys rounded as a GPU stores them."""

    def update_indexer(self, key_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Stores the rounded keys [batch, new, 128]; returns all keys so far."""
        return super().update_indexer(fp8_round_trip(key_states), layer_idx, *args, **kwargs)


class Oracle:
    """transformers' model of one checkpoint."""

    def __init__(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Loads `folder`; `dtype` is the arithmetic's. Raises OracleError for another architecture or odd
        tensors.
        """
        folder = Path(folder)
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if config.architectures != ["GlmMoeDsaForCausalLM"]:
            raise OracleError(
                f"{folder} is {config.architectures}; it must be a GlmMoeDsaForCausalLM checkpoint"
            )
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        self.config = config
        with torch.device("meta"):
            model = GlmMoeDsaForCausalLM(config)
        state = fuse_experts(dequantise(load_tensors(folder)), config.n_routed_experts)
        # UPSTREAM: GlmMoeDsaPreTrainedModel._keep_in_fp32_modules and _keep_in_fp32_modules_strict.
        exact = ("e_score_correction_bias", "indexer.weights_proj.weight")
        state = {name: t.to(torch.float32 if name.endswith(exact) else dtype) for name, t in state.items()}
        try:
            model.load_state_dict(state, strict=True, assign=True)
        except RuntimeError as error:
            raise OracleError(f"{folder}: the tensors don't fit config.json: {error}") from None
        # RoPE's frequencies are in no checkpoint, so they are still on the meta device.
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        self.model = model.eval()

    def cache(self) -> Any:
        """An empty cache for `logits`."""
        return DynamicCache(config=self.config)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], cache: Any | None = None) -> torch.Tensor:
        """Float32 logits [len(tokens), vocab] of tokens that start a sequence, or that continue the one in
        `cache`.
        """
        ids = torch.tensor([list(tokens)], dtype=torch.long)
        logits = self.model(input_ids=ids, past_key_values=cache, use_cache=cache is not None).logits
        return torch.as_tensor(logits[0]).float()

    def greedy(self, prompt: Sequence[int], new_tokens: int = 8) -> list[int]:
        """Greedy continuation of `prompt` (at least one token), with no stop token; ties go to the smaller
        id.
        """
        if not prompt:
            raise ValueError("the prompt is empty; it must have at least one token")
        cache = self.cache()
        tokens = [int(self.logits(prompt, cache)[-1].argmax())]
        while len(tokens) < new_tokens:
            tokens.append(int(self.logits(tokens[-1:], cache)[-1].argmax()))
        return tokens

    def judge(self, prompt: Sequence[int], given: Sequence[int] = ()) -> Verdict:
        """Scores `prompt` (at least one token) and the `given` tokens after it in one forward pass."""
        if not prompt:
            raise ValueError("the prompt is empty; it must have at least one token")
        sequence = [*prompt, *given]
        logits = self.logits(sequence)
        logprobs = logits.log_softmax(-1)[:-1]
        own = logprobs.gather(1, torch.tensor(sequence[1:], dtype=torch.long)[:, None])[:, 0].tolist()
        places = logits[len(prompt) - 1 : len(sequence) - 1]
        best = places.argmax(-1)
        chosen = torch.tensor(list(given), dtype=torch.long)
        deficits = places.gather(1, best[:, None]) - places.gather(1, chosen[:, None])
        split = len(prompt) - 1
        return Verdict([None, *own[:split]], own[split:], best.tolist(), deficits[:, 0].tolist())

    @torch.inference_mode()
    def selections(self, tokens: Sequence[int], cache: Any | None = None) -> dict[int, torch.Tensor]:
        """What each full layer's indexer selects: layer -> [len(tokens), min(index_topk, length)] positions.

        A row that sees fewer tokens than that is filled up with positions it cannot see, which attention
        masks.
        """
        chosen: dict[int, torch.Tensor] = {}
        layers = [(i, layer.self_attn.indexer) for i, layer in enumerate(self.model.model.layers)]
        handles = []
        for index, indexer in layers:
            if indexer is not None:

                def keep(_module: Any, _args: Any, output: torch.Tensor, index: int = index) -> None:
                    chosen[index] = output[0]

                handles.append(indexer.register_forward_hook(keep))
        try:
            self.logits(tokens, self.cache() if cache is None else cache)
        finally:
            for handle in handles:
                handle.remove()
        return chosen

    def share_of_topk(self, tokens: Sequence[int]) -> dict[int, float]:
        """Share of each full layer's selection that FP8 index keys change, over the rows that must choose.

        Raises ValueError when no row sees more than index_topk tokens. Layers after the first also feel what
        the changed selections before them did to their input.
        """
        topk = self.config.index_topk
        if len(tokens) <= topk:
            raise ValueError(f"{len(tokens)} tokens; it must be more than index_topk ({topk})")
        exact = self.selections(tokens)
        rounded = self.selections(tokens, Fp8IndexCache(config=self.config))
        shares = {}
        for layer, rows in exact.items():
            marks = [torch.zeros(len(tokens), len(tokens), dtype=torch.bool) for _ in range(2)]
            for mark, chosen in zip(marks, (rows, rounded[layer]), strict=True):
                mark.scatter_(1, chosen.long(), True)
            lost = (marks[0] & ~marks[1])[topk:].sum()
            shares[layer] = float(lost) / (topk * (len(tokens) - topk))
        return shares

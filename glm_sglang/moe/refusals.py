"""What MegaMoE cannot do, found before weights load; each sentence names the flag to change.

Pure: facts in, sentences out. Asked twice: by the launcher, which picks a path, and after SGLang has resolved its
arguments, when every value is final.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from glm_kernels.mega_moe.buffer import SM90_TOKEN_ALIGNMENT
from glm_kernels.mega_moe.limits import Arch, check_shape

from glm_sglang.moe.facts import CAP_VARIABLE, Facts

BACKEND = "--moe-a2a-backend"
STOCK = "use --glm-moe stock"
BLOCK = (128, 128)

# UPSTREAM: SM103 runs the SM100 kernel.
ARCHS: dict[tuple[int, int], Arch] = {(9, 0): Arch.SM90, (10, 0): Arch.SM100, (10, 3): Arch.SM100}
VERIFIED: tuple[tuple[int, int], ...] = ((9, 0),)
"""Compute capabilities whose kernel ran and was compared with the reference."""


def find(facts: Facts) -> list[str]:
    """Every reason why MegaMoE cannot serve these facts; empty where it can."""
    return [sentence for rule in RULES for sentence in rule(facts)]


def _parallelism(facts: Facts) -> Iterator[str]:
    ranks = facts.number("tp_size")
    if ranks < 2:
        yield f"--tp-size is {ranks}: MegaMoE spreads experts over the ranks of one --tp-size, at least 2"
    ep = facts.number("ep_size")
    if ep not in (1, ranks):  # 1: not given; SGLang makes it --tp-size
        yield f"--ep-size is {ep}; MegaMoE spreads experts over all ranks: leave it out or give --tp-size, {ranks}"
    if facts.number("moe_dp_size") > 1:
        yield f"--moe-dp-size is {facts.flags['moe_dp_size']}; allowed with {BACKEND} megamoe: 1"
    if facts.platform == "cuda" and facts.number("nnodes") > 1:
        yield (
            f"--nnodes is {facts.flags['nnodes']}; the kernel reads its peers' memory over NVLink: keep --tp-size "
            f"within one node (--nnodes 1), or {STOCK}"
        )


def _checkpoint(facts: Facts) -> Iterator[str]:
    checkpoint = facts.checkpoint
    if facts.platform == "cuda":
        if facts.capability not in ARCHS:
            found = "none" if facts.capability is None else "SM{}{}".format(*facts.capability)
            yield f"the GPU is {found}; MegaMoE has kernels for SM90, SM100 and SM103: {STOCK}"
            return
        if checkpoint.block != BLOCK:
            found = "no FP8" if checkpoint.block is None else f"FP8 in blocks of {list(checkpoint.block)}"
            yield f"--model-path: {found} checkpoint; MegaMoE takes FP8 in blocks of {list(BLOCK)}: {STOCK}"
        dtype = str(facts.flags.get("dtype") or "auto")
        if dtype not in ("auto", "bfloat16"):
            yield f"--dtype is {dtype}; allowed with {BACKEND} megamoe: auto, bfloat16"
        try:
            check_shape(
                ARCHS[facts.capability],
                hidden=checkpoint.hidden,
                intermediate=checkpoint.intermediate,
                experts=checkpoint.experts,
                ranks=max(1, facts.number("tp_size")),
                top_k=checkpoint.top_k,
            )
        except ValueError as error:
            yield str(error)
        if facts.cap < SM90_TOKEN_ALIGNMENT:
            yield f"{CAP_VARIABLE} is {facts.cap}, allowed: {SM90_TOKEN_ALIGNMENT} (the kernel's alignment) or more"
    elif checkpoint.experts % max(1, facts.number("tp_size")):
        yield f"n_routed_experts is {checkpoint.experts}; it must be a multiple of --tp-size, {facts.number('tp_size')}"
    if facts.cap < 1:
        yield f"{CAP_VARIABLE} is {facts.cap}, allowed: 1 or more"


def _context_parallelism(facts: Facts) -> Iterator[str]:
    if facts.on("enable_prefill_cp") and facts.flags.get("cp_strategy") == "zigzag":
        # UPSTREAM: model_overrides/deepseek_v2.py rewrites the backend to deepep for zigzag.
        yield "--cp-strategy is zigzag, with which SGLang runs DeepEP; allowed with MegaMoE: interleave"
    if facts.on("enable_prefill_cp") and facts.number("attn_dp_size") > 1:
        yield (
            f"--attn-dp-size is {facts.flags['attn_dp_size']} beside --enable-prefill-cp; a shard's padded size is not "
            f"known on the other DP ranks: give one of them, or {STOCK}"
        )


def _overlap(facts: Facts) -> Iterator[str]:
    for field in ("enable_two_batch_overlap", "enable_single_batch_overlap"):
        if facts.on(field):
            yield f"--{field.replace('_', '-')} is on; the fused kernel has no halves to overlap: leave it out"


def _experts_that_move(facts: Facts) -> Iterator[str]:
    for field in ("enable_eplb", "enable_waterfill", "enable_w4a4_mxfp4_megamoe", "elastic_ep_backend"):
        if facts.on(field):
            yield f"--{field.replace('_', '-')} does not work with MegaMoE's FP8 experts: leave it out, or {STOCK}"
    redundant = facts.number("ep_num_redundant_experts", 0)
    if redundant:
        yield f"--ep-num-redundant-experts is {redundant}; allowed with MegaMoE's FP8 experts: 0"
    location = facts.flags.get("init_expert_location") or "trivial"
    if location != "trivial":
        yield f"--init-expert-location is {location}; allowed with MegaMoE's FP8 experts: trivial"


def _adapters_and_drafts(facts: Facts) -> Iterator[str]:
    if facts.on("enable_lora") or facts.on("lora_paths"):
        yield f"--enable-lora: the fused kernel bypasses adapters: leave it and --lora-paths out, or {STOCK}"
    if facts.on("speculative_algorithm"):
        yield (
            f"--speculative-algorithm is {facts.flags['speculative_algorithm']}; a draft model's MoE layers were never "
            f"tried with MegaMoE: leave it out, or {STOCK}"
        )


RULES: tuple[Callable[[Facts], Iterator[str]], ...] = (
    _parallelism,
    _checkpoint,
    _context_parallelism,
    _overlap,
    _experts_that_move,
    _adapters_and_drafts,
)

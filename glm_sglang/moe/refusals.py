"""What MegaMoE cannot do, found before weights load; each sentence names the flag to change.

Pure: facts in, sentences out. Asked twice: by the launcher, which picks a path, and after SGLang has resolved its
arguments, when every value is final.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from glm_kernels.mega_moe.buffer import SM90_TOKEN_ALIGNMENT
from glm_kernels.mega_moe.limits import Arch, check_shape

from glm_sglang.moe.facts import CAP_VARIABLE, FUSE_SHARED, SKIP_GATHER, Facts

BACKEND = "--moe-a2a-backend"
STOCK = "use --glm-moe stock"
BLOCK = (128, 128)

# UPSTREAM: SM103 runs the SM100 kernel.
ARCHS: dict[tuple[int, int], Arch] = {(9, 0): Arch.SM90, (10, 0): Arch.SM100, (10, 3): Arch.SM100}
MEASURED: dict[tuple[int, int], tuple[int, ...]] = {(9, 0): (2,)}
"""EP sizes by compute capability with which a server ran, its answers compared and its speed measured.

benchmarks/results/h200x2: moe_layer, moe_server, moe_server_layouts, eight_gpus.
"""

LOAD_FORMATS = (
    "auto",
    "dummy",
    "fastsafetensors",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "safetensors",
)
"""Load formats whose loader arranges weights after it has all their bytes.

UPSTREAM: get_model_loader gives DefaultModelLoader, DummyModelLoader or RunaiModelStreamerLoader for these. Others call
process_weights_after_loading on an empty model and copy over it (sharded_state, presharded, remote, remote_instance),
never call it (layered), or hold other weights than FP8 blocks.
"""


def find(facts: Facts) -> list[str]:
    """Every reason why MegaMoE cannot serve these facts; empty where it can."""
    return [sentence for rule in RULES for sentence in rule(facts)]


def _parallelism(facts: Facts) -> Iterator[str]:
    ranks = facts.ranks()
    if ranks < 2:
        yield f"--tp-size is {ranks}: MegaMoE spreads experts over the ranks of one --tp-size, at least 2"
    ep = facts.number("ep_size")
    if ep not in (1, ranks):  # 1: not given; SGLang makes it --tp-size
        yield f"--ep-size is {ep}; MegaMoE spreads experts over all ranks: leave it out or give --tp-size, {ranks}"
    if facts.number("moe_dp_size") > 1:
        yield f"--moe-dp-size is {facts.flags['moe_dp_size']}; allowed with {BACKEND} megamoe: 1"
    if facts.number("pp_size") > 1:
        yield f"--pp-size is {facts.flags['pp_size']}; MegaMoE was never tried in stages: leave it out, or {STOCK}"
    if facts.number("dwdp_size") > 1:
        # UPSTREAM: handle_dwdp sets the backend to none.
        yield f"--dwdp-size is {facts.flags['dwdp_size']}, which moves weights and not tokens: leave it out, or {STOCK}"
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
                ranks=max(1, facts.ranks()),
                top_k=checkpoint.top_k,
            )
        except ValueError as error:
            yield str(error)
        if facts.cap < SM90_TOKEN_ALIGNMENT:
            yield f"{CAP_VARIABLE} is {facts.cap}, allowed: {SM90_TOKEN_ALIGNMENT} (the kernel's alignment) or more"
    elif checkpoint.experts % max(1, facts.ranks()):
        yield f"n_routed_experts is {checkpoint.experts}; it must be a multiple of --tp-size, {facts.ranks()}"
    if facts.cap < 1:
        yield f"{CAP_VARIABLE} is {facts.cap}, allowed: 1 or more"


def _context_parallelism(facts: Facts) -> Iterator[str]:
    if facts.on("enable_prefill_cp") and facts.flags.get("cp_strategy") == "zigzag":
        # UPSTREAM: model_overrides/deepseek_v2.py rewrites the backend to deepep for zigzag.
        yield "--cp-strategy is zigzag, with which SGLang runs DeepEP; allowed with MegaMoE: interleave"


def _attention_dp(facts: Facts) -> Iterator[str]:
    groups, said = facts.attention_dp()
    if groups < 2:
        return
    if facts.on("enable_prefill_cp"):
        yield (
            f"{said} beside --enable-prefill-cp; a shard's padded size is not known on the other DP ranks: give one of "
            f"them, or {STOCK}"
        )
    if facts.true(SKIP_GATHER):
        yield (
            f"{SKIP_GATHER} is {facts.variables[SKIP_GATHER]} and {said}; no rank would know how often the others call "
            f"the kernel: unset the variable, or {STOCK}"
        )


def _loading(facts: Facts) -> Iterator[str]:
    given = facts.flags.get("load_format") or "auto"
    load_format = str(getattr(given, "value", given)).lower()
    if load_format not in LOAD_FORMATS:
        yield (
            f"--load-format is {load_format}; MegaMoE needs a loader that arranges experts after it has read them: "
            f"{', '.join(LOAD_FORMATS)}, or {STOCK}"
        )
    mode = facts.flags.get("weight_cache_mode") or "off"
    if mode != "off":
        yield f"--weight-cache-mode is {mode}, with weights that another process arranged; allowed with MegaMoE: off"
    seed = "remote_instance_weight_loader_start_seed_via_transfer_engine"
    if facts.on(seed):
        yield f"--{seed.replace('_', '-')}: others would read experts in MegaMoE's order: leave it out, or {STOCK}"


def _experts_that_leave(facts: Facts) -> Iterator[str]:
    for name in ("cpu_offload_gb", "offload_group_size"):
        if facts.number(name, 0) > 0:
            yield (
                f"--{name.replace('_', '-')} is {facts.flags[name]}; the kernel reads experts where they were arranged, "
                f"in GPU memory: leave it out, or {STOCK}"
            )
    if facts.on("enable_paged_experts"):
        yield f"--enable-paged-experts: the kernel reads every expert in GPU memory: leave it out, or {STOCK}"


def _shared_experts(facts: Facts) -> Iterator[str]:
    # UPSTREAM: without a flag SGLang keeps them apart wherever there is EP; `state` sees whether it did.
    if facts.on("enforce_shared_experts_fusion"):
        yield f"--enforce-shared-experts-fusion: MegaMoE for FP8 runs shared experts apart: leave it out, or {STOCK}"
    if facts.true(FUSE_SHARED):
        yield f"{FUSE_SHARED} is {facts.variables[FUSE_SHARED]}; allowed with MegaMoE's FP8 experts: 0, or unset"


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
    _attention_dp,
    _loading,
    _experts_that_leave,
    _shared_experts,
    _overlap,
    _experts_that_move,
    _adapters_and_drafts,
)

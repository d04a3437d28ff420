"""What the pairing changes: a request without its other half is told so; without a GPU, NIXL moves host memory, and
nothing spins.
"""

from __future__ import annotations

from glm_sglang.upstream.hooks import Hook, HookKind

_MEMORY = "glm_sglang.disaggregation.host_memory"
_PROGRESS = "glm_sglang.disaggregation.progress"
_LOST = "glm_sglang.disaggregation.lost_rooms"
_UNPAIRED = "glm_sglang.disaggregation.unpaired"
_CONN = "sglang.srt.disaggregation.nixl.conn.NixlKVManager"
_COMMON = "sglang.srt.disaggregation.common.conn"


def _agent(method: str, function: str, also: tuple[str, ...]) -> Hook:
    return Hook(
        target=f"nixl_cu13._api.nixl_agent.{method}",
        kind="before",
        function=f"{_MEMORY}:{function}",
        why="SGLang says VRAM for every KV and state buffer; without a GPU they are host memory",
        remove_when="SGLang takes the memory kind from the pool's device",
        also=also,
        platform="reference",
        scope="installed",
    )


def _told(target: str, kind: HookKind, function: str, why: str, *also: str) -> Hook:
    return Hook(
        target=target,
        kind=kind,
        function=f"{_UNPAIRED}:{function}",
        why=why,
        remove_when="SGLang's answer says what to change",
        also=also,
        scope="installed",
    )


HOOKS: tuple[Hook, ...] = (
    _told(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        "before",
        "refuse",
        "a room that is missing, negative or 0, or no host, ends a scheduler, or the request at a deadline",
        "sglang.srt.disaggregation.decode._bootstrap_addr",
        "sglang.srt.disaggregation.utils._apply_metadata_gate",
    ),
    _told(
        f"{_COMMON}.CommonKVReceiver._check_waiting_timeout",
        "after",
        "prefill_never_sent",
        "the client of a room that no prefill server knows reads of KVPoll.WaitingForInput",
        f"{_COMMON}.CommonKVReceiver.failure_exception",
    ),
    _told(
        f"{_COMMON}.CommonKVSender._check_bootstrap_timeout",
        "after",
        "decode_never_asked",
        "the client of a request whose decode server is gone reads of KVPoll.Bootstrapping",
        f"{_COMMON}.CommonKVSender.failure_exception",
    ),
    _told(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._ensure_prefill_info",
        "around",
        "prefill_not_found",
        "the client of an address where no prefill server is reads that its request was aborted",
        f"{_COMMON}.CommonKVReceiver.abort",
    ),
    Hook(
        target=f"{_COMMON}.CommonKVBootstrapServer._setup_routes",
        kind="after",
        function=f"{_LOST}:serve",
        why="a decode server cannot ask whether prefill still has a request",
        remove_when="prefill tells decode of every request that has ended there",
        also=("sglang.srt.managers.disagg_service.start_disagg_service",),
        scope="installed",
    ),
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._init_req_state",
        kind="after",
        function="glm_sglang.disaggregation.arrivals:entered",
        why="prefill must not say of a request that it is still reading that it does not have it",
        remove_when="prefill tells decode of every request that has ended there",
        also=("sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",),
        scope="installed",
    ),
    Hook(
        target=f"{_COMMON}.CommonKVManager._start_heartbeat_checker_thread",
        kind="after",
        function=f"{_LOST}:watch",
        why="decode and its client wait 300 s for a request that prefill has refused or answered with an error, or that "
        "came after a restart of prefill which decode has not noticed",
        remove_when="prefill tells decode of every request that has ended there, or the router ends decode's half; and "
        "decode registers its memory anew with a prefill server that was restarted",
        upstream="https://github.com/sgl-project/sglang/issues/9726",
        also=(
            f"{_COMMON}.CommonKVManager.update_status",
            f"{_COMMON}.CommonKVManager._handle_node_failure",
            f"{_COMMON}.CommonKVReceiver._clear",
        ),
        scope="installed",
    ),
    Hook(
        target="sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue",
        kind="after",
        function=f"{_LOST}:received",
        why="a request that decode retracted is not lost because prefill has not been asked for it yet",
        remove_when="prefill tells decode of every request that has ended there",
        also=("sglang.srt.disaggregation.decode.DecodePreallocQueue._submit_prefill_recompute",),
        scope="installed",
    ),
    Hook(
        target="nixl_cu13._api.nixl_agent.__init__",
        kind="around",
        function=f"{_PROGRESS}:agent_init",
        why="its progress thread spins, and takes a core from the model where there are few",
        remove_when="nixl_agent_config takes a progress delay",
        platform="reference",
        scope="installed",
    ),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.on_idle",
        kind="after",
        function=f"{_PROGRESS}:pause_while_waiting",
        why="a scheduler that waits for a transfer spins, and takes a core from the peer that it waits for",
        remove_when="--sleep-on-idle covers requests in transfer",
        also=("sglang.srt.managers.scheduler.Scheduler.is_fully_idle",),
        platform="reference",
        scope="installed",
    ),
    Hook(
        target="sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk",
        kind="around",
        function=f"{_MEMORY}:send_cached_prefix",
        why="under overlap scheduling it records a CUDA event; without CUDA a forward pass has ended when it returns",
        remove_when="it takes the event from the forward stream's own device module",
        platform="reference",
        scope="installed",
    ),
    _agent("register_memory", "descriptors", (f"{_CONN}.register_buffer_to_engine",)),
    _agent("get_xfer_descs", "descriptors", (f"{_CONN}.send_aux",)),
    _agent("prep_xfer_dlist", "prepared_descriptors", (f"{_CONN}._prep_xfer_dlist",)),
    Hook(
        target="sglang.srt.mem_cache.pool_host.common._cuda_host_register",
        kind="replace",
        function=f"{_MEMORY}:host_register",
        why="a decode server allocates a pinned host pool; pinning needs the CUDA runtime",
        remove_when="SGLang asks the platform whether pinned memory exists (is_pin_memory_available)",
        also=("sglang.srt.mem_cache.pool_host.common.alloc_with_host_register",),
        platform="reference",
        scope="installed",
    ),
)

"""What the pairing changes on the reference platform: NIXL moves host memory, and nothing spins."""

from __future__ import annotations

from glm_sglang.upstream.hooks import Hook

_MEMORY = "glm_sglang.disaggregation.host_memory"
_PROGRESS = "glm_sglang.disaggregation.progress"
_CONN = "sglang.srt.disaggregation.nixl.conn.NixlKVManager"


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


HOOKS: tuple[Hook, ...] = (
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

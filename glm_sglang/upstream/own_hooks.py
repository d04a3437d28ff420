"""The launcher's own changes: no later plugin may undo ours, our metrics join SGLang's, and a signal during the start
ends it.

Target        HookRegistry.register; set_prometheus_multiproc_dir; what answers SIGINT and SIGTERM.
Upstream      none.
Goes when     SGLang can say that a hook failed; SGLang has a place for a plugin's metrics; a signal ends a warm-up.
"""

from typing import Any

from glm_sglang.upstream.hooks import Hook

_WRAPPING = (
    "sglang.srt.plugins.hook_registry.HookRegistry.apply_hooks",
    "sglang.srt.plugins.hook_registry.HookRegistry._apply_target",
    "sglang.srt.plugins.hook_registry._wrap_fn",
    "sglang.srt.plugins.load_plugins",
    "sglang.srt.plugins._get_excluded_dists",
)


def refuse_later_hook(registry: Any, target: str, *args: Any, **kwargs: Any) -> None:
    """End the process where a plugin that loads after us hooks what our changes rest on."""
    from glm_sglang import plugin

    plugin.refuse_later_hook(target, kwargs.get("source"))


def publish_metrics(result: Any, *args: Any, **kwargs: Any) -> None:
    """Publish this process's metrics, now that prometheus_client will open the shared folder."""
    from glm_sglang import metrics

    metrics.publish()


HOOKS: tuple[Hook, ...] = (
    Hook(
        target="sglang.srt.plugins.hook_registry.HookRegistry.register",
        kind="before",
        function=f"{__name__}:refuse_later_hook",
        why="a plugin loaded after this one would hook the same symbols and SGLang would only log it",
        remove_when="SGLang reports conflicts between plugins as errors",
        also=_WRAPPING,
        scope="installed",
    ),
    Hook(
        target="sglang.srt.utils.common.set_prometheus_multiproc_dir",
        kind="after",
        function=f"{__name__}:publish_metrics",
        why="prometheus_client must not be imported in the launcher before this folder is set",
        remove_when="SGLang calls plugins once its metrics are set up",
        also=("sglang.srt.utils.common.add_prometheus_middleware",),
        scope="installed",
    ),
    Hook(
        target="uvicorn.server.Server.handle_exit",
        kind="before",
        function="glm_sglang.stopping:end_before_it_serves",
        why="Ctrl-C during the warm-up waits for it: on a GPU, for minutes of compilation",
        remove_when="SGLang ends its warm-up at a signal",
        also=("uvicorn.server.Server.capture_signals", "sglang.srt.entrypoints.http_server.get_global_state"),
    ),
    Hook(
        target="sglang.srt.managers.tokenizer_manager.SignalHandler.sigterm_handler",
        kind="before",
        function="glm_sglang.stopping:end_before_it_drains",
        why="SIGTERM during the warm-up waits for it: on a GPU, for minutes of compilation",
        remove_when="SGLang ends its warm-up at a signal",
        also=(
            "sglang.srt.managers.tokenizer_manager.TokenizerManager.auto_create_handle_loop",
            "sglang.srt.entrypoints.http_server._wait_and_warmup",
        ),
    ),
    Hook(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager.sigterm_watchdog",
        kind="around",
        function="glm_sglang.stopping:drain_at_once",
        why="it looks for SIGTERM, and for requests that are left, every 5 seconds: a restart takes up to 10 s longer",
        remove_when="SGLang wakes its watchdog",
        also=("sglang.srt.managers.tokenizer_manager.print_exception_wrapper",),
    ),
)

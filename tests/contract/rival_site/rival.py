"""Another SGLang plugin that hooks what the fork rests on."""


def register() -> None:
    """Entry point of group sglang.srt.plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.utils.common.add_prometheus_middleware", lambda *_: None, HookType.AFTER
    )

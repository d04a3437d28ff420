"""What SGLang loads: `platform` when it first asks for one, `install` in every process before it serves.

Both are entry points (`sglang.srt.platforms`, `sglang.srt.plugins`). SGLang logs a plugin's exception and
serves on, so nothing here lets one out: what goes wrong ends the process (`glm_sglang.failure`).
"""

import logging
from typing import Any

from glm_sglang import failure, offline, platform_choice, scope, startup
from glm_sglang.errors import ContractError, UsageError
from glm_sglang.upstream.install import Installed, conflict, describe, overlap
from glm_sglang.upstream.install import install as install_changes

NAME = "glm_sglang"  # of both entry points
PLATFORM_CLASS = "glm_sglang.reference_platform.platform:ReferencePlatform"

logger = logging.getLogger(__name__)
_installed: Installed | None = None


def platform() -> str | None:
    """The reference platform's class where it is chosen, else None: SGLang then detects CUDA by itself."""
    try:
        chosen = platform_choice.current()
    except UsageError as error:
        failure.end_process(error)
    if chosen.platform != "reference":
        return None
    platform_choice.hide_cuda()
    return PLATFORM_CLASS


def install() -> None:
    """Put every change in place in this process, or end it."""
    global _installed
    if _installed is not None:
        return
    try:
        chosen = platform_choice.current()
        if scope.in_launcher_child():
            failure.die_with_parent()
        if chosen.platform == "stock":
            _installed = Installed()
            return
        offline.set_defaults()
        startup.see_who_leaves()  # a stock decode server; our launcher has done so
        _installed = install_changes(chosen.platform, scope.current())
        _check_platform(chosen.platform)
    except (ContractError, UsageError) as error:
        failure.end_process(error)
    except Exception as error:
        failure.end_process(
            ContractError(
                what="the changes of this fork could not be put in place",
                expected="no exception while installing them",
                found=describe(error),
                mend="python -m glm_sglang.doctor repeats it without a model; report it with this message",
            )
        )
    startup.usual_collections()
    _announce(_installed, chosen)


def installed() -> Installed | None:
    """What this process carries, or None where `install` has not run."""
    return _installed


def refuse_later_hook(target: str, source: Any) -> None:
    """End the process where a plugin other than this one hooks what our changes rest on."""
    if _installed is None:
        return  # our own registration
    from sglang.srt.plugins.hook_registry import _current_plugin_source

    source = source or _current_plugin_source.get()
    for hook in _installed.hooks:
        for symbol in hook.symbols:
            if overlap(symbol, target):
                failure.end_process(conflict(symbol, target, source))


def _check_platform(expected: platform_choice.PlatformName) -> None:
    """Raise ContractError where SGLang serves on another platform than the one chosen."""
    from sglang.srt.platforms import current_platform

    name = f"{type(current_platform).__module__}:{type(current_platform).__qualname__}"
    right = name == PLATFORM_CLASS if expected == "reference" else bool(current_platform.is_cuda())
    if not right:
        raise ContractError(
            what="SGLang serves on another platform than the one chosen",
            expected=PLATFORM_CLASS if expected == "reference" else "SGLang's CUDA platform",
            found=name,
            mend="unset SGLANG_PLATFORM and SGLANG_USE_CPU_ENGINE, or uninstall the other platform plugin",
        )


def _announce(done: Installed, chosen: platform_choice.Choice) -> None:
    from glm_sglang import metrics

    logger.info("%d hooks in place on the %s platform (%s)", len(done.hooks), chosen.platform, chosen.reason)
    for symbol in done.untested:
        logger.warning("GLM_SGLANG_ALLOW_UNTESTED=1: %s is not what this fork was tested on", symbol)
    metrics.record(hooks=len(done.hooks), untested=len(done.untested), platform=chosen.platform)

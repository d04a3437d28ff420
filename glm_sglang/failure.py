"""How a process ends when it can't carry the fork: one message, a non-zero status, nobody left behind.

SGLang swallows a plugin's exceptions, and a launcher whose scheduler ended early finds out up to five seconds
later, by a traceback; while it loads a large model it does not look at the detokenizer at all. So under our
launcher a child that fails writes its message into a named pipe in the run folder; a thread of the launcher
reads it, prints it, kills the whole tree and exits. The first message wins, so eight ranks that fail alike
speak once.

Under a stock launcher the child prints the message and sends its parent SIGQUIT, SGLang's own sign of a
failed child.
"""

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NoReturn

from glm_sglang import scope

PREFIX = "glm-sglang: "
_PIPE = "failure"
_FOLDER = "glm-sglang-run-"  # then the launcher's process id
# A write of at most PIPE_BUF bytes is atomic, so messages of several ranks do not mix.
_LONGEST = 4096
_REAP_S = 30.0
_PATIENCE_S = 10.0
_SIGNAL = signal.SIGUSR2
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


def end_process(error: BaseException) -> NoReturn:
    """End this process because of `error`.

    The message goes out once; in the main process this raises SystemExit.
    """
    message = f"{PREFIX}{error}"
    if multiprocessing.parent_process() is None:
        raise SystemExit(message)
    owner = scope.launcher()
    if owner is not None and _tell(owner, message):
        # Wait to be killed with all that this process has started; had it ended, they would not be found.
        time.sleep(_REAP_S)
    else:
        print(message, file=sys.stderr, flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(os.getppid(), signal.SIGQUIT)
    sys.stdout.flush()
    # Not sys.exit: atexit handlers and threads of a half-initialised process could hang or print tracebacks.
    os._exit(1)


def _tell(owner: scope.Launcher, message: str) -> bool:
    """Hand the message to the launcher; False where nobody reads any more."""
    try:
        pipe = os.open(owner.run_folder / _PIPE, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    with os.fdopen(pipe, "wb", buffering=0) as out:
        return bool(out.write(message.encode(errors="replace")[: _LONGEST - 1] + b"\0"))


class Listener:
    """The launcher's end: owns the run folder and the thread that waits for a child's message.

    To be made in the main thread, which is the one that starts processes: that thread itself, interrupted by
    a signal, kills them, so none is started behind its back. The folder is removed by `close()`, or before
    the process ends.
    """

    def __init__(self) -> None:
        # What `kill_children` needs: a signal may come in the midst of another's first import of it, and see half of it.
        import ctypes  # noqa: F401

        import psutil  # type: ignore[import-untyped]  # noqa: F401

        _remove_stale_folders()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        os.mkfifo(self.folder / _PIPE, 0o600)
        # Open for writing as well: then a read waits for the first message instead of seeing the end of file.
        self._pipe = os.open(self.folder / _PIPE, os.O_RDWR)
        self._message = ""
        # Never released. A signal's handler that finds it taken by its own thread returns to the end under way.
        self._ending = threading.RLock()
        self._ends = False
        self._main = threading.get_ident()
        self._before = signal.signal(_SIGNAL, lambda *_: self.end(self._message, 1))
        self._thread = threading.Thread(target=self._wait, name="glm-sglang-failures", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            received = os.read(self._pipe, _LONGEST)
        except OSError:  # closed
            return
        if not received.strip():
            return
        self._message = received.decode(errors="replace").partition("\0")[0].rstrip("\n")
        signal.pthread_kill(self._main, _SIGNAL)
        time.sleep(_PATIENCE_S)  # the main thread may be deep in native code
        self.end(self._message, 1)

    def end(self, message: str, code: int) -> None:
        """Say why, kill everybody, go. The first call does it; one that interrupts it, from a signal handler, returns to
        it, and one in another thread waits for the end.
        """
        if not self._ending.acquire(blocking=False):
            time.sleep(_REAP_S)
            os._exit(code)
        if self._ends:
            return
        self._ends = True
        # Not print: a signal may have come in the midst of one, whose buffer takes no second.
        with contextlib.suppress(OSError):  # a closed terminal, a pipe whose reader got Ctrl-C as well
            os.write(2, f"{message}\n".encode(errors="replace"))
        kill_children()
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(code)

    def close(self) -> None:
        """Stop listening and remove the folder."""
        with contextlib.suppress(OSError):
            os.write(self._pipe, b"\n")
        self._thread.join(timeout=1.0)
        os.close(self._pipe)
        signal.signal(_SIGNAL, self._before)
        shutil.rmtree(self.folder, ignore_errors=True)


def _remove_stale_folders() -> None:
    """Remove this user's run folders whose launcher was killed before it could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        pid = folder.name.removeprefix(_FOLDER).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdecimal() and folder.stat().st_uid == os.getuid() and not Path("/proc", pid).exists():
                shutil.rmtree(folder, ignore_errors=True)


def kill_children(*, tracker: bool = True) -> None:
    """Kill every process below this one, wait until they are gone, and whoever they started meanwhile as
    well.

    tracker: multiprocessing's resource tracker, too. It ends by itself after this process; one that exits in
    the usual way still has things to tell it, and starts another where it is gone.
    """
    import psutil

    # From here on an orphan becomes our child instead of init's, so a process started during the kill is
    # found.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    spared = None if tracker else getattr(resource_tracker._resource_tracker, "_pid", None)
    deadline = time.monotonic() + _REAP_S
    while time.monotonic() < deadline:
        children = [c for c in psutil.Process().children(recursive=True) if c.pid != spared]
        if not children:
            break
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=_REAP_S)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def die_with_parent() -> None:
    """Have the kernel kill this child when its parent ends; end at once where the parent has already gone.

    UPSTREAM: run_scheduler_process asks for the same, but only after plugins are loaded.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not parent.is_alive():  # it ended before the line above
        os._exit(1)

"""Another process's memory, read without that process's doing (process_vm_readv(2), Linux).

The kernel lets a process read one of the same user; where Yama restricts that (`kernel.yama.ptrace_scope` 1), only one
that the other has named. A rank names its parent, whose children are the ranks and nobody else's.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Sequence
from typing import Any

_PR_SET_PTRACER = 0x59616D61
_MOST = 1024  # pieces a call (IOV_MAX)


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@functools.cache
def _function(name: str) -> Any:
    """Of the C library; lets go of the interpreter while it runs. OSError ENOSYS where there is none."""
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError, TypeError):
        raise OSError(errno.ENOSYS, f"{name}: {os.strerror(errno.ENOSYS)}") from None


@functools.cache
def _readv() -> Any:
    readv = _function("process_vm_readv")
    readv.restype = ctypes.c_ssize_t
    readv.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    return readv


def let_siblings_read() -> None:
    """Descendants of this process's parent may read its memory from now on. Nothing where the kernel has no Yama. OSError
    where the system has no such call."""
    _function("prctl")(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def copy_from(pid: int, theirs: Sequence[int], ours: Sequence[int], size: int) -> None:
    """Copies pieces of `size` bytes from addresses of process `pid` to addresses of ours.

    OSError as process_vm_readv has it: ESRCH for a process that is gone, EPERM for one that may not be read; EFAULT also
    where fewer bytes came; ENOSYS where the system has no such call.
    """
    readv = _readv()
    for start in range(0, len(theirs), _MOST):
        there, here = theirs[start : start + _MOST], ours[start : start + _MOST]
        pieces = _Piece * len(there)
        remote = pieces(*[_Piece(address, size) for address in there])
        local = pieces(*[_Piece(address, size) for address in here])
        copied = readv(pid, local, len(here), remote, len(there), 0)
        if copied != size * len(there):
            number = ctypes.get_errno() if copied < 0 else errno.EFAULT
            raise OSError(number, f"process_vm_readv: {os.strerror(number)}")

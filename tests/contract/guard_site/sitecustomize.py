"""On PYTHONPATH of a process under test: writes each attempt to leave the machine to $NETWORK_GUARD_LOG.

Audit events see every Python socket, whichever library opens it, before anything leaves.
"""

import ipaddress
import os
import socket
import sys

_LOG = os.environ.get("NETWORK_GUARD_LOG")


def _outside(host):
    if host is None or host in ("", b"", "localhost", socket.gethostname()):
        return False
    text = host.decode() if isinstance(host, bytes) else str(host)
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return True  # a name: looking it up asks a name server
    return not (address.is_loopback or address.is_unspecified)


def _watch(event, args):
    if event == "socket.getaddrinfo" or event == "socket.gethostbyname":
        host = args[0]
    elif event in ("socket.connect", "socket.sendto"):
        address = args[1]
        if not isinstance(address, tuple):  # a Unix socket
            return
        host = address[0]
    else:
        return
    if _outside(host):
        with open(_LOG, "a") as log:
            log.write(f"{event} {host} by {' '.join(sys.orig_argv[:4])}\n")


if _LOG:
    sys.addaudithook(_watch)

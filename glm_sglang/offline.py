"""Nothing phones home: defaults for every switch of usage telemetry and hub access that the stack knows.

A variable that the user has set, to whatever value, stays as it is.
"""

import ipaddress
import os
from collections.abc import MutableMapping
from pathlib import Path

HOST_IP = "SGLANG_HOST_IP"
# Variable -> value that turns it off. Read by the package named beside it.
TELEMETRY: dict[str, str] = {
    "DO_NOT_TRACK": "1",  # lmcache, huggingface_hub, and others by convention
    "LMCACHE_TRACK_USAGE": "false",  # lmcache.usage_telemetry
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub, transformers, kernels
    "RAY_USAGE_STATS_ENABLED": "0",  # ray, where it is installed
    "VLLM_NO_USAGE_STATS": "1",  # vllm, where it is installed
}
# With a local checkpoint nothing is to be fetched; `HF_HUB_OFFLINE=0` asks for the hub.
HUB: dict[str, str] = {
    "HF_HUB_OFFLINE": "1",  # huggingface_hub, transformers, datasets, kernels
    "TRANSFORMERS_OFFLINE": "1",  # transformers
}


def set_defaults(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Turn telemetry off where the user has not decided; returns what was set."""
    return fill(TELEMETRY, environ)


def keep_off_the_hub(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Turn hub access off where the user has not decided; returns what was set.

    Call before huggingface_hub is imported.
    """
    if "HF_HUB_OFFLINE" in environ:  # the user's choice counts for both
        return {}
    return fill(HUB, environ)


def stay_on_loopback(
    environ: MutableMapping[str, str] = os.environ, *, transfers: bool = False
) -> dict[str, str]:
    """Have SGLang bind and advertise its PD control sockets on loopback; returns what was set.

    transfers: UCX and gloo too. On GPUs they choose among devices that only they know, so only for the reference
    platform.

    UPSTREAM: utils.network.get_local_ip_auto, which otherwise asks the kernel for the route to a public DNS
    server, binds that address, and fails on a machine without a route.
    """
    if "HOST_IP" in environ:
        return {}
    chosen = {HOST_IP: "127.0.0.1"}
    if transfers:
        chosen |= {"UCX_NET_DEVICES": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    return fill(chosen, environ)


def advertise(host: str, environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Have SGLang bind and advertise its PD control sockets on `--host`, where that is one address that others reach;
    returns what was set.

    UPSTREAM: utils.network.get_local_ip_auto, which does not know --host. It takes the address of the route to a public
    DNS server, or what the host name means: 127.0.1.1 on Debian, the wrong network on a node with several.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return {}
    if "HOST_IP" in environ or address.is_unspecified or address.is_loopback:
        return {}
    return fill({HOST_IP: host}, environ)


def meet_in_a_file(run_folder: Path, environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Have the ranks of a server meet in a file of the launcher's; returns what was set.

    torch's TCPStore listens on every address whatever its URL says, and obeys anyone who connects. A FileStore has no
    socket. For one group of ranks on one machine. UPSTREAM: distributed.bootstrap._resolve_dist_init_method.
    """
    return fill({"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{run_folder}/ranks"}, environ)


def fill(defaults: dict[str, str], environ: MutableMapping[str, str]) -> dict[str, str]:
    """Set each variable that the user has not; returns what was set."""
    added = {name: value for name, value in defaults.items() if name not in environ}
    environ.update(added)
    return added

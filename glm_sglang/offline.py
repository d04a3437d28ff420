"""Nothing phones home: defaults for every switch of usage telemetry and hub access that the stack knows.

A variable that the user has set, to whatever value, stays as it is.
"""

import os
from collections.abc import MutableMapping

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
    return _fill(TELEMETRY, environ)


def keep_off_the_hub(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Turn hub access off where the user has not decided; returns what was set.

    Call before huggingface_hub is imported.
    """
    if "HF_HUB_OFFLINE" in environ:  # the user's choice counts for both
        return {}
    return _fill(HUB, environ)


def stay_on_loopback(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Have SGLang bind and advertise its PD control sockets on loopback; returns what was set.

    UPSTREAM: utils.network.get_local_ip_auto, which otherwise asks the kernel for the route to a public DNS
    server, binds that address, and fails on a machine without a route.
    """
    if "HOST_IP" in environ:
        return {}
    return _fill({"SGLANG_HOST_IP": "127.0.0.1"}, environ)


def _fill(defaults: dict[str, str], environ: MutableMapping[str, str]) -> dict[str, str]:
    added = {name: value for name, value in defaults.items() if name not in environ}
    environ.update(added)
    return added

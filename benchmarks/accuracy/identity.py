"""Which start of which server answers at a URL: an answer of another one says nothing about this one."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import httpx
import orjson

_START = re.compile(rb"^process_start_time_seconds(?:\{[^}]*\})? (\S+)", re.MULTILINE)
_RANK = re.compile(r"@\d+$")  # UPSTREAM: SGLang's router names the DP ranks of a worker so


def identity(url: str) -> str:
    """Changes with the server, its flags, its weights' version and with each start of it; behind SGLang's router, with
    any of its workers. "" where nothing that the endpoint says would tell one start from the next.
    """
    with httpx.Client(timeout=60.0, trust_env=False, follow_redirects=True) as client:
        told = _told(client, url.rstrip("/"))
    return (
        ""
        if told is None
        else hashlib.sha256(orjson.dumps(told, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
    )


def _told(client: httpx.Client, url: str) -> Any:
    """What of the server tells it from any other and from its own last start; None where that is not known."""
    workers = _json(client, f"{url}/workers").get("workers")
    if isinstance(workers, list):
        # The router's own answer to /server_info is that of one of them.
        urls = sorted({_RANK.sub("", str(one.get("url", ""))) for one in workers if isinstance(one, dict)})
        found = [_server(client, worker) for worker in urls if worker.startswith("http")]
        return [urls, found] if found and len(found) == len(urls) and None not in found else None
    return _server(client, url)


def _server(client: httpx.Client, url: str) -> Any:
    about = _json(client, f"{url}/server_info")
    # UPSTREAM: SGLang's flags and what it measured of its start (unrounded seconds); only these change while it serves.
    about.pop("internal_states", None)
    if about.get("startup_time"):
        return [about, _json(client, f"{url}/model_info")]  # the second is what a weight update changes
    # vLLM, and whatever else publishes its process's metrics.
    started = _START.search(_get(client, f"{url}/metrics"))
    return [about, _json(client, f"{url}/version"), started[1].decode()] if started else None


def _json(client: httpx.Client, url: str) -> dict[str, Any]:
    try:
        found = orjson.loads(_get(client, url))
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _get(client: httpx.Client, url: str) -> bytes:
    """What GET gives; b"" for anything but 200."""
    try:
        answer = client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL):
        return b""
    return answer.content if answer.status_code == 200 else b""

"""What a URL may say; every other one is refused with a message that names the flag and holds no password."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from glm_connectors.valkey_store import CacheUrlError, Node, parse, probe
from glm_connectors.valkey_store.shards import Shards
from hypothesis import given
from hypothesis import strategies as st


def test_what_a_url_says() -> None:
    assert parse("none").scheme == "none"
    assert parse("embedded://").maxmemory == "1gb"
    assert parse("embedded://?maxmemory=64mb").maxmemory == "64mb"
    one = parse("valkey://cache.example")
    assert (one.nodes, one.tls, one.cluster, one.database) == (
        (Node("cache.example", 6379),),
        False,
        False,
        0,
    )
    full = parse("valkey://al%40ice:p%3A%2Fw%25@10.0.0.1:7000,[fd00::1]:7001,c/3")
    assert full.nodes == (Node("10.0.0.1", 7000), Node("fd00::1", 7001), Node("c", 6379))
    assert (full.username, full.password, full.database) == ("al@ice", "p:/w%", 3)
    assert parse("valkey://:secret@a").password == "secret"
    assert (parse("valkey://joe@a").username, parse("valkey://joe@a").password) == ("joe", "")
    assert parse("valkeys://a").tls
    assert parse("valkey-cluster://a,b").cluster
    assert (parse("valkeys-cluster://a").tls, parse("valkeys-cluster://a").cluster) == (True, True)


def test_files_of_a_tls_url(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    assert parse(f"valkeys://a?ca={ca}").ca == str(ca)
    with pytest.raises(CacheUrlError, match="cert and key belong together"):
        parse(f"valkeys://a?cert={ca}")
    with pytest.raises(CacheUrlError, match="is no file"):
        parse(f"valkeys://a?ca={tmp_path}/absent")


BAD = {
    "": "expected none or embedded://",
    "redis://a": "expected none or embedded://",
    "localhost:6379": "expected none or embedded://",
    "valkey:/a": "expected none or embedded://",
    "valkey://": "expected host",
    "valkey://a,,b": "expected host",
    "valkey://a:99999": "expected host",
    "valkey://a:0": "expected host",
    "valkey://a:port": "expected host",
    "valkey://user:@a": "a user without a password",
    "valkeys://user@a": "a user without a password is for valkey:// only",
    "valkey-cluster://user@a": "a user without a password is for valkey:// only",
    "valkey://a,a:6379": "a node occurs twice",
    "valkey://a/x": "expected a database number",
    "valkey-cluster://a/2": "no database but 0",
    "valkey://a?ca=x": "unknown option 'ca'",
    "valkey://a?x": "is no URL",
    "valkey://a#b": "percent-encode it",
    "embedded://a": "takes no host",
    "embedded://?x=1": "takes: maxmemory",
    "valkey://user:se#cret@a": "percent-encode it",
    "valkey://user:se cret@a:b": "expected host",
    "valkeyx://user:hunter2@a": "expected none",
    "valkey://user:hunter2@[a": "is no URL",
    "valkey://user:hunter2@a?x": "is no URL",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_url_is_refused_by_the_flags_name(text: str) -> None:
    with pytest.raises(CacheUrlError, match=BAD[text]) as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith("--glm-cache-url: ")
    for secret in ("hunter2", "cret"):
        assert secret not in message
    assert caught.value.__cause__ is None
    findings = probe(text)
    assert [finding.good for finding in findings] == [False]


@given(password=st.text(min_size=1).filter(str.strip))
def test_a_password_survives_and_is_never_shown(password: str) -> None:
    from urllib.parse import quote

    try:
        quoted = quote(password, safe="")
    except UnicodeEncodeError:
        return
    secret = f"zz{quoted}zz"
    url = parse(f"valkey://joe:{secret}@a")
    assert url.password == f"zz{password}zz"
    for shown in (str(url), repr(url), repr(dataclasses.replace(url, scheme="valkeys"))):
        assert secret not in shown
        assert url.password not in shown
    assert "joe" in str(url)


def test_shards_are_even_and_a_node_that_leaves_moves_only_its_own_keys() -> None:
    nodes = [Node(name, 6379) for name in "abcd"]
    keys = [number.to_bytes(32, "big") for number in range(4000)]
    four, three = Shards(nodes), Shards(nodes[:3])
    placed = [four.place(key) for key in keys]
    assert all(850 < placed.count(number) < 1150 for number in range(4))
    assert all(three.place(key) == node for key, node in zip(keys, placed, strict=True) if node != 3)
    turned = Shards(nodes[::-1])
    assert [3 - turned.place(key) for key in keys] == placed

"""Declared changes: checked where they are written, chosen by platform and scope, pinned by metadata."""

from typing import Any

import pytest

from glm_sglang.errors import ContractError
from glm_sglang.upstream import pins, rooms
from glm_sglang.upstream.hooks import Hook, Registration
from glm_sglang.upstream.install import carries, load, overlap
from glm_sglang.upstream.pins import Pin


def hook(**changes: Any) -> Hook:
    fields = {"target": "a.b.c", "kind": "around", "function": "m:f", "why": "w", "remove_when": "r"}
    return Hook(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"target": "alone"},
        {"target": "a..b"},
        {"kind": "instead"},
        {"function": "m.f"},
        {"function": ":f"},
        {"why": ""},
        {"remove_when": ""},
        {"platform": "gpu"},
        {"scope": "always"},
        {"platform": "cuda", "scope": "installed"},
    ],
)
def test_a_wrong_declaration_is_refused_where_it_is_written(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        hook(**changes)


def test_a_hook_rests_on_its_target_and_what_it_names_besides() -> None:
    assert hook(also=("a.d", "a.e")).symbols == ("a.b.c", "a.d", "a.e")


ANY, CUDA, REFERENCE = (hook(target=f"t.{p}", platform=p) for p in ("any", "cuda", "reference"))
INSTALLED = hook(target="t.installed", platform="reference", scope="installed")
EVERYWHERE = hook(target="t.everywhere", scope="installed")
ALL = (ANY, CUDA, REFERENCE, INSTALLED, EVERYWHERE)


@pytest.mark.parametrize(
    ("platform", "scope", "expected"),
    [
        ("cuda", "launcher", (ANY, CUDA, EVERYWHERE)),
        ("reference", "launcher", (ANY, REFERENCE, INSTALLED, EVERYWHERE)),
        ("reference", "installed", (INSTALLED, EVERYWHERE)),
        ("cuda", "installed", ()),
        ("stock", "installed", ()),
    ],
)
def test_changes_by_platform_and_scope(platform: Any, scope: Any, expected: tuple[Hook, ...]) -> None:
    assert rooms.active(ALL, platform, scope) == expected


def test_two_replacements_of_one_symbol_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = hook(kind="replace", platform="cuda"), hook(kind="replace", function="m:g")
    monkeypatch.setattr(rooms, "_declared", lambda *_: (first, second))
    with pytest.raises(ValueError, match=r"a\.b\.c is replaced twice: m:f and m:g"):
        rooms.hooks()
    monkeypatch.setattr(rooms, "_declared", lambda *_: (first, hook(kind="replace", platform="reference")))
    assert len(rooms.hooks()) == 2


def test_every_declared_change_is_recorded() -> None:
    from glm_sglang.upstream import fingerprints

    assert set(rooms.symbols(rooms.everything())) == set(fingerprints.recorded().symbols)


@pytest.mark.parametrize(
    ("mine", "other", "touches"),
    [
        ("m.C.f", "m.C.f", True),
        ("m.C.f", "m.C", True),
        ("m.C", "m.C.f", True),
        ("m.C.f", "m.C.g", False),
        ("m.Case", "m.C", False),
    ],
)
def test_overlap_of_symbols(mine: str, other: str, touches: bool) -> None:
    assert overlap(mine, other) is touches


def test_a_wrapper_chain_is_followed_to_our_function() -> None:
    import functools

    def original() -> None: ...
    def ours() -> None: ...
    def theirs() -> None: ...

    def wrap(inner: Any, function: Any) -> Any:
        @functools.wraps(inner)
        def wrapper() -> Any:
            return function(inner)

        return wrapper

    assert carries(wrap(original, ours), ours)
    assert carries(staticmethod(wrap(wrap(original, ours), theirs)), ours)
    assert carries(ours, ours)
    assert not carries(wrap(original, theirs), ours)
    assert not carries(original, ours)


def test_a_function_that_cannot_be_had_is_a_contract_error() -> None:
    for path, found in [
        ("no_such_module:f", "No module named"),
        ("json:gone", "gone"),
        ("json:__name__", "'json'"),
    ]:
        with pytest.raises(ContractError) as caught:
            load(path, "a test")
        assert found in caught.value.found


@pytest.mark.parametrize(
    ("found", "right"),
    [
        ("2.14.1", True),
        ("2.14.1+cpu", True),
        ("2.14.1+cu130", True),
        ("2.14.1.0", True),
        ("2.14.10", False),
        ("2.14.1rc1", False),
        ("2.14.1.post1", False),
        (None, False),
        ("nonsense", False),
    ],
)
def test_a_local_version_counts_as_the_pinned_one(found: str | None, right: bool) -> None:
    assert pins.satisfied(Pin("torch", "2.14.1"), found) is right


def test_the_contract_is_the_packages_own_metadata() -> None:
    assert {pin.name: pin.version for pin in pins.contract("reference")} == {
        "sglang": "0.5.23",
        "torch": "2.14.1",
        "transformers": "5.19.0",
        "lmcache": "0.5.6",
        "nixl": "1.5.1",
        "sglang-router": "0.3.2",
    }
    on_cuda = {pin.name: pin.version for pin in pins.contract("cuda")}
    assert on_cuda["sgl-deep-gemm"] == "0.2.5"
    assert on_cuda["sglang-kernel"] == "0.4.10"
    assert on_cuda["flashinfer-python"] == "0.7.2"


def test_a_wrong_version_names_both_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pins, "installed", lambda name: "0.5.22" if name == "sglang" else pins.declared()[name].version
    )
    with pytest.raises(ContractError) as caught:
        pins.check_versions("reference")
    assert (caught.value.expected, caught.value.found) == ("sglang 0.5.23", "sglang 0.5.22")
    assert caught.value.mend == "pip install --no-deps 'sglang==0.5.23'"


def test_a_registration_needs_a_way_to_verify_it() -> None:
    with pytest.raises(ValueError, match="module:qualname"):
        Registration(function="m:f", verify="", why="w")


def test_a_package_on_the_path_alone_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without metadata there are no entry points: SGLang would serve without the fork."""
    import importlib.metadata

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    pins.declared.cache_clear()
    with pytest.raises(ContractError, match="glm-sglang is not installed"):
        pins.check_versions("reference")
    monkeypatch.undo()
    pins.declared.cache_clear()

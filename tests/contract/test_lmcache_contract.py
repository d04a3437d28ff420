"""The repairs against the installed LMCache: it is the tested one, or `install` refuses and says why."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from glm_connectors.lmcache_repairs import REPAIRS, contract
from glm_connectors.lmcache_repairs.contract import ContractError, Symbol
from glm_connectors.lmcache_repairs.fingerprints import TESTED, VERSION

SYMBOLS = [symbol for repair in REPAIRS for symbol in repair.symbols]
EXECUTOR = Symbol("lmcache.v1.storage_backend.job_executor.pq_executor", "AsyncPQExecutor")


def test_the_installed_lmcache_is_the_tested_one() -> None:
    assert contract.installed_version() == VERSION
    assert contract.compare(SYMBOLS, contract.root()) == []


def test_every_symbol_that_is_replaced_is_fingerprinted() -> None:
    """A graft's own name, its class, or (for what we add to a class) a sibling that is replaced beside it."""
    for repair in REPAIRS:
        listed = {symbol.qualname for symbol in repair.symbols if symbol.module == repair.module}
        for graft in repair.grafts:
            owner, _, _ = graft.qualname.rpartition(".")
            if owner:
                assert {graft.qualname, owner} & listed, f"{repair.module}:{graft.qualname}"


def test_the_table_holds_no_symbol_that_nothing_uses() -> None:
    assert set(TESTED) == {str(symbol) for symbol in SYMBOLS}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the two files that the tampering tests change, as a package root."""
    for relative in ("v1/storage_backend/job_executor/pq_executor.py", "v1/rpc_utils.py"):
        target = tmp_path / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(contract.root() / relative, target)
    return tmp_path


def test_a_changed_statement_is_found_and_one_elsewhere_is_not(copied: Path) -> None:
    file = copied / "v1/storage_backend/job_executor/pq_executor.py"
    text = file.read_text()
    assert contract.compare([EXECUTOR], copied) == []
    contract._definitions.cache_clear()
    file.write_text(text + "\n\ndef added_below() -> None: ...\n")
    assert contract.compare([EXECUTOR], copied) == []
    contract._definitions.cache_clear()
    file.write_text(text.replace("done.set_result(result)", "done.set_result(None)", 1))
    (mismatch,) = contract.compare([EXECUTOR], copied)
    assert mismatch.expected == TESTED[str(EXECUTOR)]
    assert mismatch.found not in (mismatch.expected, contract.ABSENT)
    contract._definitions.cache_clear()


def test_a_symbol_or_a_module_that_is_gone_is_absent(copied: Path) -> None:
    file = copied / "v1/storage_backend/job_executor/pq_executor.py"
    file.write_text(file.read_text().replace("class AsyncPQExecutor(", "class Renamed("))
    contract._definitions.cache_clear()
    assert contract.fingerprint(EXECUTOR.module, EXECUTOR.qualname, copied) == contract.ABSENT
    assert contract.fingerprint("lmcache.v1.cache_engine", "LMCacheEngine.store", copied) == contract.ABSENT
    contract._definitions.cache_clear()


@pytest.fixture
def other_lmcache(copied: Path, monkeypatch: pytest.MonkeyPatch) -> list[Symbol]:
    """An LMCache of another version in which one symbol has changed and one is gone."""
    file = copied / "v1/storage_backend/job_executor/pq_executor.py"
    file.write_text(file.read_text().replace("done.set_result(result)", "pass", 1))
    rpc = copied / "v1/rpc_utils.py"
    rpc.write_text(rpc.read_text().replace("def get_zmq_rpc_path_lmcache(", "def renamed("))
    contract._definitions.cache_clear()
    monkeypatch.setattr(contract, "root", lambda: copied)
    monkeypatch.setattr(contract, "installed_version", lambda: "0.5.7")
    return [EXECUTOR, Symbol("lmcache.v1.rpc_utils", "get_zmq_rpc_path_lmcache")]


def test_the_error_names_symbol_expected_found_and_remedy(other_lmcache: list[Symbol]) -> None:
    with pytest.raises(ContractError) as raised:
        contract.check(other_lmcache, allow_untested=False)
    text = str(raised.value)
    assert f"lmcache (distribution): expected {VERSION}, found 0.5.7" in text
    for symbol in other_lmcache:
        assert f"{symbol}: expected {TESTED[str(symbol)]}, found " in text
    assert "found absent" in text
    assert f"install lmcache=={VERSION}" in text
    assert "GLM_SGLANG_ALLOW_UNTESTED=1" in text


def test_allow_untested_lets_changes_pass_and_nothing_that_is_gone(other_lmcache: list[Symbol]) -> None:
    changed, gone = other_lmcache
    passed = contract.check([changed], allow_untested=True)
    assert [mismatch.symbol for mismatch in passed] == ["lmcache (distribution)", str(changed)]
    with pytest.raises(ContractError, match="found absent"):
        contract.check([changed, gone], allow_untested=True)


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if not key.startswith("GLM_SGLANG")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"LMCACHE_LOG_LEVEL": "WARNING"} | variables | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


TAMPERED = """
    from glm_connectors.lmcache_repairs import COUNTERS, ContractError, fingerprints, install, installed
    fingerprints.TESTED["{symbol}"] = "0" * 64
    try:
        install()
    except ContractError as error:
        print("refused", "{symbol}" in str(error), installed())
    else:
        print("installed", COUNTERS["untested_symbols"])
"""


def test_install_refuses_and_changes_nothing() -> None:
    done = _python(TAMPERED.format(symbol=EXECUTOR))
    assert done.stdout.split() == ["refused", "True", "False"], done.stderr


def test_install_counts_what_the_variable_lets_pass() -> None:
    done = _python(TAMPERED.format(symbol=EXECUTOR), GLM_SGLANG_ALLOW_UNTESTED="1")
    assert done.stdout.split() == ["installed", "1"], done.stderr
    assert str(EXECUTOR) in done.stderr


def test_install_imports_nothing_and_repairs_what_is_imported_later() -> None:
    done = _python(
        """
        import importlib, inspect, sys
        from glm_connectors.lmcache_repairs import install
        install()
        install()
        for name in ("lmcache", "torch", "sglang", "vllm", "glm_sglang"):
            assert name not in sys.modules, name
        from lmcache.v1.storage_backend.job_executor.pq_executor import AsyncPQExecutor
        module = sys.modules[AsyncPQExecutor.__module__]
        print(AsyncPQExecutor.submit_job.__module__)
        print("class AsyncPQExecutor" in inspect.getsource(module))
        print(importlib.reload(module).AsyncPQExecutor.submit_job.__module__)
        print([name for name in ("sglang", "vllm", "glm_sglang") if name in sys.modules])
        """
    )
    repaired = "glm_connectors.lmcache_repairs.executor"
    assert done.stdout.split("\n")[-5:-1] == [repaired, "True", repaired, "[]"], done.stderr


def test_install_repairs_what_was_imported_before() -> None:
    done = _python(
        """
        from lmcache.v1.storage_backend.job_executor.pq_executor import AsyncPQExecutor
        before = AsyncPQExecutor.submit_job.__module__
        from glm_connectors.lmcache_repairs import install
        install()
        print(before, AsyncPQExecutor.submit_job.__module__)
        """
    )
    upstream = "lmcache.v1.storage_backend.job_executor.pq_executor"
    assert done.stdout.split()[-2:] == [upstream, "glm_connectors.lmcache_repairs.executor"], done.stderr


@pytest.mark.parametrize("level", ["WARNING", "ERROR"])
def test_the_store_signal_is_counted_whatever_the_log_level(level: str) -> None:
    done = _python(
        """
        from glm_connectors.lmcache_repairs import COUNTERS, install
        install()
        import inspect
        from lmcache.v1 import cache_engine
        from glm_connectors.lmcache_repairs.signals import PHRASE
        assert PHRASE in inspect.getsource(cache_engine.LMCacheEngine.store)
        message = "Local cpu memory under pressure so choosing to store only  %d total chunks of KV cache."
        cache_engine.logger.warning(message, 3)
        cache_engine.logger.warning(message, 0)
        cache_engine.logger.warning(message, 0)
        print(COUNTERS["store_zero_chunks"])
        """,
        LMCACHE_LOG_LEVEL=level,
    )
    assert done.stdout.endswith("2\n"), done.stderr
    assert done.stderr.count("total chunks") == (3 if level == "WARNING" else 0)
    assert level == "ERROR" or "(<string>:" in done.stderr  # the caller's line, not ours

"""The doctor: what it says, what it exits with, and that it works where the stack is missing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from glm_sglang import doctor
from glm_sglang.checks import machine, software
from glm_sglang.checks.finding import Finding, not_needed, right, run_python, wrong
from glm_sglang.upstream import pins

CHECKOUT = Path(doctor.__file__).parents[1]


def test_only_what_is_wrong_fails() -> None:
    assert doctor.healthy([right("a", "x"), not_needed("b", "y")])
    assert not doctor.healthy([right("a", "x"), wrong("b", "y", "do z")])


def test_json_is_one_object() -> None:
    answer = json.loads(doctor.as_json("reference", [wrong("a", "x", "do z")]))
    assert answer == {
        "ok": False,
        "platform": "reference",
        "findings": [{"subject": "a", "state": "wrong", "found": "x", "mend": "do z"}],
    }


def quick(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    monkeypatch.delenv("GLM_SGLANG_PLATFORM", raising=False)
    code = doctor.main(["--quick", *argv])
    return code, capsys.readouterr().out


def test_exit_code_says_whether_all_that_is_needed_is_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("versions", "fingerprints"):
        monkeypatch.setattr(software, name, lambda platform: iter([right("all", "fine")]))
    for name in ("devices", "memory", "shared_memory", "limits", "cores_and_numa"):
        monkeypatch.setattr(machine, name, lambda platform: iter(()))
    code, out = quick(monkeypatch, capsys, "--json")
    assert code == 0
    assert json.loads(out)["ok"] is True
    monkeypatch.setattr(software, "python", lambda: iter([wrong("Python", "3.9", "use another")]))
    code, out = quick(monkeypatch, capsys)
    assert code == 1
    assert "Python" in out
    assert "use another" in out
    assert "1 to mend" in out


def test_a_check_that_fails_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> list[Finding]:
        raise OSError("no /proc here")

    monkeypatch.setattr(software, "python", broken)
    code, out = quick(monkeypatch, capsys, "--json")
    rows = {row["subject"]: row for row in json.loads(out)["findings"]}
    assert code == 1
    assert rows["Python"]["state"] == "wrong"
    assert "no /proc here" in rows["Python"]["found"]


def test_wrong_versions_come_with_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"sglang": "0.5.22", "torch": None}
    monkeypatch.setattr(pins, "installed", lambda name: found.get(name, pins.declared()[name].version))
    rows = {finding.subject: finding for finding in software.versions("reference")}
    assert (rows["sglang"].state, rows["sglang"].mend) == ("wrong", "pip install --no-deps 'sglang==0.5.23'")
    assert rows["torch"].state == "wrong"
    assert "not installed" in rows["torch"].found
    assert rows["transformers"].state == "right"


@pytest.mark.parametrize(("platform", "state"), [("reference", "not needed"), ("cuda", "wrong")])
def test_gpu_packages_are_needed_on_a_gpu_only(
    monkeypatch: pytest.MonkeyPatch, platform: str, state: str
) -> None:
    versions = {name: pin.version for name, pin in pins.declared().items() if not pin.extra}
    monkeypatch.setattr(pins, "installed", versions.get)
    rows = {finding.subject: finding.state for finding in software.versions(platform)}
    assert rows["sgl-deep-gemm"] == state


@pytest.mark.parametrize(("platform", "state"), [("reference", "not needed"), ("cuda", "wrong")])
def test_a_missing_gpu_is_wrong_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, platform: str, state: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [finding.state for finding in machine.devices(platform)] == [state]


def test_memory_counts_the_containers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_meminfo", lambda name: 100 * machine.GIB)
    monkeypatch.setattr(machine, "_cgroup_limit", lambda: None)
    assert [f.state for f in machine.memory("reference")] == ["right"]
    monkeypatch.setattr(machine, "_cgroup_limit", lambda: 4 * machine.GIB)
    (finding,) = machine.memory("reference")
    assert finding.state == "wrong"
    assert finding.found.startswith("4.0 GiB")


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    values = {resource.RLIMIT_NOFILE: (1024, 1024), resource.RLIMIT_MEMLOCK: (65536, 65536)}
    monkeypatch.setattr(resource, "getrlimit", values.__getitem__)
    assert [f.state for f in machine.limits("reference")] == ["wrong", "not needed"]
    assert [f.state for f in machine.limits("cuda")] == ["wrong", "wrong"]


def test_a_program_that_crashes_is_an_answer() -> None:
    assert run_python("print('noise'); print('fine')", 30) == (True, "fine")
    ok, said = run_python("import os; os.abort()", 30)
    assert not ok
    assert said
    ok, said = run_python("import time; time.sleep(60)", 0.5)
    assert (ok, said) == (False, "no answer within 0 s") or said == "no answer within 1 s"
    ok, said = run_python("raise SystemExit('glm-sglang: it broke\\n  to mend:  this')", 30)
    assert (ok, said) == (False, "glm-sglang: it broke; to mend:  this")


def test_it_works_where_nothing_is_installed() -> None:
    """Without site-packages there is no torch, no SGLang, not even rich: the doctor says what is missing."""
    for argv in (["--quick", "--json"], ["--quick"]):
        program = (
            f"import sys; sys.path.insert(0, {str(CHECKOUT)!r}); from glm_sglang import doctor; "
            f"sys.exit(doctor.main({argv!r}))"
        )
        done = subprocess.run(
            [sys.executable, "-S", "-c", program], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        if "--json" not in argv:
            assert "to mend" in done.stdout
            continue
        answer: dict[str, Any] = json.loads(done.stdout)
        bad = [row for row in answer["findings"] if row["state"] == "wrong"]
        assert answer["ok"] is False
        assert bad
        assert all(row["mend"] for row in bad)

"""The doctor: what it says, what it exits with, and that it works where the stack is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from glm_sglang import doctor, launch_server
from glm_sglang.checks import machine, software
from glm_sglang.checks.finding import Finding, not_needed, right, run_python, wrong
from glm_sglang.errors import ContractError
from glm_sglang.upstream import pins, rooms

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


def test_nothing_is_wrong_without_what_mends_it() -> None:
    for state, mend in (("wrong", ""), ("wrong", " "), ("right", "do z")):
        with pytest.raises(ValueError, match="a: state"):
            Finding("a", state, "x", mend)  # type: ignore[arg-type]


def run_json(*argv: str, **variables: str) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """What `python -m glm_sglang.doctor --json` prints, checked against its own rules; and its rows by subject."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GLM_SGLANG_")}
    environ["GLM_SGLANG_PLATFORM"] = "reference"
    done = subprocess.run(
        [sys.executable, "-m", "glm_sglang.doctor", "--json", *argv],
        env={**environ, **variables},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert "Traceback" not in done.stderr
    (line,) = done.stdout.splitlines()  # progress goes to stderr
    answer: dict[str, Any] = json.loads(line)
    assert set(answer) == {"ok", "platform", "findings"}
    assert answer["platform"] in ("reference", "cuda", "stock")
    for row in answer["findings"]:
        assert set(row) == {"subject", "state", "found", "mend"}
        assert all(isinstance(value, str) for value in row.values())
        assert row["state"] in ("right", "wrong", "not needed")
        assert row["subject"]
        assert row["found"]
        assert bool(row["mend"]) is (row["state"] == "wrong")
    assert answer["ok"] is all(row["state"] != "wrong" for row in answer["findings"])
    assert done.returncode == (0 if answer["ok"] else 1)
    return answer, {row["subject"]: row for row in answer["findings"]}


def test_the_whole_examination_as_json() -> None:
    """Everything that the package brings is right where its tests run; the machine may be anything."""
    _, rows = run_json()
    brought = {
        "Python",
        "platform",
        "environment variables",
        "upstream fingerprints",
        "NIXL over UCX",
        "Valkey",
        "hooks",
    }
    contract = {pin.name for pin in pins.contract("reference")}
    assert {name: rows[name]["state"] for name in brought | contract} == dict.fromkeys(
        brought | contract, "right"
    )
    assert {"memory", "shared memory", "cores", "open files (ulimit -n)", "CUDA compiler"} <= set(rows)
    assert rows["hooks"]["found"].startswith(f"{len(hooks_of('reference'))} hooks, ")


def hooks_of(platform: Any) -> tuple[Any, ...]:
    return rooms.active(rooms.hooks(), platform, "launcher")


def test_what_is_wrong_as_json() -> None:
    answer, rows = run_json("--quick", GLM_SGLANG_PLATFROM="cuda")
    assert answer["ok"] is False
    assert "GLM_SGLANG_PLATFROM" in rows["environment variables"]["found"]
    assert rows["environment variables"]["mend"] == "change or unset the variable named"


WRONG_VALUES = [
    ("GLM_SGLANG_CACHE_WAIT", "--glm-cache-wait", "soon"),
    ("GLM_SGLANG_CACHE_POOL_GB", "--glm-cache-pool-gb", "much"),
    ("GLM_SGLANG_CACHE_TTL_S", "--glm-cache-ttl-s", "1.5"),
    ("GLM_SGLANG_CACHE_URL", "--glm-cache-url", "redis://x"),
    ("GLM_SGLANG_PREFILL_GRAPH_BUCKETS", "--glm-prefill-graph-buckets", "2k"),
]


@pytest.mark.parametrize(("variable", "flag", "value"), WRONG_VALUES)
def test_a_wrong_value_is_found_and_named_as_it_was_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, flag: str, value: str
) -> None:
    """By the doctor, and by the launcher: the variable where that was set, the flag where that was given."""
    monkeypatch.setenv(variable, value)
    (finding,) = software.variables()
    assert finding.state == "wrong"
    assert finding.found.startswith(variable)
    assert launch_server.main(["--model-path", "/none"]) == launch_server.USAGE_CODE
    said = capsys.readouterr().err
    assert said.startswith(f"glm-sglang: {variable}")
    assert flag not in said
    monkeypatch.setenv(variable, "")  # the launcher hands its flag down
    assert launch_server.main(["--model-path", "/none", flag, value]) == launch_server.USAGE_CODE
    assert capsys.readouterr().err.startswith(f"glm-sglang: {flag}")


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
    rows = {finding.subject: finding for finding in software.versions(platform)}
    assert rows["sgl-deep-gemm"].state == state
    if state == "wrong":
        assert rows["sglang-kernel"].mend.startswith("make setup-gpu")
        with pytest.raises(ContractError, match=r"to mend:  make setup-gpu"):
            pins.check_versions("cuda")


@pytest.mark.parametrize(("platform", "state"), [("reference", "not needed"), ("cuda", "wrong")])
def test_a_missing_gpu_is_wrong_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, platform: str, state: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [finding.state for finding in machine.devices(platform)] == [state]


def test_triton_needs_a_c_compiler_and_pythons_headers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path / "include")})
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    rows = {f.subject: f for f in software.host_compiler("cuda")}
    assert (rows["C compiler"].state, rows["C compiler"].mend) == ("wrong", "apt-get install gcc")
    assert (rows["Python.h"].state, rows["Python.h"].mend) == (
        "wrong",
        f"apt-get install python{version}-dev",
    )
    (tmp_path / "gcc").touch(mode=0o755)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    assert [f.state for f in software.host_compiler("cuda")] == ["right", "right"]
    monkeypatch.setenv("CC", "icc")
    assert next(software.host_compiler("cuda")).found == "CC is 'icc', which is no program"
    assert [f.state for f in software.host_compiler("reference")] == ["not needed"]


NVCC = "#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n"


def test_the_cuda_toolkit_that_deep_gemm_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (finding,) = software.compiler("cuda")
    assert (finding.state, finding.found) == ("wrong", f"no {tmp_path}/bin/nvcc")
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    assert next(software.compiler("cuda")).found == f"{nvcc} V13.0.88"
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    (finding,) = software.compiler("cuda")
    if not Path("/usr/local/cuda").exists():
        assert finding.found.startswith("no CUDA toolkit: CUDA_HOME is not set")
        assert "CUDA_HOME" in finding.mend


def test_memory_counts_the_containers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_meminfo", lambda name: 100 * machine.GIB)
    monkeypatch.setattr(machine, "_cgroup_limit", lambda: None)
    assert [f.state for f in machine.memory("reference")] == ["right"]
    monkeypatch.setattr(machine, "_cgroup_limit", lambda: 4 * machine.GIB)
    (finding,) = machine.memory("reference")
    assert finding.state == "wrong"
    assert finding.found.startswith("4.0 GiB")


def test_the_page_cache_of_a_container_is_not_used_memory(tmp_path: Path) -> None:
    """A limit of 16 GiB, 15 in use, of which 9 + 2 are files that the kernel can drop; shared memory is not."""
    assert machine._cgroup_limit(tmp_path) is None
    stat = {"anon": 3, "file": 12, "shmem": 1, "inactive_file": 9, "active_file": 2, "inactive_anon": 4}
    (tmp_path / "memory.current").write_text(f"{15 * machine.GIB}\n")
    (tmp_path / "memory.stat").write_text("".join(f"{k} {v * machine.GIB}\n" for k, v in stat.items()))
    (tmp_path / "memory.max").write_text(f"{16 * machine.GIB}\n")
    assert machine._cgroup_limit(tmp_path) == 12 * machine.GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert machine._cgroup_limit(tmp_path) is None


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

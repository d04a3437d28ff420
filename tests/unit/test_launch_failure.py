"""The channel on which a child says why it ended: one message, everybody gone, no file left."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

# A launcher with two children that fail at once, and grandchildren that would live on.
_PROGRAM = textwrap.dedent("""
    import multiprocessing, os, subprocess, sys, time
    from glm_sglang import failure, scope
    from glm_sglang.errors import ContractError

    def fail(number):
        failure.die_with_parent()
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        failure.end_process(ContractError(what="rank broke", expected="e", found="f", mend="m"))

    if __name__ == "__main__":
        listener = failure.Listener()
        scope.enter(listener.folder)
        print(listener.folder, flush=True)
        context = multiprocessing.get_context("spawn")
        for number in range(2):
            context.Process(target=fail, args=(number,)).start()
        time.sleep(300)
""")


def run(tmp_path: Path, program: str) -> "subprocess.CompletedProcess[str]":
    script = tmp_path / "program.py"
    script.write_text(program)
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=env,
        check=False,
        start_new_session=True,
    )


def test_the_first_message_ends_everybody(tmp_path: Path) -> None:
    done = run(tmp_path, _PROGRAM)
    assert done.returncode == 1
    assert done.stderr == "glm-sglang: rank broke\n  expected: e\n  found:    f\n  to mend:  m\n"
    # Every process held the pipes of stdout and stderr: that `run` returned means that all of them are gone.
    assert not Path(done.stdout.strip()).exists()


def test_without_a_launcher_the_parent_gets_sglangs_signal(tmp_path: Path) -> None:
    program = _PROGRAM.replace("scope.enter(listener.folder)", "pass").replace("range(2)", "range(1)")
    program = program.replace("subprocess.Popen", "str")
    done = run(tmp_path, program)
    assert done.returncode == -3  # SIGQUIT; SGLang handles it and kills its tree
    assert done.stderr == "glm-sglang: rank broke\n  expected: e\n  found:    f\n  to mend:  m\n"


def test_closing_leaves_nothing(tmp_path: Path) -> None:
    program = "from glm_sglang import failure; failure.Listener().close(); print('closed')"
    done = run(tmp_path, program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


def test_folders_of_killed_launchers_are_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    stale = tmp_path / f"glm-sglang-run-{dead.pid}-abc"
    living = tmp_path / f"glm-sglang-run-{os.getpid()}-abc"
    stale.mkdir()
    living.mkdir()
    run(tmp_path, "from glm_sglang import failure; failure.Listener().close()")
    assert not stale.exists()
    assert living.exists()

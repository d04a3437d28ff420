"""prefill.sh and decode.sh: which parallel flags they add, on how many GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
# Stands for Python: a node of eight GPUs for the layout, and what the server would have been started with.
PYTHON = f"""#!{sys.executable}
import sys
from glm_sglang import layout, platform_choice
if sys.argv[2] != "glm_sglang.layout":
    print("\\n".join(sys.argv[1:]))
    sys.exit()
gpus = {{f"GPU-{{i}}": platform_choice.Device("H200", (9, 0)) for i in range(8)}}
platform_choice._ask_nvml = lambda: (gpus, "")
sys.exit(layout.main(sys.argv[3:]))
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    file = tmp_path / "python"
    file.write_text(PYTHON)
    file.chmod(0o755)
    return file


def run(python: Path, script: str, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "GLM_SGLANG_PLATFORM")}
    return subprocess.run(
        [LAUNCH / script, "MODEL", *argv],
        env={**kept, "PYTHON": str(python), **variables},
        cwd=python.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


PREFILL = ["-m", "glm_sglang.launch_server", "--model-path", "MODEL", "--disaggregation-mode", "prefill"]


def cp_and_ep(gpus: int) -> list[str]:
    cp = ["--enable-prefill-cp", "--cp-strategy", "interleave", "--attn-cp-size", str(gpus)]
    return ["--tp-size", str(gpus), *cp, "--ep-size", str(gpus)]


@pytest.mark.parametrize(
    ("visible", "gpus"), [(None, 8), ("0,1", 2), ("2,3,4,5", 4), ("GPU-7,GPU-0", 2), ("3", 1), ("", 0)]
)
def test_the_visible_gpus_count(python: Path, visible: str | None, gpus: int) -> None:
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = run(python, "prefill.sh", "--port", "1", **variables)
    assert done.stdout.split("\n")[:-1] == [*PREFILL, *(cp_and_ep(gpus) if gpus > 1 else []), "--port", "1"]
    decode = run(python, "decode.sh", **variables).stdout.split()
    assert decode[decode.index("nixl") + 1 :] == (["--tp-size", str(gpus)] if gpus > 1 else [])


@pytest.mark.parametrize(
    "own",
    [
        ("--tp-size", "4"),
        ("--tensor-parallel-size=4",),
        ("--tp", "4"),
        ("--ep", "2"),
        ("--enable-prefill-cp",),
        ("--dp-size", "2"),
        ("--nnodes", "2"),
    ],
)
def test_a_parallel_flag_of_the_users_replaces_the_layout(python: Path, own: tuple[str, ...]) -> None:
    done = run(python, "prefill.sh", *own)
    assert done.stdout.split() == [*PREFILL, *own]
    assert "no parallel flags added" in done.stderr
    assert run(python, "decode.sh", *own).stdout.split()[-len(own) :] == [*own]


def test_a_config_file_counts_as_flags(python: Path) -> None:
    (python.parent / "node.yaml").write_text("tensor-parallel-size: 4\n")
    assert run(python, "prefill.sh", "--config", "node.yaml").stdout.split() == [
        *PREFILL,
        "--config",
        "node.yaml",
    ]


def test_on_the_reference_platform_gpus_do_not_count(python: Path) -> None:
    assert run(python, "prefill.sh", GLM_SGLANG_PLATFORM="reference").stdout.split() == PREFILL


def test_a_flag_that_is_unknown_ends_the_script(python: Path) -> None:
    done = run(python, "prefill.sh", "--tpsize", "4")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown flag --tpsize" in done.stderr


def test_a_stock_decode_server(python: Path) -> None:
    words = run(python, "decode.sh", LAUNCHER="sglang.launch_server").stdout.split()
    assert words[:2] == ["-m", "sglang.launch_server"]

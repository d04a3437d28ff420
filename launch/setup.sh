#!/usr/bin/env bash
# setup.sh VENV GROUP…: makes VENV hold what launch/lock/GROUP.lock names, and this project itself, editable.
# Groups: cpu or gpu, test, lint. Does nothing, in milliseconds, when that is so already.
set -euo pipefail
venv=$1; shift
root=$(cd "$(dirname "$0")/.." && pwd)
say() { printf '\033[1m[setup]\033[0m %s\n' "$*"; }
fail() { printf '[setup] %s\n' "$*" >&2; exit 1; }

# The stamp of a group is its lock's checksum, so that a changed lock installs again.
pending=()
for group in "$@"; do
  lock=$root/launch/lock/$group.lock
  [ -f "$lock" ] || fail "no group '$group'; allowed: cpu, gpu, test, lint"
  # A GPU environment holds all that the reference platform needs.
  if [ "$group" = cpu ] && [ -f "$venv/.glm-sglang-gpu" ]; then lock=$root/launch/lock/gpu.lock; group=gpu; fi
  sum=$(sha256sum < "$lock"); [ "$(cat "$venv/.glm-sglang-$group" 2>/dev/null)" = "$sum" ] || pending+=("$group")
done
project=$(printf '%s ' "$root"; sha256sum < "$root/pyproject.toml")
if [ ${#pending[@]} = 0 ] && [ "$(cat "$venv/.glm-sglang-project" 2>/dev/null)" = "$project" ]; then exit 0; fi

# One at a time: two makes at once would write into each other's packages.
mkdir -p "$venv"; exec 9> "$venv/.glm-sglang-lock"
flock -n 9 || { say "another set-up works on $venv; waiting"; flock 9; }

if [ ! -x "$venv/bin/pip" ]; then
  python=${PYTHON:-}
  for candidate in python3 python3.12 python3.11 python3.13; do
    [ -n "$python" ] && break
    "$candidate" -c 'import sys; sys.exit(not (3,11) <= sys.version_info[:2] <= (3,13))' 2>/dev/null && python=$candidate
  done
  [ -n "$python" ] || fail "no Python 3.11, 3.12 or 3.13 found; install one, or name it: make PYTHON=/path/to/python3.12 …"
  "$python" -c 'import sys; sys.exit(not (3,11) <= sys.version_info[:2] <= (3,13))' ||
    fail "PYTHON=$python is $("$python" -V 2>&1); allowed: 3.11, 3.12, 3.13"
  say "virtual environment at $venv ($("$python" -V))"
  "$python" -m venv "$venv" || fail "that Python can make no virtual environment; on Debian or Ubuntu: apt-get install python3-venv"
fi
free=$(df -Pk "$venv" | awk 'NR==2 {print int($4/1048576)}'); [ "$free" -ge 12 ] || say "only $free GiB free beside $venv; the stack needs 8 (cpu) to 12 (gpu)"
unset PIP_REQUIRE_VIRTUALENV PYTHONDONTWRITEBYTECODE
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
for group in "${pending[@]}"; do
  lock=$root/launch/lock/$group.lock
  say "$group: $(grep -c '==' "$lock") packages (the first time this downloads gigabytes and takes minutes)"
  "${pip[@]}" install --no-deps --progress-bar on -r "$lock" 2>&1 | stdbuf -oL awk -v total="$(grep -c '==' "$lock")" '
    /^Collecting/ {n++; printf "[setup] %d/%d %s\n", n, total, $2; next}
    /^Installing collected/ {print "[setup] installing and compiling"; next}
    /^(ERROR|WARNING|error)/ {print; next}' || fail "pip could not install $lock; the lines above say why. Run the command again to go on"
  sha256sum < "$lock" > "$venv/.glm-sglang-$group"
done
say "this project, editable"
"${pip[@]}" install --quiet --no-deps --no-build-isolation --editable "$root" 2>&1 | grep -E '^(ERROR|error)' || true
"$venv/bin/python" -c 'import glm_sglang, glm_kernels, glm_connectors' || fail "this project did not install into $venv"
printf '%s\n' "$project" > "$venv/.glm-sglang-project"
say "ready"

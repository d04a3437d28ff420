#!/usr/bin/env bash
# Resolves pyproject.toml into the locks beside this file. For developers: needs uv and a package index.
#
#   gpu.lock   the whole stack, for a GPU node          cpu.lock   the reference platform: the same, less what only a GPU uses
#   test.lock  on top of either, for `make test`        lint.lock  on top, for `make lint`
#
# A lock is installed with `pip install --no-deps`: what the packages ask of each other has no common answer (overrides.txt).
set -euo pipefail
cd "$(dirname "$0")"
root=../..
export UV_CUSTOM_COMPILE_COMMAND=launch/lock/lock.sh
resolve() { uv pip compile --quiet --universal --python-version 3.11 --no-emit-package glm-sglang --no-annotate "$@"; }
resolve "$root/pyproject.toml" --extra gpu --override overrides.txt --no-emit-package nixl-cu12 -o gpu.lock
grep -v '^#' gpu_only.txt | sed '/^$/d; s/$/ ; sys_platform == "never"/' > .gpu_only.overrides
resolve "$root/pyproject.toml" --override overrides.txt --override .gpu_only.overrides -c gpu.lock --no-emit-package nixl-cu12 -o cpu.lock
rm .gpu_only.overrides
for group in test lint; do
  resolve --group "$root/pyproject.toml:$group" -c gpu.lock -o $group.full
  grep -vxFf gpu.lock $group.full > $group.lock; rm $group.full
done

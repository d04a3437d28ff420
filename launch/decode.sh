#!/usr/bin/env bash
# A decode node for prefill.sh: decode.sh MODEL [flags of sglang …]. LAUNCHER=sglang.launch_server runs stock SGLang instead.
set -euo pipefail
model=${1:?usage: decode.sh MODEL [flags]}; shift
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || echo 0)
parallel=(); [ "$gpus" -gt 1 ] && parallel=(--tp-size "$gpus")
exec "${PYTHON:-python3}" -m "${LAUNCHER:-glm_sglang.launch_server}" --model-path "$model" --page-size 64 \
  --disaggregation-mode decode --disaggregation-transfer-backend nixl "${parallel[@]}" "$@"

#!/usr/bin/env bash
# A decode node for prefill.sh: decode.sh MODEL [flags of sglang …]. On several GPUs: TP over all that are visible, unless you
# give a parallel flag. LAUNCHER=sglang.launch_server runs stock SGLang instead, of PYTHON=/its/venv/bin/python.
set -euo pipefail
model=${1:?usage: decode.sh MODEL [flags]}; shift
python=${PYTHON:-python3}
layout=$(PYTHONPATH="$(dirname "$0")/..${PYTHONPATH:+:$PYTHONPATH}" "$python" -m glm_sglang.layout decode "$@")
read -ra parallel <<< "$layout"
exec "$python" -m "${LAUNCHER:-glm_sglang.launch_server}" --model-path "$model" --page-size 64 \
  --disaggregation-mode decode --disaggregation-transfer-backend nixl "${parallel[@]}" "$@"

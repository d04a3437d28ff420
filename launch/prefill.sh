#!/usr/bin/env bash
# A GLM-5.x prefill node: prefill.sh MODEL [flags of glm_sglang.launch_server …]. On several GPUs: interleave CP and EP over all
# that are visible, unless you give a parallel flag (--tp-size, --ep-size, …); then yours alone count. Binds to loopback; for a
# node that others reach, add --host ADDRESS.
set -euo pipefail
model=${1:?usage: prefill.sh MODEL [flags]}; shift
python=${PYTHON:-python3}
layout=$(PYTHONPATH="$(dirname "$0")/..${PYTHONPATH:+:$PYTHONPATH}" "$python" -m glm_sglang.layout prefill "$@")
read -ra parallel <<< "$layout"
# NVLink multicast stays off: the MoE kernel and NCCL use peer pointers only.
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
exec "$python" -m glm_sglang.launch_server --model-path "$model" --disaggregation-mode prefill "${parallel[@]}" "$@"

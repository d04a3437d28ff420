#!/usr/bin/env bash
# A GLM-5.x prefill node: prefill.sh MODEL [flags of glm_sglang.launch_server …]; an explicit flag wins over every line here.
# Binds to loopback; for a node that others reach, add --host ADDRESS.
set -euo pipefail
model=${1:?usage: prefill.sh MODEL [flags]}; shift
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || echo 0)
parallel=()
# Interleave CP over all GPUs of the node, experts spread over the same: the article's PCP8+EP8.
if [ "$gpus" -gt 1 ]; then parallel=(--tp-size "$gpus" --enable-prefill-cp --cp-strategy interleave --attn-cp-size "$gpus" --ep-size "$gpus"); fi
# NVLink multicast stays off: the MoE kernel and NCCL use peer pointers only.
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
exec "${PYTHON:-python3}" -m glm_sglang.launch_server --model-path "$model" --disaggregation-mode prefill "${parallel[@]}" "$@"

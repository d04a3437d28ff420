#!/usr/bin/env bash
# The article's node, all five changes: eight GPUs, or four or two. Run on two (stages b and d), not on four or eight yet.
#
#   benchmarks/eight_gpus.sh [--dry-run] [a] [b] [c] [d]        (all four without a name)
#
#   a  one MoE layer over all GPUs and over half of them: MegaMoE, all-gather + GEMMs + reduce-scatter, stock's kernels
#   b  servers with prefill CP and EP over all GPUs: stock, MegaMoE, + graphs, + cache, all; cold prompts, second turns
#   c  exposed communication and idle share of the same servers, from traces
#   d  greedy tokens and KL against stock, every question again from the cache
#
# A stage is one command of less than ten minutes. What it found lies in $SCRATCH/results and is copied to $OUT, else to
# benchmarks/results/MACHINE; a result that is in one of them is not measured again (remove the file to do so). A stage
# that fails is named and leaves NAME.failed.json, or NAME.partial.json when it ran into its limit; the others go on. Exit
# status 1 then, 2 for a machine or a name that cannot be.
#
# GPUS=8|4|2  LAYERS=8  PYTHON=python3  SCRATCH=/tmp/eight_gpus (models, logs)  OUT=folder  SPEED_SECONDS=260 (of b)
# MOE_RUNNER=SGLang's runner of experts where MegaMoE is off (deep_gemm: see ablation_h200.sh), else as SGLang chooses
# STACK_ENV=file: sourced first, where the Python packages are not installed but unpacked somewhere.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd) && cd "$root" || exit 2

dry=; end=; stages=()
for word in "$@"; do
  case $word in
    --dry-run) dry=1 ;;
    a | b | c | d) stages+=("$word") ;;
    *) echo "eight_gpus: $word is no stage; allowed: a, b, c, d, and --dry-run" >&2; exit 2 ;;
  esac
done
[ ${#stages[@]} -gt 0 ] || stages=(a b c d)

# shellcheck source=/dev/null
if [ -n "${STACK_ENV:-}" ]; then set +u; . "$STACK_ENV"; set -u; fi
present=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true)
if [ -z "${GPUS:-}" ]; then
  GPUS=8; for n in 2 4 8; do [ "$present" -ge $n ] && GPUS=$n; done
fi
# Prompt lengths, the most important first. A chunk is 2,048 rows on each GPU.
case $GPUS in
  8) lengths=131072,16384,65536,4096; traced=131072,16384 ;;
  4) lengths=131072,16384,65536,4096; traced=131072,16384 ;;
  2) lengths=65536,16384,4096; traced=65536,16384 ;;
  *) echo "eight_gpus: GPUS is $GPUS, allowed: 8, 4, 2" >&2; exit 2 ;;
esac
python=${PYTHON:-python3}
scratch=${SCRATCH:-/tmp/eight_gpus}
found=$scratch/results
kept=benchmarks/results/${MACHINE:-h200x$GPUS}
model=(--ranks "$GPUS" --layers "${LAYERS:-8}" --experts $((32 * GPUS)) --checkpoints "$scratch/models")
runner=(); [ -z "${MOE_RUNNER:-}" ] || runner=(--moe-runner "$MOE_RUNNER")
failed=()

me=eight_gpus
# shellcheck source=benchmarks/_gpu_script.sh
. "$root/benchmarks/_gpu_script.sh"

have() { # have NAME: whether its result is there
  local folder
  for folder in "$found" "$kept/eight_gpus" ${OUT:+"$OUT/eight_gpus"}; do [ -e "$folder/$1.json" ] && return; done
  return 1
}

# measure NAME SECONDS COMMAND…: its last line that is JSON becomes NAME.json, or NAME.failed.json where it exits otherwise.
measure() {
  local name=$1 seconds=$2 code; shift 2
  if have "$name"; then say "$name.json is there, skipped"; return; fi
  if [ -n "$dry" ]; then limited "$seconds" "$@"; return; fi
  say "$name: $*"
  limited "$seconds" "$@" > "$found/$name.out"; code=$?
  if "$python" - "$found/$name" $code <<'P'
import json, pathlib, sys
name, code = sys.argv[1:]
lines = [line for line in pathlib.Path(name + ".out").read_text().splitlines() if line.startswith("{")]
if not lines:
    sys.exit(1)
json.loads(lines[-1])
pathlib.Path(name + (".json" if code == "0" else ".failed.json")).write_text(lines[-1] + "\n")
P
  then rm -f "$found/$name.partial.json"; [ $code -ne 0 ] || rm -f "$found/$name.failed.json"
  else say "$name: no result"; [ $code -ne 0 ] || code=1; fi
  [ $code -eq 0 ] || { say "$name FAILED with status $code$([ $code -eq 124 ] && echo ", its limit of $seconds s")"; failed+=("$name"); }
}

server() { # server NAME SECONDS FLAGS…: benchmarks.moe_server, which ends itself before the limit does
  local name=$1 seconds=$2; shift 2
  measure "$name" "$seconds" "$python" -m benchmarks.moe_server "${model[@]}" --deadline $((seconds - 30)) "${runner[@]}" \
    --logs "$scratch/logs" --out "$found/$name.partial.json" --json "$@"
}

layer() { # layer RANKS SECONDS
  measure "layer_ep$1" "$2" "$python" -m torch.distributed.run --nproc-per-node "$1" -m benchmarks.moe_layer \
    --tokens 8192,2048,16384,4096,1024 --repeat 20 --json
}

stage_a() {
  say_stage a 330 240 "MoE layer at EP$GPUS$([ "$GPUS" -gt 2 ] && echo " and EP$((GPUS / 2))"), 1k to 16k tokens a rank; the servers' checkpoint is written beside"
  # The checkpoint costs the CPU a minute or two; the layer is timed in CUDA graphs, which do not feel it.
  local writing=
  if ! have node || ! have exposed; then
    beside checkpoint 320 "$python" -m benchmarks.moe_server "${model[@]}" --parts checkpoint
    writing=${!:-}
  fi
  layer "$GPUS" 180
  [ "$GPUS" -eq 2 ] || layer $((GPUS / 2)) 140
  [ -z "$writing" ] || wait "$writing" || { say "checkpoint FAILED, see $scratch/logs/checkpoint.log"; failed+=(checkpoint); }
}

stage_b() {
  say_stage b 540 430 "five servers with prefill CP$GPUS and EP$GPUS: cold prompts of $lengths tokens, second turns"
  # Kernels compile side by side while servers start; on a warm cache it is a few seconds.
  have node || beside prewarm 200 "$python" -m benchmarks._prewarm
  server node 540 --parts node --lengths "$lengths" --repeat 6 --discard 1 --speed-seconds "${SPEED_SECONDS:-260}"
  wait
}

stage_c() {
  say_stage c 330 240 "the same five servers, traced: prompts of $traced tokens"
  server exposed 330 --parts exposed --lengths "$traced" --speed-seconds 140
}

stage_d() {
  say_stage d 330 220 "five servers of a small model, prefill CP$GPUS and EP$GPUS: answers against stock's"
  server same 330 --parts same --lengths 32768
}

say_stage() { # NAME LIMIT ESTIMATE WORDS
  local line="stage $1: $4; estimated $3 s, at most $2 s"
  if [ -n "$dry" ]; then echo "$line"; else say "$line"; fi
}

if [ -n "$dry" ]; then
  echo "GPUS=$GPUS; results to ${OUT:-$kept}; a dry run: nothing is started"
  for stage in "${stages[@]}"; do "stage_$stage"; done
  limited 30 "$python" -m benchmarks.report.node "$found/*.json" -o "${OUT:-$kept}/eight_gpus.json"
  exit 0
fi

mkdir -p "$found" "$scratch/logs" "$scratch/models"
stack "$GPUS" || exit 2
# Results that came back from an earlier machine count here, too.
for file in "$kept"/eight_gpus/*.json ${OUT:+"$OUT"/eight_gpus/*.json}; do
  case $file in *.failed.json | *.partial.json) continue ;; esac
  [ -e "$file" ] && [ ! -e "$found/${file##*/}" ] && cp "$file" "$found/"
done
for stage in "${stages[@]}"; do "stage_$stage"; done

to=${OUT:-$kept}
mkdir -p "$to/eight_gpus" && cp "$found"/*.json "$to/eight_gpus/" 2>/dev/null
results=()
for name in "layer_ep$GPUS" "layer_ep$((GPUS / 2))" node exposed same; do
  for file in "$found/$name.json" "$found/$name.failed.json" "$found/$name.partial.json"; do
    if [ -e "$file" ]; then results+=("$file"); break; fi
  done
done
if [ ${#results[@]} -gt 0 ]; then
  "$python" -m benchmarks.report.node "${results[@]}" -o "$to/eight_gpus.json" || failed+=(report)
fi
if [ -n "${OUT:-}" ]; then # elsewhere the logs stay where they are
  logs_to "$OUT" 300000
fi
if [ ${#failed[@]} -gt 0 ]; then say "FAILED: ${failed[*]} (logs: $scratch/logs)"; exit 1; fi
say "done: $to"

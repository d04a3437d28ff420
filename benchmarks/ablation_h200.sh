#!/usr/bin/env bash
# The ablation on one H200 or two, in one visit of LIMIT seconds: three cases on arms that start once, side by side.
#
#   benchmarks/ablation_h200.sh [--dry-run]
#
#   cold_2048  prompts that are new, each one step of 2,048 rows on each GPU of prefill
#   cold_long  prompts that are new, as long as the GPU's KV holds (LONG, 64k)
#   two_turn   six chats of a quarter of that; the KV holds four, so all first turns are gone when the second ones come
#
# GPUS=2: prefill CP2 and EP2 over both, decode on the second one beside it, one for all arms. PREFILL=1: prefill on the first GPU
# alone (then MegaMoE has nobody to exchange with, and its row says so). GPUS=1: one server, no decode. REFERENCE=1: in miniature,
# on a CPU.
#
# STOCK_PATH=folder that stock's prefill finds first: its sgl-deep-gemm, 0.2.3.post2. Without it stock finds this project's 0.2.5,
# which has no fp8_mqa_logits, and answers nothing; without stock nothing is measured: refused at the start.
# LIMIT=480  LAYERS=6  EXPERTS=32 a GPU of prefill  ROUNDS=6  OUT=folder, else benchmarks/results/MACHINE  SCRATCH=/tmp/ablation_h200
# ARMS="none graphs cache all", those beside stock (each that can be)  WEIGHTS=random|dummy (dummy: none on disk, and with more
# than 8 experts not what routing would do)  LONG=65536 tokens  LONGS=2 of them a round  QUEUE=32 prompts of one step a round
# The model at its own depth on one GPU, GLM-5.3's 3 dense layers and 21 indexers in it:
#   STOCK_PATH=… GPUS=1 LAYERS=78 EXPERTS=8 WEIGHTS=dummy ARMS=all LONG=24576 LONGS=1 QUEUE=16 LIMIT=500
# OWN_FLAGS  GRAPHS=auto|strict  PYTHON=python3
# STOCK_FLAGS=instead of what stock's prefill gets besides: of PREFILL=2 the parallel flags, else SGLang's prefill graphs
# MOE_RUNNER=SGLang's runner of experts where MegaMoE is off, of stock's too: on one GPU deep_gemm (a step of 2,048 rows of 78
# layers takes stock 200 ms with it, 247 with the one that SGLang chooses: results/h200/gpu_idle_78_layers*.json), on two as SGLang
# chooses: compare both there first
# STACK_ENV=file: sourced first, where the Python packages are not installed but unpacked somewhere.
#
# $OUT gets NAME.json, or NAME.json.partial, as whole, of the rounds until it was interrupted; NAME.jsonl, the rounds, from which
# the next run of this commit on such a machine goes on when it lies there or in benchmarks/results/MACHINE; logs.tgz. NAME is
# ablation; ablation_LAYERS_layers for another depth or named ARMS. Exit status: 0, 1 for no result, 2 for what cannot be.
set -uo pipefail
began=$SECONDS
root=$(cd "$(dirname "$0")/.." && pwd) && cd "$root" || exit 2
# shellcheck disable=SC2034  # of _gpu_script.sh
me=ablation_h200
dry=
case "$*" in
  "") ;;
  --dry-run) dry=1 ;;
  *) echo "$me: $* is not known; allowed: --dry-run" >&2; exit 2 ;;
esac
# shellcheck source=/dev/null
if [ -n "${STACK_ENV:-}" ]; then set +u; . "$STACK_ENV"; set -u; fi
# shellcheck source=benchmarks/_gpu_script.sh
. "$root/benchmarks/_gpu_script.sh"

GPUS=${GPUS:-2}; prefill=${PREFILL:-$GPUS}; limit=${LIMIT:-480}; reference=${REFERENCE:-}
case $GPUS/$prefill in
  1/1 | 2/1 | 2/2) ;;
  *) echo "$me: GPUS is $GPUS and PREFILL $prefill, allowed: GPUS 1 or 2, PREFILL 1 to GPUS" >&2; exit 2 ;;
esac
weights=${WEIGHTS:-random}
case $weights in
  random | dummy) ;;
  *) echo "$me: WEIGHTS is $weights, allowed: random, dummy" >&2; exit 2 ;;
esac
if [ -z "$reference" ] && [ ! -d "${STOCK_PATH:-}/deep_gemm" ]; then
  echo "$me: STOCK_PATH is ${STOCK_PATH:-not set}; it must be a folder with the deep_gemm of stock SGLang (sgl-deep-gemm" \
    "0.2.3.post2, pip install --no-deps --target): under this project's 0.2.5 stock answers nothing" >&2; exit 2
fi
python=${PYTHON:-python3}
scratch=${SCRATCH:-/tmp/ablation_h200}
kept=benchmarks/results/${MACHINE:-$([ "$GPUS" -eq 1 ] && echo h200 || echo "h200x$GPUS")}
to=${OUT:-$kept}

# A text and its question and roles are at most 80 tokens longer than --lengths says: a prompt stays within its steps.
room=80
if [ -z "$reference" ]; then
  platform=gpu; step=$((2048 * prefill)); long=${LONG:-65536}; longs=${LONGS:-2}; queue=${QUEUE:-32}
  if [ "$long" -lt 20480 ]; then
    echo "$me: LONG is $long; it must be at least 20480, or the KV keeps the first turns" >&2; exit 2
  fi
  turn=$((long / 4)); sessions=6; held=$((long + 4096)); layers=${LAYERS:-6}; experts=${EXPERTS:-$((32 * prefill))}
  model=$scratch/models/wide
  # The model of _wide_model.in_proportion. A token is a BF16 latent in each layer and an index key with its scale in some.
  dense=$((layers < 52 ? 1 : layers / 26)); indexers=$((dense + (layers - dense) / 4))
  token=$((layers * 1152 + indexers * 132))
  # The chats twice over; 4 GiB at least.
  pool=$(((2 * sessions * (turn + 256) * token >> 30) + 1)); pool=$((pool > 4 ? pool : 4))
  # Servers share the GPUs: tokens bound the KV, the fraction leaves room for what the others take.
  common="--page-size 64 --mem-fraction-static 0.9 --sampling-backend pytorch --watchdog-timeout 400 --skip-server-warmup"
  common+=" --disable-custom-all-reduce --enforce-disable-flashinfer-allreduce-fusion --cuda-graph-backend-decode disabled"
  common+=" --max-running-requests 16 --sleep-on-idle --enable-metrics --enable-cache-report"
  [ "$weights" = random ] || common+=" --load-format dummy"
  flags="$common --max-total-tokens $held --max-prefill-tokens $step --prefill-max-requests 1"
  decode="$common --max-total-tokens $((4 * held))"
  own="--glm-cache-pool-gb $pool --glm-prefill-graph-buckets 512,$step"
  # The same buckets as ours has. Under prefill CP with EP stock has no graphs.
  stock="--cuda-graph-backend-prefill breakable --cuda-graph-bs-prefill 512 $step"
  runner=$([ "$GPUS" -ne 1 ] || echo deep_gemm); runner=(--moe-runner "${MOE_RUNNER-$runner}")
  warm=(--rows 2048,512,8,1 --stock "$STOCK_PATH")
  [ "${runner[1]}" != deep_gemm ] || warm+=(--experts $((experts / prefill)))
  name=ablation; [ "$layers${ARMS:-}" = 6 ] || name=ablation_${layers}_layers
else
  platform=cpu; step=512; long=1024; turn=384; sessions=6; queue=2; longs=2; held=1280
  model=$scratch/models/tiny
  common="--dtype float32 --enable-cache-report --skip-server-warmup --sleep-on-idle"
  flags="$common --max-total-tokens $held"; decode="$common"; own="--glm-cache-pool-gb 1"; stock=; runner=(); name=ablation
fi
read -ra named <<< "${ARMS:-}"
arms=(--graphs "${GRAPHS:-auto}")
if [ "$prefill" -eq 2 ]; then
  cp="--tp-size 2 --ep-size 2 --enable-prefill-cp --cp-strategy interleave --attn-cp-size 2"
  own="$cp $own"; stock=$cp
  # Stock's CP has kernels that only CUDA has.
  [ -z "$reference" ] || stock="--tp-size 2 --ep-size 2"
  # Graphs under prefill CP are captured no other way.
  [ -n "$reference" ] || arms=(--graphs "${GRAPHS:-strict}")
fi
flags="$flags --chunked-prefill-size $step"
layout=(--layout single)
if [ "$GPUS" -eq 2 ]; then
  layout=(--layout pair --share-decode "--decode-flags=$decode")
  [ -n "$reference" ] || layout+=(--prefill-devices "$([ "$prefill" -eq 2 ] && echo 0,1 || echo 0)" --decode-devices 1)
fi
[ ${#named[@]} -eq 0 ] || arms+=(--arms "${named[@]}")
[ -z "${STOCK_PATH:-}" ] || arms+=(--stock-path "$STOCK_PATH")

left() { # left SECONDS: what remains of the limit less these, one at least
  local seconds=$((limit - $1 - (SECONDS - began)))
  [ -z "$dry" ] || seconds=$((limit - $1))
  echo $((seconds > 1 ? seconds : 1))
}

write_model() {
  if [ -n "$reference" ]; then
    limited "$(left 30)" "$python" -m glm_sglang.tiny_model "$model" --dtype fp8
  else
    local bare=()
    [ "$weights" = random ] || bare=(--no-weights)
    limited "$(left 30)" "$python" -m benchmarks._wide_model "$model" --layers "$layers" --experts "$experts" "${bare[@]}"
  fi
}

fit() { # before any server starts; a pair's are tested by their sizes
  if [ -n "$reference" ] || [ "$GPUS" -ne 1 ]; then return 0; fi
  # Without ARMS: none, graphs, cache and all.
  limited 30 "$python" -m benchmarks._fit --config "$model/config.json" --tokens $held --step $step --buckets 512,$step \
    --servers $((1 + (${#named[@]} ? ${#named[@]} : 4)))
}

ablation() {
  # After --seconds the round that has begun is asked of every arm (30 s at most were seen), then all of them end.
  limited "$(left 20)" "$python" -m benchmarks.ablation --model "$model" --platform $platform "${layout[@]}" "${arms[@]}" "${runner[@]}" \
    "--flags=$flags" "--own-flags=$own ${OWN_FLAGS:-}" "--stock-flags=${STOCK_FLAGS:-$stock}" \
    --start together --between running --start-seconds "$(left 130)" --seconds "$(left 50)" --rounds "${ROUNDS:-6}" \
    --bytes-per-token 1 --answer-tokens 2 \
    --case "cold_2048: --workload long_context --lengths $((step - room)) --sessions $queue --concurrency 8" \
    --case "cold_long: --workload long_context --lengths $((long - room)) --sessions $longs --concurrency 2" \
    --case "two_turn: --workload two_turn --turns-apart --sessions $sessions --prompt-tokens $((turn - room)) \
--added-tokens $((room + 128)) --concurrency 3 --label 'turn 2'" \
    --logs "$scratch/logs" --partial "$to/$name.json.partial" -o "$scratch/$name.jsonl" --json
}

if [ -n "$dry" ]; then
  echo "GPUS=$GPUS, prefill on $prefill; results to $to; at most $limit s; a dry run: nothing is started"
  [ -n "$reference" ] || beside prewarm 180 "$python" -m benchmarks._prewarm "${warm[@]}"
  write_model
  fit
  ablation
  exit 0
fi

mkdir -p "$scratch/logs" "$scratch/models" "$to"
# /health answers once a server is up, not after a token of its own; servers that start side by side change each other's memory.
export SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=false
prewarm=
if [ -z "$reference" ]; then
  more=(); [ "$GPUS" -eq 1 ] || more=(nixl sglang_router)
  stack "$GPUS" "${more[@]}" || exit 2
  # Kernels compile while the model is written and servers start; with warm caches it is a few seconds.
  beside prewarm 180 "$python" -m benchmarks._prewarm "${warm[@]}"
  prewarm=$!
else
  export GLM_SGLANG_PLATFORM=reference
fi
for folder in "$kept" "$to"; do # rounds that came back from an earlier visit
  if [ -e "$folder/$name.jsonl" ] && [ ! -e "$scratch/$name.jsonl" ]; then cp "$folder/$name.jsonl" "$scratch/"; fi
done
rm -f "$to/$name.json.partial"
code=1; fits=0
if ! write_model > "$scratch/logs/model.log" 2>&1; then
  say "no model, see model.log"
elif fit > "$scratch/logs/fit.log" 2>&1 || fits=$?; [ $fits -eq 2 ]; then
  say "$(tail -n 1 "$scratch/logs/fit.log"): set LAYERS, EXPERTS, LONG or ARMS"; code=2
else
  [ $fits -eq 0 ] || say "whether the servers fit is not known, _fit ended with $fits: $(tail -n 1 "$scratch/logs/fit.log")"
  say "the model is there after $((SECONDS - began)) s; measuring for at most $(left 50) s"
  ablation > "$scratch/ablation.out" 2> >(tee "$scratch/logs/ablation.log" >&2); code=$?
fi
[ -z "$prewarm" ] || { kill "$prewarm"; wait "$prewarm"; } 2> /dev/null
result=$(grep '^{' "$scratch/ablation.out" 2> /dev/null | tail -n 1)
if [ $code -eq 0 ] && [ -n "$result" ]; then
  echo "$result" > "$to/$name.json"; rm -f "$to/$name.json.partial"
else
  [ $code -eq 2 ] || code=1
  say "no result$([ ! -e "$to/$name.json.partial" ] || echo "; what there was is in $name.json.partial")"
fi
if [ -n "${OUT:-}" ]; then # elsewhere rounds and logs stay where they are
  [ ! -e "$scratch/$name.jsonl" ] || cp "$scratch/$name.jsonl" "$OUT/"
  logs_to "$OUT" 200000
fi
say "done in $((SECONDS - began)) s: $to"
exit $code

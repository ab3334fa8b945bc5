#!/usr/bin/env bash
# What has to be known of one GPU, most informative first, in calls of five to seven minutes; the project need not be installed.
#
#   UNTIL=330 bash tools/gpu/run.sh smoke bench             attention beside flash, cuDNN and FlexAttention, 2k to 64k; decoding
#   UNTIL=330 bash tools/gpu/run.sh training modalities     steps of 125M models; vision transformers and DNA decoders
#   UNTIL=420 bash tools/gpu/run.sh smoke check tests       every kernel against float64; the project's own tests on CUDA
#   bash tools/gpu/run.sh recipe shipped       a run by the DeepSpeed launcher, and weights of the zoo at 256 to 16k tokens (3 minutes)
#   bash tools/gpu/run.sh sweep                blocks, warps and stages of every kernel (8 minutes)
#   bash tools/gpu/run.sh models               three models of 10M parameters trained for the same seconds (5 minutes)
#   bash tools/gpu/run.sh sanitize             compute-sanitizer's memcheck and racecheck (4 minutes)
#   DEVICE=cpu bash tools/gpu/run.sh smoke check bench training recipe modalities shipped models tests     a rehearsal, each phase in small, kernels interpreted
#
# Phases append to files in $OUT as they go. Where smoke fails nothing else is tried; the failure of another phase does not stop
# the next, and is the exit code. Each has its own limit, and UNTIL (seconds from the start) is that of all: a phase gets what is
# left. Most of the time is the compiler's, 1.3 s a kernel: on an H200 with 16 cores smoke took 40 s, bench 260 and recipe 130.
# A machine that has compiled nothing yet takes kernels from cache.tgz.* beside this file, which an earlier call left in $OUT, and
# peers of the benchmark from wheels in whl/ (flash-linear-attention, fla-core, goat-attention, liger-kernel, deepspeed and what it
# needs).
set -u
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 PYTHONWARNINGS=ignore CUBLAS_WORKSPACE_CONFIG=:4096:8 MPLBACKEND=Agg TOKENIZERS_PARALLELISM=false
HERE=$(cd "$(dirname "$0")" && pwd)
PROJECT=${PROJECT:-$(cd "$HERE/../.." && pwd)}
OUT=${OUT:-$PROJECT/gpu-out}; mkdir -p "$OUT"
PY=${PY:-python3}
DEVICE=${DEVICE:-cuda}
CORES=$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 8); JOBS=$(( CORES > 12 ? 12 : CORES ))
export TRITON_CACHE_DIR=/tmp/triton-cache TRITON_STORE_BINARY_ONLY=1 TORCHINDUCTOR_CACHE_DIR=/tmp/inductor-cache
unset TRITON_INTERPRET
SMALL=()  # check.py's options where Triton interprets
[ "$DEVICE" = cpu ] && export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 && SMALL=(--length 70 --tile 16 --repeat 1)
cd "$PROJECT" || exit 9
say() { printf '\n=== %s  [%ds]\n' "$*" "$SECONDS" | tee -a "$OUT/log.txt"; }
left() { local rest=$(( ${UNTIL:-100000} - SECONDS )); echo $(( rest < $1 ? (rest > 1 ? rest : 1) : $1 )); }  # of a limit in seconds
FAILED=0  # whether anything has; the exit code
# phase LIMIT command…: its output to the log and the screen, and its exit code
phase() {
  local limit status; limit=$(left "$1"); shift
  timeout -k 10 "$limit" "$@" 2>&1 | tee -a "$OUT/log.txt"
  status=${PIPESTATUS[0]}; say "exit $status of: $*"
  [ "$status" = 0 ] || FAILED=1
}

restore() {  # kernels compiled by an earlier call, peers of the benchmark
  ls "$HERE"/cache.tgz.* >/dev/null 2>&1 && [ ! -d $TRITON_CACHE_DIR ] && cat "$HERE"/cache.tgz.* | tar xz -C /tmp && say "kernels restored: $(ls $TRITON_CACHE_DIR | wc -l)"
  if ls "$HERE"/whl/*.whl >/dev/null 2>&1 && [ ! -d /tmp/site ]; then
    $PY -m pip install -q --no-index --no-deps --no-compile --target /tmp/site "$HERE"/whl/*.whl || say "wheels not installed"
  fi
  export PYTHONPATH="$PROJECT:/tmp/site${PYTHONPATH:+:$PYTHONPATH}"
}
keep_cache() {  # binary only, some 45 KiB a kernel, in files of 15 MB
  [ -d $TRITON_CACHE_DIR ] || return 0
  rm -f "$OUT"/cache.tgz.*
  (cd /tmp && find triton-cache -type f \( -name '*.cubin' -o -name '*.json' \) -print0 | tar cz --null -T - | split -b 15000000 - "$OUT/cache.tgz.") 2>/dev/null
}

smoke() {
  say smoke
  rm -f "$OUT/check.jsonl"
  phase 60 $PY - <<'P'
import importlib, os, platform, shutil, sys, torch, triton
from triton import knobs
print(platform.python_version(), "torch", torch.__version__, "triton", triton.__version__, "cuda", torch.version.cuda, "cudnn", torch.backends.cudnn.version())
gpu = torch.cuda.is_available()
print(*((torch.cuda.get_device_name(), torch.cuda.get_device_capability()) if gpu else ("no GPU",)), "cc:", shutil.which("gcc") or shutil.which("cc"), "ptxas", knobs.nvidia.ptxas.path, knobs.nvidia.ptxas.version)
print({k: v for k, v in os.environ.items() if k.startswith(("TRITON", "PTXAS", "TORCH", "CUDA"))})
import hashlib
from triton.runtime.cache import triton_key
print("kernels are kept under the Triton", hashlib.sha256(triton_key().encode()).hexdigest()[:12])
failed = []
for name in ("zoo", "tests.device", "tools.benches.attention", "modalities.text", "tools.bench", "tools.benches.models", "tools.gpu.cases"):
    try:
        module = importlib.import_module(name)
        print("ok  ", name, getattr(module, "__file__", None) or list(getattr(module, "__path__", [])))
    except Exception as error:  # noqa: BLE001
        failed.append(name)
        print("FAIL", name, type(error).__name__, error)
import zoo
print(len(zoo.list_models("text_*_125m")), "text models of 125M; installed:", {n: importlib.util.find_spec(n) is not None for n in ("deepspeed", "fla", "goat", "flash_attn", "liger_kernel", "timm", "pytest", "xdist", "typer", "rich")})
if gpu:  # two ceilings: a large product, a large copy
    from triton.testing import do_bench
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    print("matmul", round(2 * 8192**3 / do_bench(lambda: a @ b, return_mode="median") / 1e9), "TFLOP/s;", end=" ")
    x = torch.empty(2**32, dtype=torch.int8, device="cuda")
    print("copy", round(2 * x.numel() / do_bench(lambda: x.clone(), return_mode="median") / 1e9, 2), "TB/s")
sys.exit(bool(failed))
P
  [ $FAILED = 0 ] || return
  say "one forward and backward of each kernel against float64"
  if [ "$DEVICE" = cpu ]; then
    phase 150 $PY "$HERE/check.py" --quick --widths 16 --dtypes float32 "${SMALL[@]}" --out "$OUT/check.jsonl"
    return
  fi
  side_by_side 150 7 --quick
  read_checks
}
# side_by_side LIMIT N OPTIONS…: check.py's cases in N processes, which share the GPU, compile side by side and leave their
# kernels for everything after; each case is told, whatever the kernels' own check at first use would say.
side_by_side() {
  local i pids=() limit=$1 n=$2; shift 2
  for i in $(seq 0 $((n-1))); do
    PRIORZOO_SELF_CHECK=0 timeout -k 5 "$(left "$limit")" $PY "$HERE/check.py" "$@" --part $i/$n "${SMALL[@]}" --out "$OUT/check.jsonl" > >(grep -v '^ok') 2>&1 &
    pids+=($!)
  done
  for i in "${!pids[@]}"; do
    wait "${pids[$i]}" || { say "exit $? of part $i/$n: $*"; FAILED=1; }  # a process that is lost leaves no line of its cases
  done
}
read_checks() {  # what the processes found, whatever time is left
  $PY "$HERE/check.py" --read "$OUT/check.jsonl" | tee -a "$OUT/log.txt"
  [ "${PIPESTATUS[0]}" = 0 ] || FAILED=1
}
check() {  # all cases, and the kernels' own check of every dtype
  local first=64,128 second=float16,float32 limit=200
  [ "$DEVICE" = cpu ] && first=16 second=float32 limit=400
  say "check: bfloat16 at $first, $second at ${first%%,*}"
  side_by_side $limit "$JOBS" --widths $first --dtypes bfloat16
  side_by_side $limit "$JOBS" --widths ${first%%,*} --dtypes $second
  read_checks
  [ "$DEVICE" = cpu ] || phase $limit $PY -m zoo doctor
  keep_cache
}
attention() { local limit=$1; shift; phase "$limit" $PY tools/bench.py attention --commit "${COMMIT:-unknown}" "$@"; }
bench() {
  if [ "$DEVICE" = cpu ]; then
    attention 300 --device cpu --lengths 64,256 --decode 512 --without flex,dense --seconds 0.01 --minutes 3 --out "$OUT/attention.json"
    return
  fi
  say "bench: kernels compiled side by side, then measured alone"
  local method width
  for method in goat ggd alibi cable; do for width in 64 128; do
    PRIORZOO_SELF_CHECK=0 timeout -k 5 "$(left 100)" $PY tools/bench.py attention --device cuda --methods $method --width $width --lengths 2048,65536 --decode 32768 --without flex,dense --seconds 0.001 > /tmp/compiled.$method.$width.txt 2>&1 &
  done; done; wait
  say "without FlexAttention, which compiles for seconds at every shape, then it alone"
  attention 190 --device cuda --lengths 2048,4096,8192,16384,65536 --decode 32768,524288 --without flex,dense --seconds 0.25 --minutes 2.8 --out "$OUT/attention.json"
  attention 60 --device cuda --methods ggd --lengths 4096 --width 64 --decode none --without paged,dense --minutes 0.9 --out "$OUT/attention_flex.json"
  keep_cache
}
sweep() {
  say sweep
  phase 150 $PY "$HERE/sweep.py" --warm "$JOBS" --minutes 2 --variants table,bare,parametric
  phase 300 $PY "$HERE/sweep.py" --minutes 4.5 --variants table,bare,parametric --out "$OUT/sweep.jsonl"
  keep_cache
}
training() {
  say "training: steps of models of 125M"
  if [ "$DEVICE" = cpu ]; then
    phase 80 $PY tools/bench.py training --engine torch --device cpu --model tiny --contexts 64 --seconds 0.1 --methods rope,ggd_ssmax --commit "${COMMIT:-unknown}" --out "$OUT/training.json"
    return
  fi
  phase 110 $PY tools/bench.py training --engine torch --contexts 2048,16384 --seconds 3 --methods rope,alibi,goat,ggd_ssmax --commit "${COMMIT:-unknown}" --out "$OUT/training.json"
  keep_cache
}
recipe() {  # as the README has it, then on from its last checkpoint, then measured beyond its context
  say "recipe: text.ggd_ssmax_tiny by the DeepSpeed launcher"
  local run steps=200
  run=$(mktemp -d)
  [ "$DEVICE" = cpu ] && steps=4 && export DS_ACCELERATOR=cpu
  local train=($PY -m deepspeed.launcher.runner --num_gpus 1 recipes/train.py text.ggd_ssmax_tiny --run-dir "$run")
  phase 120 "${train[@]}" --set train.steps=$steps --set train.save_every=$((steps/2))
  phase 60 "${train[@]}" --set train.steps=$((2*steps)) --set train.save_every=$((steps/2)) --resume auto
  phase 60 $PY recipes/evaluate.py "$run" passkey --lengths 256,1024 --samples 8 --out "$run/measured"
  cp "$run/metrics.jsonl" "$OUT/recipe.jsonl"
  unset DS_ACCELERATOR
}
modalities() {
  say "vision transformers and DNA decoders of each method, as ratios"
  local vision=(--methods ggd2d_separable,ggd_goat,goat,lookhere,rope2d_axial,learned --commit "${COMMIT:-unknown}") dna=(--methods rope,goat,ggd_goat --commit "${COMMIT:-unknown}")
  if [ "$DEVICE" = cpu ]; then
    phase 100 $PY tools/bench.py vision --model tiny --size 96 --memory-size 96 --seconds 0.1 "${vision[@]}" --out "$OUT/vision.json"
    phase 100 $PY tools/bench.py dna --model tiny --context 128 --seconds 0.1 "${dna[@]}" --out "$OUT/dna.json"
    return
  fi
  phase 70 $PY tools/bench.py vision --device cuda --model base --size 1024 --batch 4 --seconds 1 "${vision[@]}" --out "$OUT/vision.json"
  phase 50 $PY tools/bench.py dna --device cuda --batch 8 --seconds 1 "${dna[@]}" --out "$OUT/dna.json"
  keep_cache
}
shipped() {  # weights of the zoo, far beyond their context of 256
  say "shipped weights"
  local lengths=256,4096,16384
  [ "$DEVICE" = cpu ] && lengths=256
  phase 90 $PY recipes/evaluate.py text_ggd_goat_ssmax_tiny.facts text_goat_ssmax_tiny.facts passkey,perplexity --lengths $lengths --samples 16 --out "$(mktemp -d)"
}
models() {
  say "models of 10M parameters"
  if [ "$DEVICE" = cpu ]; then
    phase 340 $PY "$HERE/train.py" --models text_rope_tiny,text_ggd_ssmax_tiny --seconds 5 --context 64 --tokens 256 --lengths 64,128 --megabytes 1 --out "$OUT/train.jsonl"
    return
  fi
  phase 340 $PY "$HERE/train.py" --seconds "${SECONDS_EACH:-80}" --out "$OUT/train.jsonl"
}
tests() {
  say tests
  local plugins=()  # which a bare machine may lack
  $PY -c "import xdist" 2>/dev/null && plugins+=(-n "$JOBS" --dist worksteal)
  $PY -c "import pytest_timeout" 2>/dev/null && plugins+=(--timeout 120)
  local files=(tests/zoo/test_triton_*.py tests/zoo/test_paged.py tests/zoo/test_dispatch.py tests/zoo/test_selfcheck.py tests/gpu)
  if [ "$DEVICE" = cpu ]; then
    phase 60 $PY -m pytest -p no:cacheprovider --collect-only -qq "${files[@]}"  # whether they need what is not here
    phase 200 $PY -m pytest -p no:cacheprovider "${plugins[@]}" -m "not slow" tests/gpu
    return
  fi
  PRIORZOO_TEST_DEVICE=cuda phase 360 $PY -m pytest -q -p no:cacheprovider "${plugins[@]}" "${files[@]}"
  keep_cache
}
sanitize() {
  say sanitize
  command -v compute-sanitizer >/dev/null || { say "no compute-sanitizer here"; return; }
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  phase 120 compute-sanitizer --tool memcheck $PY "$HERE/check.py" --cases table,parametric-scale-skip,documents,grouped,grid --widths 64 --length 203 --repeat 1
  phase 90 compute-sanitizer --tool racecheck $PY "$HERE/check.py" --cases table,parametric --widths 64 --length 203 --repeat 1
  unset PYTORCH_NO_CUDA_MEMORY_CACHING
}

PHASES="smoke check bench sweep training recipe modalities shipped models tests sanitize"
[ $# -gt 0 ] || set -- smoke
for name in "$@"; do
  [[ " $PHASES " == *" $name "* ]] || { say "no phase $name: $PHASES"; exit 8; }
done
restore
for name in "$@"; do
  if [ "$(left 10)" -lt 10 ]; then say "no time left for $name"; FAILED=1; continue; fi
  $name
  if [ "$name$FAILED" = smoke1 ]; then say "smoke failed: nothing else is tried"; break; fi
done
say "done; in \$OUT: $(cd "$OUT" && ls -s | tr '\n' ' ')"
exit $FAILED

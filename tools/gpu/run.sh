#!/usr/bin/env bash
# Forty-five minutes on one H200, most informative first; the project need not be installed.
#
#   call 1  (5 min)   bash tools/gpu/run.sh smoke check        is anything wrong? stop here and fix it if smoke fails
#   call 2  (9 min)   bash tools/gpu/run.sh bench              attention beside flash, cuDNN and FlexAttention, 2k to 64k; decoding
#   call 3  (8 min)   bash tools/gpu/run.sh sweep              blocks, warps and stages of every kernel
#   call 4  (7 min)   bash tools/gpu/run.sh train              steps of 125M models; three models of 10M trained 80 s each
#   a fresh machine has no compiled kernels: bring cache.tgz back from the earlier $OUT (see restore)
#   call 5  (9 min)   bash tools/gpu/run.sh tests sanitize     the project's own tests on CUDA; memcheck and racecheck
#   call 6            what the results ask for
#   rehearsal         DEVICE=cpu bash tools/gpu/run.sh smoke check bench train tests  each phase in small, kernels interpreted: minutes
#
# Every phase has its own time limit, appends to files in $OUT as it goes, and its failure does not stop the next.
set -u
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 PYTHONWARNINGS=ignore CUBLAS_WORKSPACE_CONFIG=:4096:8 MPLBACKEND=Agg TOKENIZERS_PARALLELISM=false
HERE=$(cd "$(dirname "$0")" && pwd)
PROJECT=${PROJECT:-$(cd "$HERE/../.." && pwd)}
OUT=${OUT:-$PROJECT/gpu-out}; mkdir -p "$OUT"
PY=${PY:-python3}
DEVICE=${DEVICE:-cuda}
CORES=$(nproc 2>/dev/null || echo 8); JOBS=$(( CORES > 12 ? 12 : CORES ))
export TRITON_CACHE_DIR=/tmp/triton-cache TRITON_STORE_BINARY_ONLY=1 TORCHINDUCTOR_CACHE_DIR=/tmp/inductor-cache
unset TRITON_INTERPRET
SMALL=()  # check.py's options where Triton interprets
[ "$DEVICE" = cpu ] && export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 && SMALL=(--length 70 --tile 16 --repeat 1)
cd "$PROJECT" || exit 9
say() { printf '\n=== %s  [%ds]\n' "$*" "$SECONDS" | tee -a "$OUT/log.txt"; }
# phase LIMIT command…: with a limit in seconds, its output to the log and the screen, its exit code told and forgotten
phase() { local limit=$1; shift; timeout -k 10 "$limit" "$@" 2>&1 | tee -a "$OUT/log.txt"; say "exit ${PIPESTATUS[0]} of: ${*:0:4}"; }

restore() {  # kernels compiled by an earlier call
  [ -f "$HERE/cache.tgz" ] && [ ! -d $TRITON_CACHE_DIR ] && tar xzf "$HERE/cache.tgz" -C /tmp && say "kernels restored: $(ls $TRITON_CACHE_DIR | wc -l)"
  # Wheels brought along: peers of the benchmark (flash-linear-attention, fla-core, goat-attention, liger-kernel: pure Python).
  if ls "$HERE"/whl/*.whl >/dev/null 2>&1 && [ ! -d /tmp/site ]; then
    $PY -m pip install -q --no-index --no-deps --no-compile --target /tmp/site "$HERE"/whl/*.whl || say "wheels not installed"
  fi
  export PYTHONPATH="$PROJECT:/tmp/site${PYTHONPATH:+:$PYTHONPATH}"
}
keep_cache() {  # binary only: some 60 KiB a kernel
  [ -d $TRITON_CACHE_DIR ] || return 0
  (cd /tmp && find triton-cache -type f \( -name '*.cubin' -o -name '*.json' -o -name '*.source' \) -print0 | tar czf "$OUT/cache.tgz" --null -T - 2>/dev/null)
  [ "$(stat -c %s "$OUT/cache.tgz" 2>/dev/null || echo 0)" -lt 16000000 ] || rm -f "$OUT/cache.tgz"
}

smoke() {
  say smoke
  phase 60 $PY - <<'P'
import importlib, os, platform, shutil, subprocess, sys, torch, triton
from triton import knobs
print(platform.python_version(), "torch", torch.__version__, "triton", triton.__version__, "cuda", torch.version.cuda, "cudnn", torch.backends.cudnn.version())
gpu = torch.cuda.is_available()
print(*((torch.cuda.get_device_name(), torch.cuda.get_device_capability()) if gpu else ("no GPU",)), "cc:", shutil.which("gcc") or shutil.which("cc"), "ptxas", knobs.nvidia.ptxas.path, knobs.nvidia.ptxas.version)
print({k: v for k, v in os.environ.items() if k.startswith(("TRITON", "PTXAS", "TORCH", "CUDA"))})
for name in ("zoo", "tests.device", "tools.benches.attention", "modalities.text", "tools.bench", "tools.benches.models", "tools.gpu.cases"):
    try:
        module = importlib.import_module(name)
        where = getattr(module, "__file__", None) or list(getattr(module, "__path__", []))
        print("ok  ", name, where)
    except Exception as error:  # noqa: BLE001
        print("FAIL", name, type(error).__name__, error)
import zoo
print(len(zoo.list_models("text_*_125m")), "text models of 125M; flags:", {n: importlib.util.find_spec(n) is not None for n in ("deepspeed", "fla", "goat", "flash_attn", "timm", "pytest", "xdist", "typer", "rich")})
if not gpu:
    sys.exit()
# two ceilings: a large product, a large copy
a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
from triton.testing import do_bench
print("matmul", round(2 * 8192**3 / do_bench(lambda: a @ b, return_mode="median") / 1e9), "TFLOP/s;", end=" ")
x = torch.empty(2**32, dtype=torch.int8, device="cuda")
print("copy", round(2 * x.numel() / do_bench(lambda: x.clone(), return_mode="median") / 1e9, 2), "TB/s")
P
  say "one forward and backward of each kernel against float64, seven processes"
  if [ "$DEVICE" = cpu ]; then
    phase 150 $PY "$HERE/check.py" --quick "${SMALL[@]}" --out "$OUT/check.jsonl"
    return
  fi
  local i; for i in 0 1 2 3 4 5 6; do timeout -k 5 150 $PY "$HERE/check.py" --quick --part $i/7 --out "$OUT/check.jsonl" & done 2>&1; wait
}
check() {  # all cases; processes share the GPU, compile side by side and leave their kernels for everything after
  local i first=64,128 second=float16,float32 limit=200
  [ "$DEVICE" = cpu ] && first=16 second=float32 limit=400
  say "check: bfloat16 at $first, $second at ${first%%,*}"
  for i in $(seq 0 $((JOBS-1))); do
    ( timeout -k 5 $limit $PY "$HERE/check.py" --widths $first --dtypes bfloat16 --part $i/$JOBS "${SMALL[@]}" --out "$OUT/check.jsonl"
      timeout -k 5 $limit $PY "$HERE/check.py" --widths ${first%%,*} --dtypes $second --part $i/$JOBS "${SMALL[@]}" --out "$OUT/check.jsonl" ) 2>&1 | grep -v '^ok' &
  done; wait
  $PY - "$OUT/check.jsonl" <<'P' | tee -a "$OUT/log.txt"
import collections, json, sys
rows = [json.loads(x) for x in open(sys.argv[1])]
bad = [r for r in rows if not r["ok"]]
print(f"{len(rows)} checks, {len(bad)} failed; bits differed in {sum(not r.get('same_bits', True) for r in rows)}")
for r in bad:
    print("FAIL", r["case"], r["width"], r["dtype"], r.get("error", "")[:160], r.get("bad", ""))
worst = collections.defaultdict(float)
for r in rows:
    for n, e in r.get("errors", {}).items():
        worst[r["dtype"], n] = max(worst[r["dtype"], n], e)
print({f"{d} {n}": e for (d, n), e in sorted(worst.items())})
P
  keep_cache
}
bench() {
  if [ "$DEVICE" = cpu ]; then
    phase 300 $PY tools/bench.py attention --device cpu --lengths 64,256 --decode 512 --without flex,dense --seconds 0.01 --minutes 3 --commit "${COMMIT:-unknown}" --out "$OUT/attention.json"
    return
  fi
  say "bench: without FlexAttention, which compiles for seconds at every shape, then it alone at two"
  phase 330 $PY tools/bench.py attention --device cuda --lengths 2048,4096,8192,16384,65536 --decode 32768,524288 --without flex,dense --minutes 5 --commit "${COMMIT:-unknown}" --out "$OUT/attention.json"
  phase 190 $PY tools/bench.py attention --device cuda --lengths 4096,16384 --width 64 --decode none --minutes 3 --commit "${COMMIT:-unknown}" --out "$OUT/attention_flex.json"
  keep_cache
}
sweep() {
  say sweep
  phase 150 $PY "$HERE/sweep.py" --warm $JOBS --minutes 2 --variants table,bare,parametric
  phase 300 $PY "$HERE/sweep.py" --minutes 4.5 --variants table,bare,parametric --out "$OUT/sweep.jsonl"
  keep_cache
}
train() {
  say train
  if [ "$DEVICE" = cpu ]; then
    phase 80 $PY tools/bench.py training --engine torch --device cpu --model tiny --contexts 64 --seconds 0.1 --methods rope,ggd_ssmax --commit "${COMMIT:-unknown}" --out "$OUT/training.json"
    phase 340 $PY "$HERE/train.py" --models text_rope_tiny,text_ggd_ssmax_tiny --seconds 5 --context 64 --tokens 256 --lengths 64,128 --megabytes 1 --out "$OUT/train.jsonl"
    return
  fi
  for context in 2048 16384; do
    phase 80 $PY tools/bench.py training --engine torch --contexts $context --seconds 4 --methods rope,alibi,goat,ggd_ssmax,kerple --commit "${COMMIT:-unknown}" --out "$OUT/training_$context.json"
  done
  phase 340 $PY "$HERE/train.py" --seconds 80 --out "$OUT/train.jsonl"
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
  PRIORZOO_TEST_DEVICE=cuda phase 360 $PY -m pytest -p no:cacheprovider "${plugins[@]}" "${files[@]}"
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

restore
for name in "${@:-smoke}"; do
  case $name in smoke|check|bench|sweep|train|tests|sanitize) $name ;; *) say "no phase $name"; exit 8 ;; esac
done
say "done; in \$OUT: $(cd "$OUT" && ls -s | tr '\n' ' ')"

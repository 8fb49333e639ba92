#!/usr/bin/env bash
# Everything that wants a GPU, in one call of less than ten minutes: tests/test_cuda.py and the kernels' own tests, some of
# these under compute-sanitizer where there is one, then bench/gpu.py and bench/wire_gpu.py.
#
#   bash bench/gpu.sh                      # results in bench/out: gpu.json, wire_gpu.json, gpu-tests.txt, gpu-sanitizer.txt
#   WHEELS=dir OUT=dir bash bench/gpu.sh   # missing Python packages from a folder of wheels; results elsewhere
#
# Needs torch 2.11 or newer with CUDA, pytest and numpy; nvtx and pytest-timeout are used where they are. No network.
# The kernels are tested and timed where the native extension is built. It has not run on a GPU yet.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-bench/out}
mkdir -p "$OUT"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

if [ -n "${WHEELS:-}" ]; then
    packages=$(mktemp -d)
    trap 'rm -rf "$packages"' EXIT
    for name in nvtx pytest pytest_timeout numpy; do
        "$PYTHON" -c "import $name" 2>/dev/null || "$PYTHON" -m pip install --quiet --no-index --no-deps \
            --find-links "$WHEELS" --target "$packages" "${name//_/-}" || echo "no $name in $WHEELS: going on without"
    done
    PYTHONPATH="$PYTHONPATH:$packages"
fi

if ! "$PYTHON" -c 'import sys, torch; print("torch", torch.__version__); sys.exit(not torch.cuda.is_available())'; then
    echo "no torch with a CUDA device for $PYTHON" >&2
    exit 2
fi
timeout 270 "$PYTHON" -m pytest tests/test_cuda.py tests/wire/test_kernels_cuda.py -v --color=no 2>&1 |
    tee "$OUT/gpu-tests.txt"
tests=${PIPESTATUS[0]}

# The kernels' tests under a tool that sees every access; sizes are small, the tool is slow.
sanitizer=0
checked() {
    timeout 45 "$SANITIZER" --tool "$1" --error-exitcode 9 "$PYTHON" -m pytest tests/wire/test_kernels_cuda.py \
        -k "$2" --color=no 2>&1 | tee -a "$OUT/gpu-sanitizer.txt"
    local code=${PIPESTATUS[0]}
    # 5: no test ran, or 124: not all of them did in the time. Neither is a finding.
    case $code in 0 | 5 | 124) ;; *) sanitizer=$code ;; esac
}
SANITIZER=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
if [ -x "$SANITIZER" ]; then
    : > "$OUT/gpu-sanitizer.txt"
    checked memcheck "tails and cpu and int8"
    checked racecheck "topk and cpu and (tails or decode)"
else
    echo "no compute-sanitizer: going on without"
fi

timeout 160 "$PYTHON" bench/gpu.py --json "$OUT/gpu.json"
bench=$?
if "$PYTHON" -c 'import sys, torch
from yafsdp_cc.wire.native import ops_for
sys.exit(ops_for(torch.device("cuda")) is None)'; then
    timeout 60 "$PYTHON" bench/wire_gpu.py --json "$OUT/wire_gpu.json"
    wire=$?
else
    echo "no native extension with CUDA kernels: they are neither tested nor timed"
    wire=0
fi
# The tests' verdict belongs to the figures: they mean nothing for an engine that computes something else.
"$PYTHON" - "$OUT/gpu.json" "$tests" "$sanitizer" "$bench" "$wire" <<'PY'
import json, pathlib, sys
path = pathlib.Path(sys.argv[1])
results = json.loads(path.read_text()) if path.exists() else {}
results["exit"] = dict(zip(("tests", "sanitizer", "bench", "wire"), map(int, sys.argv[2:]), strict=True))
path.write_text(json.dumps(results, indent=1) + "\n")
print(f"\nexits {results['exit']}; results in {path}")
PY
for code in $tests $sanitizer $bench $wire; do
    [ "$code" -eq 0 ] || exit "$code"
done

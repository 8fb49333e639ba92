#!/usr/bin/env bash
# Everything that wants a GPU, in one call of less than ten minutes: tests/test_cuda.py, then bench/gpu.py.
#
#   bash bench/gpu.sh                      # results in bench/out: gpu.json, gpu-tests.txt
#   WHEELS=dir OUT=dir bash bench/gpu.sh   # missing Python packages from a folder of wheels; results elsewhere
#
# Needs torch 2.11 or newer with CUDA, pytest and numpy; nvtx and pytest-timeout are used where they are. No network.
# It has not run on a GPU yet.
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
timeout 330 "$PYTHON" -m pytest tests/test_cuda.py -v --color=no 2>&1 | tee "$OUT/gpu-tests.txt"
tests=${PIPESTATUS[0]}
timeout 240 "$PYTHON" bench/gpu.py --json "$OUT/gpu.json"
bench=$?
# The tests' verdict belongs to the figures: they mean nothing for an engine that computes something else.
"$PYTHON" - "$OUT/gpu.json" "$tests" "$bench" <<'PY'
import json, pathlib, sys
path = pathlib.Path(sys.argv[1])
results = json.loads(path.read_text()) if path.exists() else {}
results["exit"] = {"tests": int(sys.argv[2]), "bench": int(sys.argv[3])}
path.write_text(json.dumps(results, indent=1) + "\n")
print(f"\ntests exit {sys.argv[2]}, bench exit {sys.argv[3]}; results in {path}")
PY
exit $((tests != 0 ? tests : bench))

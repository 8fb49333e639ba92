#!/usr/bin/env bash
# Everything that needs a GPU, in one call of less than ten minutes: the native extension with its CUDA kernels is built;
# tests/test_cuda.py and the kernels' own tests, some of these under compute-sanitizer where there is one; then
# bench/worlds.py (modelled worlds) and bench/kernels.py.
#
#   bash bench/gpu.sh                      # results in bench/out: everything.json, tables as they are printed, gpu-*.txt
#   PARTS=worlds bash bench/gpu.sh         # some of build, tests, sanitizer, worlds, kernels
#   WHEELS=dir OUT=dir bash bench/gpu.sh   # missing Python packages from a folder of wheels; results elsewhere
#
# Needs torch 2.11 or newer with CUDA, numpy, pydantic and pytest; nvtx and pytest-timeout are used where they are. No
# network. A folder of wheels: pip download --python-version 3.12 --only-binary=:all: -d dir pydantic pytest nvtx setuptools
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
    for name in pydantic pytest pytest_timeout nvtx numpy setuptools; do
        "$PYTHON" -c "import $name" 2>/dev/null || "$PYTHON" -m pip install --quiet --no-index --upgrade \
            --find-links "$WHEELS" --target "$packages" "${name//_/-}" || echo "no $name in $WHEELS: going on without"
    done
    PYTHONPATH="$PYTHONPATH:$packages"
fi
if ! "$PYTHON" -c 'import pydantic'; then
    echo "pydantic is needed: WHEELS=dir with its wheels, from pip download -d dir pydantic pytest nvtx" >&2
    exit 2
fi
if ! "$PYTHON" -c 'import sys, torch; print("torch", torch.__version__); sys.exit(not torch.cuda.is_available())'; then
    echo "no torch with a CUDA device for $PYTHON" >&2
    exit 2
fi
PARTS=${PARTS:-build,tests,sanitizer,worlds,kernels}
declare -A exits

# ``part NAME SECONDS COMMAND...``, where it is asked for; by itself it has all of the time.
part() {
    local name=$1 seconds=$2
    shift 2
    case ,$PARTS, in *",$name,"*) ;; *) return ;; esac
    [ "$PARTS" = "$name" ] && seconds=560
    echo "== $name"
    timeout "$seconds" "$@"
    exits[$name]=$?
    echo "== $name: exit ${exits[$name]} after ${SECONDS} s"
}

tested() {
    "$PYTHON" -m pytest tests/test_cuda.py tests/test_order.py::test_programs_on_a_gpu tests/bench/test_modelled.py \
        tests/compression/test_kernels_cuda.py -v --color=no 2>&1 | tee "$OUT/gpu-tests.txt"
    return "${PIPESTATUS[0]}"
}

# The kernels' tests under a tool that sees every access; sizes are small, the tool is slow.
sanitized() {
    local tool which code
    : > "$OUT/gpu-sanitizer.txt"
    while IFS=: read -r tool which; do
        timeout "$1" "$SANITIZER" --tool "$tool" --error-exitcode 9 "$PYTHON" -m pytest \
            tests/compression/test_kernels_cuda.py -k "$which" --color=no 2>&1 | tee -a "$OUT/gpu-sanitizer.txt"
        code=${PIPESTATUS[0]}
        # 5: no test ran, or 124: not all of them did in the time. Neither is a finding.
        case $code in 0 | 5 | 124) ;; *) return "$code" ;; esac
    done <<< $'memcheck:tails and cpu and int8\nracecheck:topk and cpu and (tails or decode)'
}
SANITIZER=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
export -f tested sanitized
export PYTHON OUT SANITIZER

card=$("$PYTHON" -c 'import torch; print("{}.{}".format(*torch.cuda.get_device_capability()))')
part build 120 env TORCH_CUDA_ARCH_LIST="$card" "$PYTHON" setup.py -q build_ext --inplace
part tests 150 bash -c tested
if [ -x "$SANITIZER" ]; then
    part sanitizer 60 bash -c 'sanitized 28'
else
    echo "no compute-sanitizer: going on without"
fi
part worlds 170 "$PYTHON" bench/worlds.py --json "$OUT/worlds.json"
if "$PYTHON" -c 'import sys, torch
from yafsdp_cc.compression.error_feedback import ops_for
sys.exit(ops_for(torch.device("cuda")) is None)'; then
    part kernels 60 "$PYTHON" bench/kernels.py --device cuda --json "$OUT/kernels.json"
else
    echo "no native extension with CUDA kernels: they are neither tested nor timed"
fi

# The tests' verdict belongs to the figures: they mean nothing for an engine that computes something else.
for name in "${!exits[@]}"; do
    echo "$name ${exits[$name]}"
done | sort | tee "$OUT/gpu-exits.txt"
"$PYTHON" - "$OUT" <<'PY'
import json, pathlib, sys
out = pathlib.Path(sys.argv[1])
parts = {name: out / f"{name}.json" for name in ("worlds", "kernels")}
found = {name: json.loads(path.read_text()) for name, path in parts.items() if path.exists()}
exits = dict(line.split() for line in (out / "gpu-exits.txt").read_text().splitlines())
(out / "everything.json").write_text(json.dumps({"exits": exits, **found}, indent=1) + "\n")
PY
! grep -qv ' 0$' "$OUT/gpu-exits.txt"

#!/usr/bin/env bash
# Everything that needs a GPU, in one call of less than ten minutes, the most telling part first.
#
#   bash bench/gpu.sh                       # all parts; results in bench/out, everything.json above all
#   PARTS=kernels,engine bash bench/gpu.sh  # some of build, kernels, engine, speed, worlds, sanitizer
#   WHEELS=dir OUT=dir bash bench/gpu.sh    # missing Python packages from a folder of wheels; results elsewhere
#
# build      the native extension
# kernels    tests/compression/test_kernels_cuda.py: kernels against their definitions, to the bit
# engine     tests/test_cuda.py, tests/bench/test_modelled.py, random programs
# speed      bench/kernels.py: kernels beside a copy, and beside matrix products
# worlds     bench/worlds.py: large models in modelled worlds, beside FSDP2; what does not fit on the card is left out
# sanitizer  some tests of the kernels under compute-sanitizer, where there is one
#
# everything.json is written anew after each part, so a call that is ended early loses the part that ran. It keeps the
# parts of earlier calls with the same OUT. Needs torch 2.11 or newer with CUDA, numpy, pydantic and pytest; nvtx and
# pytest-timeout are used where they are. No network. A folder of wheels: pip download --python-version 3.12
# --only-binary=:all: -d dir pydantic pytest nvtx setuptools. It has not run on a GPU yet; tests/bench/test_gpu_rehearsal.py
# runs it on a simulated one.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-bench/out}
PARTS=${PARTS:-build,kernels,engine,speed,worlds,sanitizer}
LIMIT=${LIMIT:-570}
PARTS=${PARTS// /}
for name in ${PARTS//,/ }; do
    case ,build,kernels,engine,speed,worlds,sanitizer, in *",$name,"*) ;; *)
        echo "PARTS=$PARTS: there is no part '$name'" >&2
        exit 2
        ;;
    esac
done
if ! mkdir -p "$OUT" || ! : > "$OUT/everything.new"; then
    echo "OUT=$OUT: results cannot be written there" >&2
    exit 2
fi
rm "$OUT/everything.new"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHON OUT

if [ -n "${WHEELS:-}" ]; then
    packages=$(mktemp -d)
    trap 'rm -rf "$packages"' EXIT
    for name in pydantic pytest pytest_timeout nvtx numpy setuptools; do
        "$PYTHON" -c "import $name" 2>/dev/null || "$PYTHON" -m pip install --quiet --no-index --upgrade \
            --find-links "$WHEELS" --target "$packages" "${name//_/-}" || echo "no $name in $WHEELS: going on without"
    done
    PYTHONPATH="$PYTHONPATH:$packages"
fi
if ! "$PYTHON" -c 'import pydantic, pytest'; then
    echo "pydantic and pytest are needed: WHEELS=dir with their wheels, from pip download -d dir pydantic pytest" >&2
    exit 2
fi
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no torch with a CUDA device for $PYTHON" >&2
    exit 2
fi

# ``record NAME STATE``: everything.json with the state of a part, and all figures there are.
record() {
    "$PYTHON" -S - "$OUT" "$1" "$2" "$SECONDS" <<'PY'
import json, os, pathlib, sys
out, name, state, seconds = pathlib.Path(sys.argv[1]), *sys.argv[2:]
target = out / "everything.json"
known = json.loads(target.read_text()) if target.exists() else {"parts": {}}
known["parts"][name] = {"exit": int(state) if state.lstrip("-").isdigit() else state, "after_s": int(seconds)}
for figures in ("kernels", "worlds"):
    if (out / f"{figures}.json").exists():
        known[figures] = json.loads((out / f"{figures}.json").read_text())
target.with_suffix(".new").write_text(json.dumps(known, indent=1) + "\n")
os.replace(target.with_suffix(".new"), target)
PY
}

failed=0
# ``part NAME SECONDS COMMAND...``, where it is asked for, within what is left of the time; alone it has all of it.
part() {
    local name=$1 seconds=$2 code
    shift 2
    case ,$PARTS, in *",$name,"*) ;; *) return ;; esac
    local left=$((LIMIT - SECONDS))
    if [ "$PARTS" = "$name" ] || [ "$seconds" -gt "$left" ]; then seconds=$left; fi
    if [ "$seconds" -lt 5 ]; then
        echo "== $name: no time is left"
        record "$name" "no time was left"
        failed=1
        return
    fi
    echo "== $name: at most $seconds s"
    current=$name
    record "$name" "did not end"
    # In the background, so that a signal ends it and is recorded; `timeout` passes it on to all that it has started.
    timeout --kill-after=10 "$seconds" "$@" > >(tee "$OUT/gpu-$name.txt") 2>&1 &
    wait $!
    code=$?
    record "$name" "$code"
    current=
    [ "$code" -eq 0 ] || failed=1
    echo "== $name: exit $code, at $SECONDS s"
}
current=
ended() {
    local job # asked for here: a signal may come before a variable of it is set
    for job in $(jobs -p); do
        # `timeout` leads a process group, which is signalled as long as there is one: a signal between a fork and
        # an exec is lost, in the job as in what it has started.
        while kill -TERM -- "-$job" || kill -TERM "$job"; do sleep 0.2; done 2>/dev/null
    done
    [ -z "$current" ] || record "$current" killed
    exit 143
}
trap ended TERM INT HUP

# The kernels' tests under a tool that sees every access; sizes are small, the tool is slow.
sanitized() {
    local tool which code
    trap 'kill $!; wait $!; exit 143' TERM # which ends this process group, and not the one that `timeout` makes
    while IFS=: read -r tool which; do
        timeout --kill-after=2 28 "$SANITIZER" --tool "$tool" --error-exitcode 9 "$PYTHON" -m pytest \
            tests/compression/test_kernels_cuda.py -k "$which" --color=no &
        wait $!
        code=$?
        # 5: no test ran, or 124: not all of them did in the time. Neither is a finding.
        case $code in 0 | 5 | 124) ;; *) return "$code" ;; esac
    done <<< $'memcheck:tails and cpu and int8\nracecheck:topk and cpu and (tails or decode)'
}
SANITIZER=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
export -f sanitized
export SANITIZER

tests=("$PYTHON" -m pytest -v --color=no --durations=10)
part build 120 "$PYTHON" setup.py -q build_ext --inplace
part kernels 120 "${tests[@]}" tests/compression/test_kernels_cuda.py
part engine 150 "${tests[@]}" tests/test_cuda.py tests/bench/test_modelled.py tests/test_order.py::test_programs_on_a_gpu
part speed 60 "$PYTHON" bench/kernels.py --device cuda --codecs onebit,int8,int4,topk --json "$OUT/kernels.json"
part worlds 200 "$PYTHON" bench/worlds.py --json "$OUT/worlds.json"
if [ -x "$SANITIZER" ]; then
    part sanitizer 60 bash -c sanitized
else
    echo "no compute-sanitizer: going on without"
fi
exit "$failed"

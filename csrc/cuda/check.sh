#!/usr/bin/env bash
# Compiles the CUDA kernels wherever nvcc is, GPU or none, and prints what registers they take: a check, nothing is kept.
#
#   bash csrc/cuda/check.sh              # for sm_80 and sm_90
#   ARCHS="90 100" bash csrc/cuda/check.sh
#
# Where there is no nvcc it prints that and succeeds. Errors, warnings, and spills of more than 64 bytes fail. TORCH=no leaves out ops.cpp, which
# wants torch's headers; NVCC and PYTHON name others than those that are found.
set -uo pipefail
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python3}
if [ -z "${NVCC:-}" ]; then
    NVCC=$(command -v nvcc || ls -d /usr/local/cuda*/bin/nvcc 2>/dev/null | tail -n 1)
    # pip's nvidia-cuda-nvcc
    [ -n "$NVCC" ] || NVCC=$("$PYTHON" -c 'import glob, site
print(*glob.glob(site.getsitepackages()[0] + "/nvidia/*/bin/nvcc")[:1])' 2>/dev/null)
fi
if [ -z "$NVCC" ]; then
    echo "no nvcc here: the CUDA kernels are not compiled"
    exit 0
fi
"$NVCC" --version | tail -n 2 | head -n 1
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
failed=0
for arch in ${ARCHS:-80 90}; do
    # Two at a time: a compiler takes about a gigabyte.
    printf '%s\n' *.cu | xargs -P 2 -I{} sh -c '"$1" -std=c++17 -O3 -fmad=false -arch="sm_$2" -Xptxas -v \
        -Xcompiler -Wall -c "$3" -o "$4/$3.o" > "$4/$3.txt" 2>&1 || echo "error: $3 does not compile" >> "$4/$3.txt"' \
        sh "$NVCC" "$arch" {} "$out"
    cat "$out"/*.txt > "$out/all"
    grep -E "error|warning" "$out/all" && failed=1
    echo "sm_$arch, registers of each kernel (rows of a block in registers; 'many': larger blocks):"
    "$PYTHON" - "$out/all" <<'PY' || failed=1
import re, sys

text, found, spilt = open(sys.argv[1]).read(), {}, []
pattern = r"entry function '\w*?(encode|decode)(_topk)?_kernel(\w*)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
for kind, topk, arguments, spill, registers in re.findall(pattern, text, re.S):
    # Of the mangled arguments: the codec with its flag, the rows, and whether blocks are larger.
    codec = re.match(r"I(?:NS_\d+([A-Z][A-Za-z0-9]*?)(?:ILb(\d)EE)?E)?(?:Li(\d)E)?(?:L[bj](\d)E)?", arguments)
    name, flag, rows, many = codec.groups() if codec else (None, None, None, None)
    row = kind + (" topk" if topk else f" {name}") + (f"<{flag}>" if flag else "")
    column = "many" if many == "1" and kind == "encode" else rows or "-"
    found.setdefault(row, {})[column] = registers
    if int(spill):
        spilt.append((int(spill), f"{row} {column}: {spill} bytes"))
for row, columns in sorted(found.items()):
    print(f"  {row:<24}" + "".join(f"{column:>6}:{registers:>4}" for column, registers in sorted(columns.items())))
print("  spills: " + ("; ".join(text for _, text in spilt) or "none"))
sys.exit(not found or max(spilt, default=(0, ""))[0] > 64)
PY
done
if [ "${TORCH:-}" != no ]; then
    include=$("$PYTHON" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent / "include")') || exit 1
    "${CXX:-g++}" -std=c++17 -O1 -Wall -DTORCH_TARGET_VERSION=0x020b000000000000 -I"$include" \
        -I"$include/torch/csrc/api/include" -c ops.cpp -o "$out/ops.o" && echo "ops.cpp compiles" || failed=1
fi
exit "$failed"

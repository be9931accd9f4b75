#!/usr/bin/env bash
# Everything one visit to a GPU machine needs, offline, in at most 8 minutes: build, checks and timings in one report.
#
#   bench/gpu.sh [report]       default: gpu_report.txt
#   PYTHON=<python>             default: python3; needs torch >= 2.11 with CUDA, pybind11, scikit-build-core, cmake, ninja
#
# nvcc must be on PATH or in /usr/local/cuda/bin. compute-sanitizer and pytest are used where they are. A step that
# fails does not stop the next ones; the exit status says whether all passed.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
report=$(realpath "${1:-gpu_report.txt}")
python=$(command -v "${PYTHON:-python3}")
export PATH="$PATH:/usr/local/cuda/bin"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$work/site" ATTN_EXT_SIMT_CACHE="$work/simt" PYTHONDONTWRITEBYTECODE=1
: >"$report"
failed=()

# step <seconds> <name> <command...>: output to the report, at most that long
step() {
  local limit=$1 name=$2 start=$SECONDS status
  shift 2
  printf '\n=== %s\n' "$name" | tee -a "$report"
  timeout --kill-after=5 "$limit" "$@" >"$work/log" 2>&1
  status=$?
  tail -n 200 "$work/log" | tee -a "$report"
  if [ $status -ne 0 ]; then failed+=("$name"); fi
  printf -- '--- %s: %s, %d s\n' "$name" "$([ $status -eq 0 ] && echo passed || echo "FAILED ($status)")" \
    $((SECONDS - start)) | tee -a "$report"
}

machine() {
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv
  nvcc --version | tail -n 2
  "$python" -c "import torch; print('torch', torch.__version__, 'capability', torch.cuda.get_device_capability())"
}

build() {
  local capability
  capability=$("$python" -c "import torch; print('%d%d' % torch.cuda.get_device_capability())") || return 1
  "$python" -m pip install --quiet --no-index --no-build-isolation --no-deps --target "$work/site" \
    --config-settings=cmake.define.ATTN_EXT_CUDA=on \
    --config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES="$capability-real" "$root" || return 1
  cd "$work" && "$python" -c "import attn_ext; print(attn_ext.build_info())"
}

conformance() {
  local library
  library=$("$python" "$root/tests/simt/build.py" conformance "$root/tests/simt/conformance.cpp") || return 1
  nvcc -std=c++20 -arch=native -I"$root/csrc" -I"$root/csrc/cuda" "$root/tests/simt/conformance.cu" \
    -o "$work/conformance" -ldl || return 1
  "$work/conformance" "$library"
}

suite() {
  cd "$work" && "$python" -m pytest -q -p no:cacheprovider --rootdir "$root" -k "cuda and not H14_bad and not H15_bad and not H26" "$root/tests/ops"
}

sanitizer() {
  local tool status=0
  for tool in memcheck racecheck synccheck; do
    echo "$tool"
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" "$root/bench/gpu.py" small || status=1
  done
  return $status
}

export root work python
export -f machine build conformance suite sanitizer
step 20 machine bash -c machine
step 120 build bash -c build
step 45 "wrapper conformance" bash -c conformance
cd "$work" || exit 1 # the installed package, not the source folder
step 45 "checks" "$python" "$root/bench/gpu.py" check
step 15 "CUDA graphs" "$python" "$root/bench/gpu.py" capture
step 60 "timings" "$python" "$root/bench/gpu.py" time
if "$python" -c "import pytest, hypothesis" 2>/dev/null; then
  step 60 "op suite" bash -c suite
else
  echo "op suite: not run, there is no pytest or hypothesis here" | tee -a "$report"
fi
if command -v compute-sanitizer >/dev/null; then
  step 90 "compute-sanitizer" bash -c sanitizer
else
  echo "compute-sanitizer: not run, there is none here" | tee -a "$report"
fi

printf '\n%s after %d s%s\n' "$([ ${#failed[@]} -eq 0 ] && echo "all passed" || echo "FAILED")" "$SECONDS" \
  "${failed[*]:+: ${failed[*]}}" | tee -a "$report"
[ ${#failed[@]} -eq 0 ]

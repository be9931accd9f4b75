#!/usr/bin/env bash
# Builds the extension with AddressSanitizer and UndefinedBehaviorSanitizer and runs the op suite on it.
#
#   tests/packaging/sanitize.sh [pytest arguments]      default: tests/ops, without registration
#   PYTHON=<python>: an environment with torch and the test extra; default: python
#
# Tensors come from malloc, which AddressSanitizer surrounds with guard zones: a kernel that reads or writes one
# element past a tensor ends the run with a report.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$(command -v "${PYTHON:-python}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m pip install --quiet --no-deps --target "$work/site" --config-settings=cmake.define.ATTN_EXT_SANITIZE=ON \
  --config-settings=cmake.define.ATTN_EXT_CUDA=off "$root"

# The sanitizers come first in a process that was not linked with them; their throw needs libstdc++ beside them.
libraries=$(for name in libasan.so libubsan.so libstdc++.so; do "${CXX:-c++}" -print-file-name="$name"; done)
run() {
  env LD_PRELOAD="${libraries//$'\n'/ }" PYTHONPATH="$work/site" PYTHONMALLOC=malloc OMP_NUM_THREADS=2 \
    ASAN_OPTIONS=detect_leaks=0:abort_on_error=0 UBSAN_OPTIONS=print_stacktrace=1 "$python" "$@"
}

cd "$work" # not the source tree: its attn_ext has no sanitizers
run -c "
import attn_ext, subprocess, sys
module = attn_ext._C.__file__
assert module.startswith(sys.argv[1]) and '__asan_init' in subprocess.check_output(['nm', '-D', module], text=True)
" "$work/site"
test() { run -m pytest -q -p no:cacheprovider "$@"; }
if [ $# -gt 0 ]; then
  test "$@"
  exit
fi

# Registration is left out: it runs torch's tracing and its compiler, on kernels tested here anyway. simt runs on fibers
# and has checks of its own.
test -n auto --dist worksteal "$root/tests/ops" --ignore "$root/tests/ops/test_registration.py" \
  -k "not simt"

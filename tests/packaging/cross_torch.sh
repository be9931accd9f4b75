#!/usr/bin/env bash
# One wheel for every torch: builds it against one torch and runs the test suite with it, unchanged, on another.
#
#   tests/packaging/cross_torch.sh [torch to build with] [torch to run with] [pytest arguments]
#   default: 2.13.0 2.14.1; PYTHON=<python> makes the two fresh environments
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build_torch=${1:-2.13.0} run_torch=${2:-2.14.1}
shift $(($# < 2 ? $# : 2))
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/build"
"$work/build/bin/pip" install --quiet "torch==$build_torch"
"$work/build/bin/pip" wheel --quiet --no-deps --wheel-dir "$work" "$root"
wheel=$(echo "$work"/*.whl)

"${PYTHON:-python3}" -m venv "$work/run"
"$work/run/bin/pip" install --quiet "${wheel}[test]" "torch==$run_torch"

# The module must be the wheel's, byte for byte.
cd "$work"
run/bin/python - "$wheel" "$build_torch" "$run_torch" <<'PY'
import sys, zipfile
from pathlib import Path
import attn_ext, torch
wheel, build_torch, run_torch = sys.argv[1:]
module = Path(attn_ext._C.__file__)
assert zipfile.ZipFile(wheel).read(f"attn_ext/{module.name}") == module.read_bytes()
info = attn_ext.build_info()
print(f"built with torch {info['torch_built']}, running in torch {torch.__version__}: {Path(wheel).name}")
assert info["torch_built"].split("+")[0] == build_torch and torch.__version__.split("+")[0] == run_torch
PY
cd "$root"
"$work/run/bin/pytest" -q -p no:cacheprovider "$@"

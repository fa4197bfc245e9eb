#!/usr/bin/env bash
# Build the wheel, install it in an empty environment with the pinned versions, and use it from an empty folder.
# Usage: tools/wheel_smoke.sh PYTHON   (a Python that has `build` and setuptools, as .venv/bin/python)
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
work=$(mktemp -d "${TMPDIR:-/tmp}/everstep-wheel.XXXXXX")
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH

"$python" "$root/tools/build_wheel.py" "$work/dist"
"$python" -m venv "$work/venv"
bin=$work/venv/bin
pip=("$bin/python" -m pip --disable-pip-version-check install -qq -c "$root/constraints.txt")
"${pip[@]}" "$(grep '^torch==' "$root/constraints.txt")"
"${pip[@]}" "$work"/dist/*.whl

mkdir "$work/empty"
cd "$work/empty"
"$bin/everstep" --version
"$bin/everstep" --help >/dev/null
"$bin/python" "$root/tools/smoke.py"
[[ -z $(ls -A) ]] || { echo "wheel-smoke: left behind in the current folder: $(ls -A)" >&2; exit 1; }
echo "wheel-smoke: ok"

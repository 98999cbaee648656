#!/usr/bin/env bash
# Tests and benchmarks this package on the GPUs of this machine. See ./scripts/gpu_check.sh --help
# PYTHON chooses the interpreter (default: .venv/bin/python if it exists, else python3).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
[[ -n "${PYTHON:-}" || -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -P -m benchmarks.gpu_check "$@"

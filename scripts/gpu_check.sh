#!/usr/bin/env bash
# Checks and measures everything on the GPUs of this machine: see ./scripts/gpu_check.sh --help
# PYTHON names the interpreter (default: .venv/bin/python where it is, else python3).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
[[ -n "${PYTHON:-}" || -x "$python" ]] || python=python3
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -P -m benchmarks.gpu_check "$@"

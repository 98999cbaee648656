#!/usr/bin/env bash
# Sets up everything and runs format, lint, types and tests.
#
#   ./scripts/test.sh         the checks of every change (at most 15 minutes on two cores)
#   ./scripts/test.sh --all   adds the long tier: soaks, kills, layout matrices
#
# Further arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

tier=(-m "not long")
if [[ "${1:-}" == "--all" ]]; then
    tier=()
    shift
fi

step() { echo "== $*"; "$@"; }
step ruff format --check .
step ruff check .
step mypy megatron_eopt
step python -m pytest "${tier[@]}" "$@"

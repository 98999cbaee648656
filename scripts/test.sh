#!/usr/bin/env bash
# Sets up everything and runs format, lint, types, the documentation and tests.
#
#   ./scripts/test.sh         the checks of every change (about 6 minutes on two idle cores)
#   ./scripts/test.sh --all   adds the long tier: soaks, kills, layout matrices; without further
#                             arguments its results are written to docs/reference/long_tier.md
#
# Further arguments go to pytest. TEST_WORKERS=0 runs all tests in one process, in order.
#
#   UPSTREAM=PATH[:PATH] ./scripts/test.sh   the same against checkouts of megatron-core and of
#                             emerging-optimizers, after a table of what they have otherwise
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

tier=(-m "not long")
if [[ "${1:-}" == "--all" ]]; then
    shift
    tier=()
    # part of the tests would make results that look complete
    [[ $# -gt 0 ]] || tier=("--write-results=docs/reference/long_tier.md")
fi

step() { echo "== $*"; "$@"; }
if [[ -n "${UPSTREAM:-}" ]]; then
    # the tests say themselves what is missing
    step python scripts/upstream_table.py "$UPSTREAM" || true
    export PYTHONPATH="$UPSTREAM${PYTHONPATH:+:$PYTHONPATH}"
fi
step ruff format --check .
step ruff check .
step mypy megatron_eopt
NO_MKDOCS_2_WARNING=1 step mkdocs build --strict --quiet
# a file's tests share what they set up, so a file stays with one worker; in the order they were
# found, in which the longest come first
workers=(-n "${TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder)
step python -m pytest "${workers[@]}" "${tier[@]}" "$@"

#!/usr/bin/env bash
# Sets up the environment, then checks format, lint, types and documentation, and runs the tests.
#
#   ./scripts/test.sh         the checks for every change (about 14 minutes on two cores)
#   ./scripts/test.sh --all   also runs the long tests: soaks, kills, many layouts. Without further
#                             arguments, it writes the results to docs/reference/long_tier.md
#
# Further arguments are passed to pytest. TEST_WORKERS=0 runs all tests in one process, in order.
#
#   UPSTREAM=PATH[:PATH] ./scripts/test.sh   tests with checkouts of megatron-core and
#                             emerging-optimizers, after a table of their differences
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

tier=(-m "not long")
if [[ "${1:-}" == "--all" ]]; then
    shift
    tier=()
    # with further arguments, the results would look complete although only some tests ran
    [[ $# -gt 0 ]] || tier=("--write-results=docs/reference/long_tier.md")
fi

step() { echo "== $*"; "$@"; }
if [[ -n "${UPSTREAM:-}" ]]; then
    # continue if names are missing, because the tests then show what fails
    step python scripts/upstream_table.py "$UPSTREAM" || true
    export PYTHONPATH="$UPSTREAM${PYTHONPATH:+:$PYTHONPATH}"
fi
step ruff format --check .
step ruff check .
step mypy megatron_eopt
NO_MKDOCS_2_WARNING=1 step mkdocs build --strict --quiet
# one worker runs all tests of a file, because they share their setup; files with the longest tests
# come first, so keep this order
workers=(-n "${TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder)
step python -m pytest "${workers[@]}" "${tier[@]}" "$@"

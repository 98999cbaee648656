#!/usr/bin/env bash
# Sets up the environment, then checks format, lint, types and documentation, and runs the tests.
#
#   ./scripts/test.sh optimizers    the tests of a room and of its neighbours, nothing else
#   ./scripts/test.sh               the checks for every change: leaves out the tests of outside
#                                   rooms (tests/rooms.py) in which nothing differs from main
#   ./scripts/test.sh --all-rooms   the same with the tests of all rooms
#   ./scripts/test.sh --all         also runs the long tests: soaks, kills, many layouts. Without
#                                   further arguments, it writes the results to
#                                   docs/reference/long_tier.md
#
# Further arguments are passed to pytest. TEST_WORKERS=0 runs all tests in one process, in order.
#
#   UPSTREAM=PATH[:PATH] ./scripts/test.sh   tests with checkouts of megatron-core and
#                             emerging-optimizers, after a table of their differences
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
unset PYTHONDONTWRITEBYTECODE  # each worker and rank would compile the tests anew

step() { echo "== $*"; "$@"; }
# one worker runs all tests of a file, because they share their setup; files with the longest tests
# come first, so keep this order
workers=(-n "${TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder)

if [[ -n "${UPSTREAM:-}" ]]; then
    # continue if names are missing, because the tests then show what fails
    step python scripts/upstream_table.py "$UPSTREAM" || true
    export PYTHONPATH="$UPSTREAM${PYTHONPATH:+:$PYTHONPATH}"
fi

rooms=()
while [[ "${1:-}" =~ ^[a-z0-9_]+$ ]]; do
    rooms+=("$1")
    shift
done
if [[ ${#rooms[@]} -gt 0 ]]; then
    places="$(python -m tests.rooms "${rooms[@]}")"
    # shellcheck disable=SC2086  # one word for each place
    step exec python -m pytest "${workers[@]}" -m "not long" $places "$@"
fi

tier=(-m "not long")
if [[ "${1:-}" == "--all" ]]; then
    shift
    tier=()
    # with further arguments, the results would look complete although only some tests ran
    [[ $# -gt 0 ]] || tier=("--write-results=docs/reference/long_tier.md")
elif [[ "${1:-}" == "--all-rooms" ]]; then
    shift
elif [[ $# -eq 0 ]]; then
    left_out="$(python -m tests.rooms)"
    # shellcheck disable=SC2206
    tier+=($left_out)
fi

# beside the tests, which are what takes time
lint() {
    step ruff format --check . && step ruff check . && step mypy megatron_eopt &&
        NO_MKDOCS_2_WARNING=1 step mkdocs build --strict --quiet
}
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
lint >"$log" 2>&1 &
tests=0 checks=0
step python -m pytest "${workers[@]}" "${tier[@]}" "$@" || tests=$?
wait $! || checks=$?
cat "$log"
[[ $tests -eq 0 && $checks -eq 0 ]]

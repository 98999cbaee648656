#!/usr/bin/env bash
# Trains the quickstart's model with several optimizers and draws held-out losses against steps and
# time: see ./scripts/compare_optimizers.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python -m benchmarks.compare_optimizers "$@"

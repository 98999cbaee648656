#!/usr/bin/env bash
# Trains the quickstart's model with several optimizers and plots the held-out loss by step and time.
# See ./scripts/compare_optimizers.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python -m benchmarks.compare_optimizers "$@"

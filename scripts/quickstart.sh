#!/usr/bin/env bash
# Sets up everything and trains a small GPT with Muon on real text: see ./scripts/quickstart.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python scripts/quickstart.py "$@"

#!/usr/bin/env bash
# Set up .venv next to this checkout and run the demo. Arguments go to `ft demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
set_up '.[fast]'
exec .venv/bin/ft demo "$@"

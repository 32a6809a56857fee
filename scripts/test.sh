#!/usr/bin/env bash
# Set up .venv next to this checkout and run the tests. Arguments go to pytest, like: -m soak
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
set_up '.[fast,test,lint]'
export TQDM_DISABLE=1 TOKENIZERS_PARALLELISM=false
exec .venv/bin/python -m pytest "$@"

#!/usr/bin/env bash
# Set up .venv next to this checkout and run the tests on all cores. Arguments go to pytest, like: -m soak
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
set_up '.[fast,test,lint]'
export TQDM_DISABLE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
# One process a core, each with one thread for torch. Runs chosen by a mark measure time and memory: one by one.
[[ " $* " == *" -m"* ]] || set -- -n logical --maxprocesses 4 --dist worksteal "$@"
exec .venv/bin/python -m pytest "$@"

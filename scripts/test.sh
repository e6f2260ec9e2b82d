#!/usr/bin/env bash
# Passes the tests. Without arguments: everything that needs no GPU and is not marked slow. With: pytest arguments.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
python=.venv/bin/python
if [ $# -gt 0 ]; then
    exec "$python" -m pytest "$@"
fi

part() { printf '\n=== %s (%s)\n' "$1" "$(date +%H:%M:%S)"; }

part "lint"
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy
# Engines run in the pytest process's children on two cores, so the parts run one after another.
part "unit tests"
"$python" -m pytest -q test/unit -m "not slow" -n 2 --durations=5
part "PD tests: SGLang's senders and receivers, real Mooncake over TCP"
"$python" -m pytest -q test/pd -m "not slow and not engine" -n 2 --durations=5
part "engine tests: real SGLang engines on the CPU test bed, alone and in PD pairs"
"$python" -m pytest -q test/engine test/pd -m "engine and not slow" --durations=20
part "GPU and 8-GPU tests (skipped, visibly, where the GPUs are missing)"
"$python" -m pytest -q test/gpu test/registered
part "done"

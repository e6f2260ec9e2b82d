#!/usr/bin/env bash
# Makes its own environment, starts real engines in each layout, checks that they answer alike, prints what was seen.
# With two or more CUDA devices they run there (tp 2 over NCCL, row audit, then P->D); otherwise on the CPU test bed.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
gpus=$(nvidia-smi -L 2>/dev/null | grep -c . || true)
if [ "$gpus" -ge 2 ]; then
    exec .venv/bin/python scripts/two_gpus.py --stage audit --stage pd "$@"
fi
exec .venv/bin/python -W ignore -m sglang_dcp_block.testing.demo "$@"

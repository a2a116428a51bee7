#!/usr/bin/env bash
# One command for a machine with GPUs: the numbers are the CPU's on every layout, and this is how fast it is.
# Results go to benchmarks/results/. Needs megalite's dependencies; megalite itself is taken from here.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
exec python3 -m benchmarks.gpu_check "$@"

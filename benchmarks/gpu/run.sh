#!/usr/bin/env bash
# Proves the library on a CUDA machine, in less than nine minutes: correctness first, then figures.
#   benchmarks/gpu/run.sh OUTPUT_FOLDER [--dry]
# Writes OUTPUT_FOLDER/gpu.md and gpu.json. Without a GPU, or with --dry, small sizes on the CPU, and no figure counts.
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
export PYTHONPATH="$root:$root/benchmarks:$root/examples${PYTHONPATH:+:$PYTHONPATH}"
exec timeout 540 "${PYTHON:-python3}" -m gpu.run "$@"

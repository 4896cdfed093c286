#!/usr/bin/env bash
# Runs the published workloads on a CUDA machine, in pools and in one arena, in less than ten minutes.
#   benchmarks/gpu/live.sh OUTPUT_FOLDER [--dry]
# Writes OUTPUT_FOLDER/live.md and live.json. With --dry, tiny models on the CPU, and no figure counts.
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
folder="$1"
shift
mkdir -p "$folder"
export PYTHONPATH="$root:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
exec timeout 595 "${PYTHON:-python3}" "$root/benchmarks/published_h200.py" \
    --live --json "$folder/live.json" --markdown "$folder/live.md" "$@"

#!/usr/bin/env bash
# (f) on one GPU: a transformer of about 790 million parameters, with as many tokens that an iteration takes about 180 ms.
#
#   benchmarks/lc/live_device.sh OUT [arguments of live.py]
set -euo pipefail
cd "$(dirname "$0")"
out=${1:?usage: benchmarks/lc/live_device.sh OUT [arguments]}
shift
python=${PYTHON:-python3}
network=(--device cuda --width 2560 --layers 10 --length 1024 --rate 1e-4)
scratch=$(mktemp -d -p "${STEPWELL_BENCH_SCRATCH:-/tmp}")
trap 'rm -rf "$scratch"' EXIT
"$python" live_trainer.py --log "$scratch/probe" --steps 16 --batch 16 "${network[@]}"
batch=$("$python" -c 'import sys; t = [float(line.split()[1]) for line in open(sys.argv[1])][8:]; print(round(16 * 0.18 * len(t) / sum(t)))' "$scratch/probe")
echo "batch $batch"
"$python" live.py --out "$out" --scratch "$scratch" --hold --batch "$batch" "${network[@]}" "$@"

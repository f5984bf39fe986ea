#!/usr/bin/env bash
# (f) on one GPU: a transformer of about 790 million parameters, with as many tokens that an iteration takes about 180 ms.
#
#   benchmarks/lc/live_device.sh OUT [arguments of live.py]
set -euo pipefail
out=$(realpath -m "${1:?usage: benchmarks/lc/live_device.sh OUT [arguments]}")
shift
cd "$(dirname "$0")"
mkdir -p "$out"
python=${PYTHON:-python3}
network=(--device cuda --width 2560 --layers 10 --length 1024 --rate 1e-4)
scratch=$(mktemp -d -p "${STEPWELL_BENCH_SCRATCH:-/tmp}")
nvidia-smi --query-gpu=timestamp,clocks.sm,temperature.gpu,power.draw --format=csv,noheader -l 1 >"$out/clocks.csv" &
trap 'kill $! 2>/dev/null; rm -rf "$scratch"' EXIT
# Long enough for the clocks to come down to what they stay at.
"$python" live_trainer.py --log "$scratch/probe" --steps 120 --batch 16 "${network[@]}"
batch=$("$python" -c 'import sys; t = [float(line.split()[1]) for line in open(sys.argv[1])][60:]; print(round(16 * 0.18 * len(t) / sum(t)))' "$scratch/probe")
echo "batch $batch"
"$python" live.py --out "$out" --scratch "$scratch" --hold --batch "$batch" "${network[@]}" "$@"

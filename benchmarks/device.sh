#!/usr/bin/env bash
# Runs the benchmarks on a machine that can reach no package registry: peers come as wheels in .wheels/ (not in git).
#
#   benchmarks/device.sh OUT [arguments of benchmarks/peers.py]
#   benchmarks/device.sh OUT scaling [arguments of benchmarks/scaling.py]
#
# Fill .wheels/ on a connected machine, for the other one's Python; torch, lightning, safetensors and jax are expected
# to be there already:
#   pip download --python-version 3.12 --only-binary=:all: --no-deps -d .wheels PACKAGE...
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/device.sh OUT [arguments]}
shift
python=${PYTHON:-python3}
target=${STEPWELL_BENCH_TARGET:-build/bench-packages}

if [ ! -e "$target/.done" ]; then
    mkdir -p "$target"
    # What the machine already has is left alone: it fits its torch.
    "$python" - .wheels/*.whl > "$target/.missing" << 'END'
import importlib.metadata, pathlib, re, sys

def plain(name):
    return re.sub("[-_.]+", "-", name).lower()

have = {plain(found.metadata["Name"] or "") for found in importlib.metadata.distributions()}
for wheel in sys.argv[1:]:
    if plain(pathlib.Path(wheel).name.split("-")[0]) not in have:
        print(wheel)
END
    xargs -r "$python" -m pip install -q --no-index --no-deps --no-compile --target "$target" < "$target/.missing"
    touch "$target/.done"
    echo "installed $(wc -l < "$target/.missing") of $(ls .wheels/*.whl | wc -l) wheels; the machine has the others"
fi
PYTHONPATH="$PWD/$target${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH PYTHONUNBUFFERED=1
mkdir -p "$out" build
if [ "${1:-}" = scaling ]; then
    shift
    exec "$python" benchmarks/scaling.py --out "$out" "$@"
fi
exec "$python" benchmarks/peers.py --scratch "${STEPWELL_BENCH_SCRATCH:-build}" --out "$out" "$@"

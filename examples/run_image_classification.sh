#!/usr/bin/env bash
# Trains the same network three times and keeps what each run printed:
#   automatic     checkpoints at the frequency that is found while it runs
#   epoch         a checkpoint at the end of each epoch, as most scripts do
#   synchronous   at the automatic run's mean frequency, training waits for the disk each time
#
#   ./run_image_classification.sh DATA OUTPUT THREADS [more flags for image_classification.py]
#
# DATA: a folder with train/ and val/, or `-` for pictures made on the fly. OUTPUT: a new folder. THREADS: processes that
# read pictures. ARCH and PYTHON choose another network (vgg16) and interpreter, RANKS=8 trains on that many ranks with
# torchrun. Needs no rights beyond reading and writing these folders.
set -euo pipefail
if (($# < 3)); then
  sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
data=$1 output=$2 threads=$3
shift 3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}
start=("$python")
if ((${RANKS:-1} > 1)); then
  start+=(-m torch.distributed.run --standalone --nproc-per-node "$RANKS")
fi
if [[ -e $output/automatic ]]; then
  echo "$output/automatic exists: give a new folder, or remove it" >&2
  exit 2
fi
mkdir -p "$output"
flags=(-a "${ARCH:-vgg16}" -j "$threads" --epochs 2 --deterministic --noeval "$@")
[[ $data == - ]] || flags+=(--data "$data")

train() { # name, then the flags of this run only
  local name=$1
  shift
  echo "== $name"
  local from=$SECONDS
  "${start[@]}" "$here/image_classification.py" "${flags[@]}" --chk-prefix "$output/$name" "$@" 2>&1 | tee "$output/$name.log"
  echo "== $name: $((SECONDS - from)) s" | tee -a "$output/$name.log"
}

train automatic
# Steps over checkpoints: what the automatic run came to.
frequency=$("$python" - "$output/automatic/events.jsonl" <<'PY'
import sys
from stepwell.events.journal import read_events
from pathlib import Path
steps = [event["step"] for event in read_events(Path(sys.argv[1])) if event["kind"] == "commit"]
print(max(1, max(steps) // max(1, len(set(steps)))))
PY
)
train epoch --chk_mode_baseline
train synchronous --chk_mode_baseline --chk-freq "$frequency"
echo "synchronous saved every $frequency steps, as the automatic run did in the mean"

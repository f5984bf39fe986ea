"""Trains until it is killed, with parameters that it codes itself: `coded_trainer.py DIRECTORY`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

import stepwell
from tests.storage.chain.host_coder import use_host_coder
from tests.storage.chain.walk import Wide

HELD = stepwell.Deltas(device=True, first_moments=stepwell.Hold(), second_moments=stepwell.Hold(), small_below=1000)


def main() -> None:
    use_host_coder(pytest.MonkeyPatch())
    run = Wide(Path(sys.argv[1]), {"deltas": HELD, "policy": stepwell.Every(steps=15)})
    run.ckpt.restore()
    for _ in run.ckpt.epochs(1_000_000):
        for batch in run.ckpt.data:
            run.update(batch)
            time.sleep(0.03)


if __name__ == "__main__":
    main()

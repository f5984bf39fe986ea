"""One rank under a launcher: `rank.py mpi|horovod SCENE FOLDER`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tests.ranks.groups.scenes import play


def main(framework: str, scene: str, folder: str) -> None:
    if framework == "mpi":
        import mpi4py.MPI  # noqa: F401
    else:
        import horovod.torch

        horovod.torch.init()
    if not play(scene, Path(folder)):
        signal.pause()  # the way out would wait for ranks that are gone; the test ends the launcher


if __name__ == "__main__":
    main(*sys.argv[1:])

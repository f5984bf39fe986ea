"""Which group this process belongs to: the one that the user's framework has set up.

Owns:    the order in which frameworks are asked.
Holds:   a framework that the user has not imported is not imported.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from stepwell.errors import ConfigError
from stepwell.ranks.groups.group import Group
from stepwell.ranks.groups.local import LocalGroup

_SIZES: Final = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")


def find_group(seconds: float | None = None) -> Group:
    """The group of this process, open. Collective. Raises ConfigError for several that nothing connects."""
    group = choose_group()
    group.open(seconds)
    return group


def choose_group() -> Group:
    """The group of this process, not open yet: it knows its rank and size. Not collective."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        from stepwell.ranks.groups.torch_group import DistributedGroup

        return DistributedGroup()
    hvd: Any = sys.modules.get("horovod.torch")
    if hvd is not None and hvd.is_initialized() and hvd.size() > 1:
        from stepwell.ranks.groups.horovod import HorovodGroup

        return HorovodGroup(hvd)
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
        from stepwell.ranks.groups.mpi import MpiGroup

        return MpiGroup(mpi)
    for name in _SIZES:
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 1:
            raise ConfigError(
                f"{name}={text}: this process is one of {text}, but they are not connected yet; call "
                "torch.distributed.init_process_group() (or hvd.init(), or import mpi4py.MPI) before restore()",
                found=text,
            )
    return LocalGroup()

"""FSDP1 (torch.distributed.fsdp.FullyShardedDataParallel): the part of a model that this rank holds, as it lies.

    model = FullyShardedDataParallel(net, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = stepwell.Checkpointer("run", model=stepwell.adapters.fsdp1.Sharded(model), optimizer=optimizer)

FSDP1's own state dicts gather every parameter from all ranks, which a checkpoint must not do while training runs. Here
each rank stores its flat pieces: no communication, and no whole tensors either, so a restart needs as many ranks as
there were. FSDP2 (`fully_shard`) needs no adapter and restores on any number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch

import stepwell
from stepwell.adapters.world import this_rank


class Sharded:
    """Tracks a model wrapped by FSDP1 with use_orig_params=True. The optimizer over its parameters is tracked as is."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """This rank's pieces. Between forward and backward they are not there: ask after the optimizer has stepped."""
        parameters = {name: value.detach() for name, value in self._model.named_parameters()}
        return {"ranks": this_rank().world_size, "parameters": parameters, "buffers": dict(self._model.named_buffers())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Fill this rank's pieces. Raises StateError for those of another number of ranks."""
        if state["ranks"] != this_rank().world_size:
            raise stepwell.StateError(
                f"FSDP1 shards were saved by {state['ranks']} ranks, but this run has {this_rank().world_size}; "
                "restart on as many, or use FSDP2 (fully_shard), whose tensors can be resharded"
            )
        live = self.state_dict()
        with torch.no_grad():
            for kind in ("parameters", "buffers"):
                for name, value in live[kind].items():
                    value.copy_(state[kind][name])

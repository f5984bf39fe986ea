"""The five steps of CheckFreq's README on a small net, with nothing changed but the import lines.

    python train.py WHERE        settings come from the environment; a line for every step goes to WHERE.ledger

The model has everything in it that a wrong resume would spoil: BatchNorm, dropout, Adam's moments, a learning rate that
depends on the position in the epoch (as in the original's script), and a shuffled loader.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import torch

# 1. Import CheckFreq manager, and iterator
from stepwell.adapters.checkfreq import CFCheckpoint, CFIterator, CFManager, CFMode

EPOCHS = 3
SAMPLES = 42
BATCH = 4
BATCHES = 11


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Each row carries its own number, and noise that is drawn when it is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((6,), index / SAMPLES) + 0.01 * torch.randn(6), torch.tensor(index)


def dali_loader(root: str, resume_index: int, resume_epoch: int) -> Any:
    """As the original's script builds it; `FileReader` is imported from stepwell instead of nvidia.dali.ops."""
    import nvidia.dali.ops as ops
    from nvidia.dali.pipeline import Pipeline
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator

    from stepwell.adapters.dali import FileReader

    class TrainPipe(Pipeline):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(BATCH, 1, None, seed=12)
            self.input = FileReader(
                file_root=root,
                shard_id=0,
                num_shards=1,
                shuffle_after_epoch=True,
                resume_index=resume_index,
                resume_epoch=resume_epoch,
                cf_det=True,
            )
            self.decode = ops.decoders.Image(device="cpu")

        def define_graph(self) -> Any:
            self.jpegs, self.labels = self.input(name="Reader")
            return [self.decode(self.jpegs), self.labels]

    return DALIClassificationIterator(TrainPipe())


def unpack(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and their numbers."""
    if isinstance(batch[0], dict):
        pixels = batch[0]["data"][:, 0, :6, 0].float()
        return pixels / SAMPLES, pixels[:, 0]
    data, index = batch
    return data, index


def main() -> None:
    get = os.environ.get
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    # 2. Initialize a checkpoint wrapper and a manager
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    cf_manager = CFManager(sys.argv[1], chk, mode=CFMode[get("CF_MODE", "AUTO")])
    extra_state = cf_manager.restore(gpu=0)
    start_epoch = 0 if extra_state is None else extra_state["epoch"]

    # 3. The data; what a DALI reader takes as resume_index a torch loader does not need
    loader = torch.utils.data.DataLoader(
        Rows(), batch_size=BATCH, shuffle=True, num_workers=int(get("CF_WORKERS", "0"))
    )
    torch.rand(3)  # drawn between restore and the first batch: must not change the rest of the run

    # 4. Wrap it
    train_loader = CFIterator(
        loader,
        bs=BATCH,
        dali=False,
        steps_this_epoch=0 if extra_state is None else extra_state["iter"],
        epoch=start_epoch,
        chk_freq=int(get("CF_FREQ", "0")),
        cf_manager=cf_manager,
    )
    train_loader.load_state_dict(extra_state)

    ledger = open(f"{sys.argv[1]}.ledger", "a")  # noqa: SIM115
    for epoch in range(start_epoch, EPOCHS):
        model.train()
        for batch in train_loader:
            data, index = unpack(batch)
            at = train_loader.state_dict()
            rate = 0.01 * min(1.0, (at["iter"] + epoch * BATCHES) / 20)  # warm-up
            optimizer.param_groups[0]["lr"] = rate
            loss = (model(data).squeeze(1) - index / SAMPLES).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            # 5. Use the wrapper for optimizer.step
            cf_manager.weight_update()
            print(at["steps_so_far"], epoch, index.tolist(), rate, loss.item().hex(), file=ledger, flush=True)
            time.sleep(0.02)  # the length of a step, as a larger model would have it
            if str(at["steps_so_far"]) in get("CF_KILL", "").split(","):
                die(cf_manager, agent_too=get("CF_KILL_AGENT") == "1")
        optimizer.param_groups[0]["weight_decay"] += 0.001  # after the loop: must run once for every epoch
        train_loader.reset()
        print("end of epoch", epoch, file=ledger, flush=True)
    whole = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print("weights", hashlib.sha256(whole).hexdigest(), optimizer.param_groups[0]["weight_decay"].hex())


def die(manager: CFManager, *, agent_too: bool) -> None:
    if agent_too:
        manager.checkpointer().wait()  # or there may be nothing on disk yet
        os.kill(manager.checkpointer().status().agent_pid, signal.SIGKILL)
    for worker in multiprocessing.active_children():
        worker.kill()  # they would notice by themselves, seconds later
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()

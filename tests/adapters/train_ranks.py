"""The five steps of CheckFreq's README on many ranks: what train.py is for one. Started by torchrun, or like it.

train_ranks.py WHERE        settings come from the environment; WHERE.ledger.<rank> gets a line for each step
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# 1. Import CheckFreq manager, and iterator
from stepwell.adapters.checkfreq import CFCheckpoint, CFIterator, CFManager, CFMode

EPOCHS, SAMPLES, BATCH = 3, 80, 2


def main() -> None:
    get = os.environ.get
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
    )
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.manual_seed(10 + rank)  # the order of the data is rank 0's all the same

    # 2. Initialize a checkpoint wrapper and a manager
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    cf_manager = CFManager(sys.argv[1], chk, mode=CFMode[get("CF_MODE", "AUTO")])
    extra_state = cf_manager.restore(gpu=int(get("LOCAL_RANK", "0")))
    start_epoch = 0 if extra_state is None else extra_state["epoch"]

    # 3. The data
    data = TensorDataset(torch.arange(SAMPLES))
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))

    # 4. Wrap it
    train_loader = CFIterator(
        loader,
        bs=BATCH,
        dali=False,
        steps_this_epoch=0 if extra_state is None else extra_state["iter"],
        epoch=start_epoch,
        worker_id=int(get("LOCAL_RANK", "0")),
        chk_freq=int(get("CF_FREQ", "0")),
        cf_manager=cf_manager,
    )
    train_loader.load_state_dict(extra_state)

    ledger = open(f"{sys.argv[1]}.ledger.{rank}", "a")  # noqa: SIM115
    for epoch in range(start_epoch, EPOCHS):
        for (index,) in train_loader:
            loss = (model(index[:, None].expand(-1, 6) / SAMPLES).squeeze(1) - index / SAMPLES).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            # 5. Use the wrapper for optimizer.step
            cf_manager.weight_update()
            steps = train_loader.state_dict()["steps_so_far"]
            print(steps, epoch, index.tolist(), loss.item().hex(), file=ledger, flush=True)
            time.sleep(float(get("CF_SLEEP", "0.02")))
            if get("CF_KILL") == f"{steps}:{rank}" and get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                os.kill(os.getpid(), signal.SIGKILL)
        train_loader.reset()
    cf_manager.close()
    whole = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
    print(f"rank {rank} weights", hashlib.sha256(whole).hexdigest(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

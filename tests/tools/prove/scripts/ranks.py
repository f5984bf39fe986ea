"""The script of tests/tools/prove on many ranks, started by torchrun. Each flaw changes the one thing its name says.

rebuild    DDP lays its buckets out anew after the first step of each start (more than 2 ranks)
untracked  each rank draws from a generator of its own, which is seeded and not tracked
"""

import random
import sys
import time

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import stepwell

SAMPLES, BATCH, EPOCHS, INTERVAL = 96, 2, 4, 4

flaw = sys.argv[1] if len(sys.argv) > 1 else None
distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.set_num_threads(1)
torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1)
)
model = DistributedDataParallel(net, find_unused_parameters=flaw != "rebuild")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
samples = torch.randn(SAMPLES, 16)
torch.manual_seed(10 + rank)
random.seed(20 + rank)
noise = random.Random(rank) if flaw == "untracked" else random

ckpt = stepwell.Checkpointer(
    "runs/ranks",
    policy=stepwell.Every(steps=INTERVAL),
    data=stepwell.DataLoader(samples, BATCH, shuffle=True),
    model=model,
    optimizer=optimizer,
)
ckpt.restore()
for _epoch in ckpt.epochs(EPOCHS):
    for batch in ckpt.data:
        output = model(batch + 0.1 * noise.random())
        loss = (output.squeeze(1) - batch.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ckpt.log(loss=loss)
        time.sleep(0.02)  # stands for the work of a larger model
distributed.destroy_process_group()

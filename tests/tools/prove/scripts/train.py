"""A small training script that resumes rightly as it stands. Each flaw changes the one thing its name says.

reinitialised   part of the model is made anew after restore()
no-restore      restore() is never called
unseeded        the noise comes from a generator that the operating system seeds
untracked       a generator of its own, seeded but not tracked
outside-guard   an average kept in the optimizer's state changes between trigger and optimizer.step(), through .data
rarely          the first checkpoint is the last
"""

import random
import sys
import time

import torch

import stepwell

STEPS_PER_EPOCH, EPOCHS, INTERVAL = 30, 4, 10

flaw = sys.argv[1] if len(sys.argv) > 1 else None
torch.set_num_threads(1)
torch.manual_seed(0)
random.seed(0)
noise = {"unseeded": random.Random(), "untracked": random.Random(0)}.get(flaw, random)

model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for parameter in model.parameters():
    optimizer.state[parameter]["average"] = parameter.detach().clone()
batches = list(torch.randn(STEPS_PER_EPOCH, 8, 16).unbind())

ckpt = stepwell.Checkpointer(
    "runs/small",
    policy=stepwell.Every(steps=10_000 if flaw == "rarely" else INTERVAL),
    data=batches,
    model=model,
    optimizer=optimizer,
)


def update_average():
    """Slowly: what went wrong once is still there at the end."""
    for parameter in model.parameters():
        optimizer.state[parameter]["average"].data.lerp_(parameter.data, 0.01)


resumed = flaw != "no-restore" and ckpt.restore()
if resumed and flaw == "reinitialised":
    model[3].reset_parameters()

for _epoch in ckpt.epochs(EPOCHS):
    for batch in ckpt.data:
        if flaw == "outside-guard":
            update_average()
        output = model(batch + 0.1 * noise.random())
        loss = (output.squeeze(1) - batch.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if flaw != "outside-guard":
            update_average()
        ckpt.log(loss=loss)
        time.sleep(0.01)  # stands for the work of a larger model

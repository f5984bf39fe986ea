"""Handwritten digits, with every kind of state that a resume can get wrong. One file, read top to bottom.

    python examples/digits.py                                        train; run it again after a crash: it goes on
    stepwell prove --kills 5 -- python examples/digits.py            show that it ends with the same bits

What has to come back: the weights of a small convolutional net, BatchNorm's running statistics, the optimizer's
momentum, the learning-rate schedule, a moving average of the weights, the position in the shuffled data, and torch's
generator, from which both dropout and the augmentation draw.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import stepwell

# -- settings ---------------------------------------------------------------------------------------------------------

epochs = 15
batch_size = 64
learning_rate = 0.05
weight_decay = 5e-4
held_out = 297  # of 1797 pictures

# Equal bits need equal arithmetic: seed what is drawn from, and let torch choose only deterministic kernels.
torch.manual_seed(1)
torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)  # the net is so small that more threads only get in each other's way

# -- data: 8 x 8 pictures of digits, shifted and blurred by noise each time they are looked at -------------------------

bundle = load_digits()
pictures = torch.tensor(bundle.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(bundle.target)


class Digits(Dataset):
    """The training part. Augments with torch's global generator, whose state is part of every checkpoint."""

    def __len__(self):
        return len(pictures) - held_out

    def __getitem__(self, index):
        down, right = torch.randint(-1, 2, (2,)).tolist()
        picture = pictures[index].roll((down, right), dims=(1, 2))
        return picture + 0.1 * torch.randn(picture.shape), labels[index]


loader = DataLoader(Digits(), batch_size=batch_size, shuffle=True, drop_last=True)

# -- model, optimizer, schedule, moving average ------------------------------------------------------------------------


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


model = nn.Sequential(
    block(1, 16),
    block(16, 32),
    nn.MaxPool2d(2),
    block(32, 64),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.3),
    nn.Linear(64 * 4, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9, weight_decay=weight_decay)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=epochs * len(loader))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=True)


@torch.no_grad()
def accuracy(net):
    """Share of the held-out pictures that are read right."""
    was_training = net.training
    net.eval()
    right = (net(pictures[-held_out:]).argmax(1) == labels[-held_out:]).float().mean()
    net.train(was_training)
    return right


# -- training: the ten lines -------------------------------------------------------------------------------------------

ckpt = stepwell.Checkpointer(
    "runs/digits",
    policy=stepwell.Every(steps=20),
    data=loader,
    model=model,
    optimizer=optimizer,
    schedule=schedule,
    average=average,
)
ckpt.restore()
for epoch in ckpt.epochs(epochs):
    for picture, label in ckpt.data:
        loss = F.cross_entropy(model(picture), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        ckpt.log(loss=loss, rate=schedule.get_last_lr()[0])
    right = accuracy(average)
    ckpt.log(accuracy=right)
    print(f"epoch {epoch + 1}: {right:.1%} of the held-out digits are read right", flush=True)

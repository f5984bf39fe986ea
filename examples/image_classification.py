"""Image classification with checkpoints taken at a frequency that is found while it runs. One file, top to bottom.

    python examples/image_classification.py -a resnet50 --data /data/imagenet --chk-prefix runs/resnet50 --resume
    python examples/image_classification.py -a small --steps 200            without data: pictures made on the fly
    torchrun --nproc-per-node 8 examples/image_classification.py ...        the same on 8 ranks (-b is of one rank)

The flags are those of CheckFreq's example where they mean something (docs/checkfreq.md has the rest). --data is a
folder with train/CLASS/*.jpg and val/CLASS/*.jpg. Models come from torchvision or timm, whichever knows the name;
`small` is the little ResNet below. Run it again with --resume after a crash, and it goes on as if nothing had happened.
"""

import argparse
import importlib
import os
import random
import time
from itertools import islice
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import stepwell

MEAN, SPREAD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", metavar="DIR", help="folder with train/ and val/; without it pictures are made on the fly")
    add("-a", "--arch", default="resnet18", help="name of the model in torchvision or timm, or `small`")
    add("-b", "--batch-size", type=int, default=256)
    add("-j", "--workers", type=int, default=4, help="processes (with --dali: threads) that read pictures")
    add("--epochs", type=int, default=3)
    add("--steps", type=int, default=0, help="end the run after this many steps")
    add("--lr", type=float, default=0.1, help="learning rate for 256 pictures a batch")
    add("--momentum", type=float, default=0.9)
    add("--weight-decay", type=float, default=1e-4)
    add("-p", "--print-freq", type=int, default=10)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--classes", type=int, default=1000, help="of the pictures made on the fly")
    add("--samples", type=int, default=1_281_167, help="how many of them an epoch has")
    add("--image-size", type=int, default=224)
    add("--dali", action="store_true", help="read with NVIDIA DALI")
    add("--deterministic", action="store_true", help="equal bits in every run: seeds, and deterministic kernels only")
    add("--noeval", action="store_true", help="do not look at val/ after each epoch")
    add("--chk-prefix", metavar="DIR", default="runs/image_classification", help="where the checkpoints go")
    add("--chk-freq", type=int, default=0, metavar="N", help="every N steps, instead of the automatic frequency")
    add("--chk_mode_baseline", action="store_true", help="at each epoch's end; with --chk-freq: waiting for the disk")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--barrier", action="store_true", help="let all ranks wait for each other after every step")
    for flag in ("--checkfreq", "--cf_iterator", "--dynamic", "--persist"):
        add(flag, action="store_true", help="always so")
    add("--local-rank", "--local_rank", help="given by torch.distributed.launch, which also sets LOCAL_RANK")
    args = parser.parse_args()
    args.ranks, args.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if args.dali and args.data is None:
        parser.error("--dali reads files: give --data")
    return args


# -- data -------------------------------------------------------------------------------------------------------------


class MadeOnTheFly(Dataset):
    """As many pictures as asked for: noise around a colour that depends on the class. The same index, the same one."""

    def __init__(self, samples, classes, size):
        self.samples, self.classes, self.size = samples, classes, size

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        label = index % self.classes
        colour = torch.randn(3, 1, 1, generator=torch.Generator().manual_seed(label))
        noise = torch.randn(3, self.size, self.size, generator=torch.Generator().manual_seed(10_000 + index))
        return colour + noise, label


class Folder(Dataset):
    """CLASS/*.jpg. For training a random part, mirrored half of the time; else the middle."""

    def __init__(self, root, size, is_training):
        self.classes = sorted(path.name for path in Path(root).iterdir() if path.is_dir())
        pairs = ((path, label) for label, name in enumerate(self.classes) for path in Path(root, name).iterdir())
        self.pairs, self.size, self.is_training = sorted(pairs), size, is_training

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        from PIL import Image

        path, label = self.pairs[index]
        with Image.open(path) as file:
            picture = file.convert("RGB")
        side = min(picture.size) * 7 // 8
        x, y = ((length - side) // 2 for length in picture.size)
        if self.is_training:
            area = float(torch.empty(1).uniform_(0.1, 1.0))
            side = max(1, int(min(picture.size) * area**0.5))
            x, y = (int(torch.randint(0, length - side + 1, (1,))) for length in picture.size)
        picture = picture.crop((x, y, x + side, y + side)).resize((self.size, self.size), Image.Resampling.BILINEAR)
        pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
        image = (pixels.view(self.size, self.size, 3).float() / 255 - MEAN) / SPREAD
        if self.is_training and float(torch.rand(1)) < 0.5:
            image = image.flip(1)
        return image.permute(2, 0, 1), label


class Dali:
    """Batches of this rank's part of train/ from stock DALI. Its position is tracked; it is built anew around it."""

    def __init__(self, root, args):
        from stepwell.adapters.dali import FileReader

        part = {"file_root": str(root), "num_shards": args.ranks, "draws": 3, "cf_det": True}
        self.make_reader = lambda **position: FileReader(**part, shard_id=args.rank, **position)
        self.args, self.epoch, self.samples = args, 0, 0
        self.length = FileReader(**part).epoch_size()  # the first part is the smallest: all ranks take as many steps

    def state_dict(self):
        return {"epoch": self.epoch, "samples": self.samples, "ranks": self.args.ranks}

    def load_state_dict(self, state):
        if state["samples"] and state.get("ranks", 1) != self.args.ranks:
            raise ValueError(f"saved in mid-epoch on {state['ranks']} ranks: with --dali start as many again")
        self.epoch, self.samples = state["epoch"], state["samples"]

    def __len__(self):
        return -(-self.length // self.args.batch_size)

    def __iter__(self):
        from nvidia.dali import fn, pipeline_def, types
        from nvidia.dali.plugin.pytorch import DALIGenericIterator

        is_gpu, size = self.args.device.startswith("cuda"), self.args.image_size
        left = max(0, len(self) - self.samples // self.args.batch_size)
        reader = self.make_reader(resume_index=self.samples, resume_epoch=self.epoch)

        @pipeline_def(batch_size=self.args.batch_size, num_threads=max(1, self.args.workers), seed=1)
        def pipeline():
            files, labels, draws = reader()  # the draws belong to the sample: a resume sees the same picture again
            images = fn.decoders.image(files, device="mixed" if is_gpu else "cpu")
            images = fn.resize(images, resize_shorter=size * 8 // 7)
            images = fn.crop_mirror_normalize(
                images,
                crop=(size, size),
                crop_pos_x=draws[0],
                crop_pos_y=draws[1],
                mirror=fn.cast(draws[2] < 0.5, dtype=types.INT32),
                mean=(255 * MEAN).tolist(),
                std=(255 * SPREAD).tolist(),
            )
            return images, labels

        batches = pipeline(device_id=torch.cuda.current_device() if is_gpu else None)
        for batch in islice(DALIGenericIterator(batches, ["images", "labels"]), left) if left else ():
            self.samples = min(self.length, self.samples + self.args.batch_size)
            yield batch[0]["images"], batch[0]["labels"].squeeze(1).long()
        self.epoch, self.samples = self.epoch + 1, 0


# -- model ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride != 1 else nn.Identity()

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


def small_resnet(classes):
    start = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(start, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def make_model(name, classes):
    if name == "small":
        return small_resnet(classes)
    for library, make in (("torchvision.models", "get_model"), ("timm", "create_model")):
        try:
            found = importlib.import_module(library)
            options = {"aux_logits": False} if name == "inception_v3" and library != "timm" else {}
            return getattr(found, make)(name, num_classes=classes, **options)
        except (ImportError, RuntimeError, ValueError, KeyError) as error:
            print(f"{library} gives no {name}: {error}. Without it the small ResNet of this file is used")
    return small_resnet(classes)


@torch.no_grad()
def accuracy(model, loader, device):
    """Share of the pictures whose class is found."""
    model.eval()
    right = [(model(images.to(device)).argmax(1) == labels.to(device)).float() for images, labels in loader]
    model.train()
    return torch.cat(right).mean().item()


# -- training ---------------------------------------------------------------------------------------------------------


def main():
    args = parse()
    if args.ranks > 1:
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if args.device == "cuda" else "gloo")
    if args.deterministic:
        random.seed(1)
        torch.manual_seed(1)
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not args.deterministic

    def pictures(part, samples):
        if args.data is None:
            return MadeOnTheFly(samples, args.classes, args.image_size)
        return Folder(Path(args.data, part), args.image_size, part == "train")

    train = pictures("train", args.samples)
    val = None if args.noeval else pictures("val", max(args.batch_size, args.samples // 25))
    loading = {"batch_size": args.batch_size, "num_workers": args.workers, "pin_memory": args.device != "cpu"}
    each = {"shuffle": True} if args.ranks == 1 else {"sampler": DistributedSampler(train)}
    loader = Dali(Path(args.data, "train"), args) if args.dali else DataLoader(train, **each, **loading)

    model = make_model(args.arch, args.classes if args.data is None else len(train.classes)).to(args.device)
    if args.ranks > 1:  # equal bits need buckets that stay as they are from the first step on: docs/ranks.md
        model = DistributedDataParallel(model, find_unused_parameters=args.deterministic)
        torch.manual_seed(args.rank + 1)  # from here on each rank draws for itself
    rate = args.lr * args.batch_size * args.ranks / 256
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=args.momentum, weight_decay=args.weight_decay)
    epoch_steps = len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(  # five epochs of warm-up, then a tenth after each thirty
        optimizer, lambda step: min(1.0, (step + 1) / (5 * epoch_steps)) * 0.1 ** (step // (30 * epoch_steps))
    )

    is_waiting = args.chk_mode_baseline and args.chk_freq > 0
    policy = stepwell.Every(steps=args.chk_freq) if args.chk_freq > 0 else None  # None: the automatic one
    if args.chk_mode_baseline:
        policy = stepwell.Never() if is_waiting else stepwell.Every(epochs=1)
    # DALI's iterator keeps its own position, so it is tracked; a DataLoader is brought to any position as data=.
    source = {"dali": loader} if args.dali else {"data": loader}
    ckpt = stepwell.Checkpointer(
        args.chk_prefix, policy=policy, model=model, optimizer=optimizer, schedule=schedule, **source
    )
    if args.resume:
        ckpt.restore()
    for epoch in ckpt.epochs(args.epochs):
        started = time.monotonic()
        for number, (images, labels) in enumerate(loader if args.dali else ckpt.data, 1):
            if args.steps and schedule.last_epoch >= args.steps:
                break
            loss = F.cross_entropy(model(images.to(args.device)), labels.to(args.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            ckpt.log(loss=loss)
            is_end = args.chk_mode_baseline and args.dali and loader.samples == loader.length
            if is_end or (is_waiting and schedule.last_epoch % args.chk_freq == 0):
                ckpt.save().wait()
            if args.dali:
                ckpt.step()
            if args.barrier and args.ranks > 1:
                distributed.barrier()
            if number % args.print_freq == 0 and args.rank == 0:
                speed = number * args.batch_size * args.ranks / (time.monotonic() - started)
                line = f"epoch {epoch + 1}, step {schedule.last_epoch}: loss {loss:.4f}, {speed:.0f} pictures/s"
                print(line, flush=True)
        if val is not None and args.rank == 0:
            right = accuracy(getattr(model, "module", model), DataLoader(val, **loading), args.device)
            print(f"epoch {epoch + 1}: {right:.1%} of the pictures in val are found", flush=True)
        if args.steps and schedule.last_epoch >= args.steps:
            break
    ckpt.close()
    if args.rank == 0:
        print(f"done: step {schedule.last_epoch}, checkpoints in {args.chk_prefix}")
    if args.ranks > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()

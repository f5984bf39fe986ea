"""nvidia-resiliency-ext, DLRover flash checkpoint, lm-resiliency (GEMINI)."""

from __future__ import annotations

import os
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch

from peer.rows.base import Row, Saved, fill
from peer.rows.dcp import start_group


class Nvrx(Row):
    """`TorchAsyncCheckpoint` with its persistent worker. The loop has to ask, once an iteration, whether it ended."""

    label = "nvidia-resiliency-ext TorchAsyncCheckpoint"
    is_async = True

    @classmethod
    def why_not(cls, device: str) -> str | None:
        return None if device == "cuda" else "calls CUDA unconditionally"

    def open(self) -> None:
        start_group()
        module = import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt")
        self.saver = module.TorchAsyncCheckpoint(persistent_queue=True)
        self.pending: list[threading.Event] = []

    def close(self) -> None:
        self.saver.finalize_async_save(blocking=True, no_dist=True, terminate=True)

    def path(self, step: int) -> Path:
        return self.where / f"step-{step}.pt"

    def save(self, step: int) -> Saved:
        self.saver.async_save(self.work.state(), str(self.path(step)))
        done = threading.Event()
        self.pending.append(done)
        return Saved(wait_done=done.wait)

    def tick(self) -> None:
        if self.pending:
            self.saver.finalize_async_save(blocking=False, no_dist=True)
            if self.saver._async_calls_queue.get_num_unfinalized_calls() == 0:
                while self.pending:
                    self.pending.pop().set()

    def load(self, step: int) -> None:
        fill(self.work.state(), torch.load(self.path(step), mmap=True, weights_only=True, map_location="cpu"))


class DLRover(Row):
    """Flash checkpoint to disk. Without `dlrover-run` its saver is a child of the trainer, which outlives a SIGKILL."""

    label = "DLRover flash checkpoint, disk"
    is_async = True

    checkpointer: ClassVar[Any]
    storage_type: ClassVar[Any]

    @classmethod
    def before_training(cls, where: Path) -> None:
        """Its saver is forked: in a child forked after torch's threads have run, it hangs."""
        os.environ["TORCHELASTIC_RUN_ID"] = f"stepwell-bench-{os.getpid()}"  # names its shared memory and sockets
        module = import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
        cls.storage_type = import_module("dlrover.trainer.torch.flash_checkpoint.checkpointer").StorageType
        cls.checkpointer = module.DdpCheckpointer(str(where))

    def close(self) -> None:
        engine = self.checkpointer._engine
        engine.close()
        if engine.saver_proc is not None:
            engine.saver_proc.terminate()

    def path(self, step: int) -> Path:
        return self.where / f"step-{step}.pt"

    def save(self, step: int) -> Saved:
        self.checkpointer.save_checkpoint(
            step, self.work.state(), path=str(self.path(step)), storage_type=self.storage_type.DISK
        )
        return Saved(wait_done=lambda: self._wait_tracker(step))

    def _wait_tracker(self, step: int, timeout: float = 120) -> None:
        """Its own wait looks every three seconds; the file it looks at is this one."""
        until = time.monotonic() + timeout
        while not self.is_complete(step):
            if time.monotonic() > until:
                raise TimeoutError(f"DLRover did not say that step {step} is on disk (it skips saves while it writes)")
            time.sleep(0.005)

    def is_complete(self, step: int) -> bool:
        tracker = self.where / "dlrover_latest.txt"
        return tracker.exists() and tracker.read_text().strip() == str(step)

    def load(self, step: int) -> None:
        loaded = torch.load(self.path(step), mmap=True, weights_only=False, map_location="cpu")
        fill(self.work.state(), loaded)


class LmResiliency(Row):
    """GEMINI's manager on one rank: copy to memory, wait for it before the step, then flush to its disk tier.

    Its flush clones the copy in the calling thread before the writer thread starts; that is part of `blocked`.
    """

    label = "lm-resiliency (GEMINI), disk flush"
    is_async = True
    fsyncs = "all"

    def open(self) -> None:
        package = import_module("lm_resiliency")
        manager = import_module("lm_resiliency.checkpointing.manager")
        config = package.InMemoryCkptConfig(
            interval=1, disk_flush_interval=0, disk_folder=str(self.where), run_id="bench", pin_memory=self.work.is_cuda
        )
        self.manager: Any = manager.InMemoryCheckpointManager(config)

    def close(self) -> None:
        self.manager.close()

    def save(self, step: int) -> Saved:
        flushing = threading.Event()
        self.manager.save_tensors(list(self.work.state().values()), step)

        def staged() -> None:
            if not flushing.is_set():
                self.manager.maybe_wait()
                self.manager.flush_to_disk(step)
                flushing.set()

        def done() -> None:
            flushing.wait()
            thread = self.manager._disk._write_thread
            if thread is not None:
                thread.join()
            if self.manager._disk._write_error is not None:
                raise self.manager._disk._write_error

        return Saved(wait_done=done, wait_staged=staged)

    def path(self, step: int) -> Path:
        found = list(self.where.rglob(f"step-{step}"))
        return found[0] if found else self.where / f"step-{step}"

    def is_complete(self, step: int) -> bool:
        return any(self.path(step).glob("rank-*.pt"))

    def import_all(self) -> None:
        import_module("lm_resiliency.checkpointing.manager")

    def load(self, step: int) -> None:
        self.open()
        loaded = self.manager.load_tensors(step=step)
        if loaded is None:
            raise RuntimeError(f"step {step} is not recoverable")
        state = self.work.state()
        fill(state, dict(zip(state, loaded[0], strict=True)))

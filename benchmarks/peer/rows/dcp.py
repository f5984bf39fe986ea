"""torch.distributed.checkpoint: save, and async_save in its four documented combinations."""

from __future__ import annotations

import os
import socket
import warnings
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from peer.rows.base import Row, Saved

THREADS = 2 if (os.cpu_count() or 1) < 8 else 8


def start_group() -> None:
    """A process group of one, as a launcher would have made it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    warnings.filterwarnings("ignore", module="torch.distributed")
    dist.init_process_group("gloo", rank=0, world_size=1)


class Save(Row):
    """The default: one thread, fsync of the data."""

    label = "DCP save"
    fsyncs = "data"
    threads = 1

    def open(self) -> None:
        start_group()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def writer(self, step: int) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(self.path(step), thread_count=self.threads)

    def save(self, step: int) -> Saved:
        dcp.save(self.work.state(), storage_writer=self.writer(step))
        return Saved()

    def load(self, step: int) -> None:
        dcp.load(self.work.state(), checkpoint_id=self.path(step), no_dist=True)

    def is_complete(self, step: int) -> bool:
        return (self.path(step) / ".metadata").exists()


class SaveThreads(Save):
    label = f"DCP save, {THREADS} threads"
    threads = THREADS


class AsyncThread(Save):
    """async_save as it comes: a fresh copy, then a thread."""

    label = "DCP async_save, thread"
    is_async = True
    kind = AsyncCheckpointerType.THREAD
    stager: DefaultStager | None = None

    def save(self, step: int) -> Saved:
        answer: Any = dcp.async_save(
            self.work.state(),
            storage_writer=self.writer(step),
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )
        if isinstance(answer, Future):
            return Saved(wait_done=answer.result)
        return Saved(wait_done=answer.upload_completion.result, wait_staged=answer.staging_completion.result)

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()
        super().close()


class AsyncProcess(AsyncThread):
    """Only the documented switch."""

    label = "DCP async_save, process"
    kind = AsyncCheckpointerType.PROCESS


def reused(*, is_cuda: bool, shared: bool) -> DefaultStager:
    """Staging memory that is kept: page-locked and copied in the background where there is a GPU."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=is_cuda,
            use_shared_memory=shared,
            use_async_staging=is_cuda,
            use_non_blocking_copy=is_cuda,
        )
    )


class AsyncThreadReused(AsyncThread):
    label = "DCP async_save, thread, reused stager"

    def open(self) -> None:
        super().open()
        self.stager = reused(is_cuda=self.work.is_cuda, shared=False)


class AsyncProcessShared(AsyncProcess):
    label = "DCP async_save, process, shared-memory stager"

    def open(self) -> None:
        super().open()
        self.stager = reused(is_cuda=self.work.is_cuda, shared=True)

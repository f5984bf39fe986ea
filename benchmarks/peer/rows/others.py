"""torch_checkpointing, torchsnapshot, Lightning's async IO, Orbax."""

from __future__ import annotations

import contextlib
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from peer import disk
from peer.rows.base import Row, Saved, fill


class TorchCheckpointing(Row):
    """`CheckpointManager` with its defaults; direct I/O is switched off where its writer fails with it."""

    label = "torch_checkpointing async"
    is_async = True
    prepares = True

    def open(self) -> None:
        self.manager = self._manager(direct=self._direct_io_works())
        with contextlib.suppress(RuntimeError):
            self.manager.prewarm_staging(self.payload())  # documented: not in the first save

    def _manager(self, *, direct: bool) -> Any:
        package = import_module("torch_checkpointing")
        storage = import_module("torch_checkpointing.storage.filesystem")
        config = package.CheckpointManager.Config(
            save=package.AsyncCheckpointSaverConfig() if self.is_async else package.SyncCheckpointSaverConfig(),
            storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=direct),
        )
        return package.CheckpointManager(config)

    def _direct_io_works(self) -> bool:
        package = import_module("torch_checkpointing")
        probe = self.where / "probe"
        try:
            package.CheckpointManager(package.CheckpointManager.Config.with_sync_save()).save(
                str(probe), {"state": {"x": torch.zeros(1001)}}
            )
        except Exception as error:
            self.notes.append(f"use_direct_io=False: its default fails here ({type(error).__name__})")
            return False
        finally:
            disk.remove(probe)
        return True

    def payload(self) -> dict[str, Any]:
        return {"state": self.work.state()}

    def close(self) -> None:
        self.manager.close()

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        return self.manager.lock()

    def save(self, step: int) -> Saved:
        future = self.manager.save(str(self.path(step)), self.payload())
        return Saved() if future is None else Saved(wait_done=future.result)

    def import_all(self) -> None:
        import_module("torch_checkpointing")

    def load(self, step: int) -> None:
        package = import_module("torch_checkpointing")
        manager = package.CheckpointManager(package.CheckpointManager.Config.with_sync_save())
        fill(self.work.state(), manager.load(str(self.path(step)), into=self.payload())["state"])


class TorchCheckpointingSync(TorchCheckpointing):
    label = "torch_checkpointing sync"
    is_async = False
    prepares = False


class SnapshotTake(Row):
    label = "torchsnapshot take"

    def app_state(self) -> dict[str, Any]:
        return {"state": import_module("torchsnapshot").StateDict(**self.work.state())}

    def save(self, step: int) -> Saved:
        import_module("torchsnapshot").Snapshot.take(str(self.path(step)), self.app_state())
        return Saved()

    def import_all(self) -> None:
        import_module("torchsnapshot")

    def load(self, step: int) -> None:
        app_state = self.app_state()
        import_module("torchsnapshot").Snapshot(str(self.path(step))).restore(app_state)
        fill(self.work.state(), app_state["state"])

    def is_complete(self, step: int) -> bool:
        return (self.path(step) / ".snapshot_metadata").exists()


class SnapshotAsyncTake(SnapshotTake):
    label = "torchsnapshot async_take"
    is_async = True

    def save(self, step: int) -> Saved:
        pending = import_module("torchsnapshot").Snapshot.async_take(str(self.path(step)), self.app_state())
        return Saved(wait_done=pending.wait)


class LightningAsync(Row):
    """The IO plug-in alone, without a Trainer. It tells nobody when a write ended: we ask its executor."""

    label = "Lightning AsyncCheckpointIO"
    is_async = True
    fsyncs = "data"

    def open(self) -> None:
        try:
            plugins = import_module("lightning.pytorch.plugins.io")
        except ImportError:
            plugins = import_module("pytorch_lightning.plugins.io")
        self.io = plugins.AsyncCheckpointIO(plugins.TorchCheckpointIO())

    def close(self) -> None:
        self.io.teardown()

    def path(self, step: int) -> Path:
        return self.where / f"step-{step}.ckpt"

    def save(self, step: int) -> Saved:
        self.io.save_checkpoint({"state": self.work.state()}, str(self.path(step)))
        return Saved(wait_done=self.io._executor.submit(lambda: None).result)  # one thread: ends after the write

    def load(self, step: int) -> None:
        loaded = torch.load(self.path(step), mmap=True, weights_only=True, map_location="cpu")
        fill(self.work.state(), loaded["state"])


class Orbax(Row):
    """A tree of numpy arrays; on CUDA they are copied to the host first, since Orbax knows JAX's devices only."""

    label = "Orbax AsyncCheckpointer (numpy tree)"
    is_async = True
    fsyncs = "data"

    def open(self) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        self.ocp = import_module("orbax.checkpoint")
        self.saver = self.ocp.AsyncCheckpointer(self.ocp.StandardCheckpointHandler())

    def close(self) -> None:
        self.saver.close()

    def tree(self) -> dict[str, Any]:
        return {name: tensor.cpu().numpy() for name, tensor in self.work.state().items()}

    def save(self, step: int) -> Saved:
        self.saver.save(self.path(step).absolute(), args=self.ocp.args.StandardSave(self.tree()), force=True)
        return Saved(wait_done=self.saver.wait_until_finished)

    def import_all(self) -> None:
        self.open()

    def load(self, step: int) -> None:
        loaded = self.saver.restore(self.path(step).absolute(), args=self.ocp.args.StandardRestore(self.tree()))
        fill(self.work.state(), {name: torch.from_numpy(array) for name, array in loaded.items()})

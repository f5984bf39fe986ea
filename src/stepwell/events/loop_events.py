"""Events of the training loop: postponed and repeated saves, where a restart continues, how training ended."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar, Final

from stepwell.events.run_events import Event

BETWEEN: Final = "between two epochs"
IN_BODY: Final = "in the loop body"


@dataclass(frozen=True, kw_only=True)
class PutOff(Event):
    """save() was called between a batch and the optimizer's step: stepwell saves when that step is over."""

    level: ClassVar[int] = logging.INFO
    step: int

    def text(self) -> str:
        return f"save() was called in the middle of step {self.step}: stepwell saves when that step is over"


@dataclass(frozen=True, kw_only=True)
class SavedAgain(Event):
    """Code after a save, in the loop body or after the epoch, changed the state: that save would be incomplete."""

    level: ClassVar[int] = logging.INFO
    step: int
    changed: list[str]
    where: str

    def text(self) -> str:
        return (
            f"Saving step {self.step} again, because these changed after the save() {self.where}: "
            f"{', '.join(self.changed)}. Call save() last"
        )


@dataclass(frozen=True, kw_only=True)
class SaveFailed(Event):
    """A save failed, and its moment does not come again."""

    level: ClassVar[int] = logging.WARNING
    line: ClassVar[str] = "Cannot save step {step}: {reason}"
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class LeftInEpoch(Event):
    """The loop over ckpt.data ended in the middle of an epoch, and the code after it changed the state."""

    level: ClassVar[int] = logging.WARNING
    step: int
    epoch: int
    batches: int
    changed: list[str]

    def text(self) -> str:
        return (
            f"The loop left epoch {self.epoch} after {self.batches} batches, and the code after it changed "
            f"{', '.join(self.changed)}. A restart continues with the next batch of that epoch and runs that code "
            "again. If that matters, leave the outer loop first"
        )


@dataclass(frozen=True, kw_only=True)
class ResumedInPart(Event):
    """The restored checkpoint is in the middle of a gradient accumulation."""

    level: ClassVar[int] = logging.WARNING
    step: int
    batches: int

    def text(self) -> str:
        return (
            f"Step {self.step} continues in the middle of a gradient accumulation; its gradients are restored. A "
            f"loop that counts batches with enumerate() must start at ckpt.data.index ({self.batches}), or its "
            "optimizer steps too late"
        )


@dataclass(frozen=True, kw_only=True)
class OwnLoader(Event):
    """The loop reads its data itself: a restart cannot skip the used batches, nor know whether it should."""

    level: ClassVar[int] = logging.WARNING
    step: int
    epoch: int
    batches: int

    def text(self) -> str:
        counted = f"of epoch {self.epoch}" if self.epoch else "of epoch 0 (or of all epochs without ckpt.epochs())"
        return (
            f"Step {self.step} follows {self.batches} batches {counted}. If they come from a loader that stepwell "
            "does not read, skip as many (ckpt.data.index), or pass data= and iterate ckpt.data. If these were "
            "all batches, the code after the inner loop runs again. A loop that draws its batches from the "
            "global generators of torch, NumPy or Python, or from a tracked object, skips nothing: stepwell "
            "restores these"
        )


@dataclass(frozen=True, kw_only=True)
class NotRead(Event):
    """data= was given, but the loop reads another loader."""

    level: ClassVar[int] = logging.WARNING
    step: int
    calls: int

    def text(self) -> str:
        return (
            f"Counted {self.calls} optimizer steps as one (step {self.step}): data= was given, but no batch came "
            "from ckpt.data, so a restart begins the epoch again. Iterate ckpt.data instead of the loader"
        )


@dataclass(frozen=True, kw_only=True)
class NoEpochs(Event):
    """An option refers to the end of epochs, but stepwell does not know where they end."""

    level: ClassVar[int] = logging.WARNING
    asked: str

    def text(self) -> str:
        return (
            f"{self.asked} never happens: stepwell does not know where an epoch ends. Iterate ckpt.epochs(n) or "
            "ckpt.data"
        )


@dataclass(frozen=True, kw_only=True)
class OutsideEpochs(Event):
    """After a restart the loop does not ask which epoch to continue."""

    level: ClassVar[int] = logging.WARNING
    step: int
    epoch: int

    def text(self) -> str:
        more = "1 epoch" if self.epoch == 1 else f"{self.epoch} epochs"
        return (
            f"This restart continues in epoch {self.epoch}, but the loop does not iterate ckpt.epochs(n): `for "
            f"epoch in range(n)` starts at 0 again and trains {more} too many. Iterate ckpt.epochs(n). Ignore "
            "this if the loop counts epochs in a tracked object and ends by that"
        )


@dataclass(frozen=True, kw_only=True)
class NoSteps(Event):
    """The loop continues, but no tracked optimizer steps."""

    level: ClassVar[int] = logging.WARNING
    step: int
    batches: int

    def text(self) -> str:
        return (
            f"{self.batches} batches since step {self.step}, and no tracked optimizer has stepped: stepwell saves "
            "nothing. If you created an optimizer after the Checkpointer, create a new Checkpointer with it"
        )


@dataclass(frozen=True, kw_only=True)
class LeftEpochs(Event):
    """The loop over `ckpt.epochs()` ended early, and the run closes normally."""

    level: ClassVar[int] = logging.INFO
    step: int
    epoch: int
    epochs: int

    def text(self) -> str:
        return (
            f"The loop ended in epoch {self.epoch} of {self.epochs}, at step {self.step}: a restart trains on. To "
            "end the run there, call ckpt.finish() instead of break"
        )


@dataclass(frozen=True, kw_only=True)
class Overridden(Event):
    """The script's settings have changed since the run began; those of the checkpoint are used."""

    level: ClassVar[int] = logging.WARNING
    changed: list[str]

    def text(self) -> str:
        return (
            f"Using the settings of the checkpoint; the script has others: {'; '.join(self.changed)}. To use "
            "those of the script, set them after restore()"
        )


@dataclass(frozen=True, kw_only=True)
class Ended(Event):
    """Training ended without a last save."""

    level: ClassVar[int] = logging.WARNING
    step: int
    on_disk: int | None
    reason: str

    def text(self) -> str:
        where = "nothing is on disk" if self.on_disk is None else f"step {self.on_disk} is on disk"
        redone = self.step - (self.on_disk or 0)
        steps = "step" if redone == 1 else "steps"
        return f"Training ended at step {self.step} ({self.reason}); {where}: a restart redoes {redone} {steps}"


@dataclass(frozen=True, kw_only=True)
class StillOpen(Event):
    """Another Checkpointer of this process tracks the same optimizer, over another directory."""

    level: ClassVar[int] = logging.INFO
    place: str

    def text(self) -> str:
        return (
            f"The Checkpointer of {self.place} is still open in this process and tracks the same optimizer: it "
            "keeps saving there, with its own agent, threads and memory. If you are done with it, close() it or "
            "use `with`"
        )


@dataclass(frozen=True, kw_only=True)
class LeavesLater(Event):
    """The last checkpoint is saved, but another Checkpointer of this process is in the middle of a step."""

    level: ClassVar[int] = logging.INFO
    step: int

    def text(self) -> str:
        return f"Saved step {self.step}; waiting for another Checkpointer of this process to finish its step"


@dataclass(frozen=True, kw_only=True)
class NoSuchVariable(Event):
    """An environment variable looks like a misspelled one of ours."""

    level: ClassVar[int] = logging.WARNING
    name: str
    meant: str

    def text(self) -> str:
        return f"The environment variable {self.name} has no effect; did you mean {self.meant}?"


@dataclass(frozen=True, kw_only=True)
class Redirected(Event):
    """`stepwell prove` runs a script that trains in a bucket in a directory instead."""

    level: ClassVar[int] = logging.WARNING
    asked: str
    place: str

    def text(self) -> str:
        return f"STEPWELL_WHERE puts this run into {self.place} instead of the bucket {self.asked}"

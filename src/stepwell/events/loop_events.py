"""What the log says of the loop: saves that wait or come again, where a restart goes on, and how training ended."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar, Final

from stepwell.events.run_events import Event

BETWEEN: Final = "between two epochs"
IN_BODY: Final = "in the loop body"


@dataclass(frozen=True, kw_only=True)
class PutOff(Event):
    """save() was called between a batch and the optimizer's step: it is taken when that step is over."""

    level: ClassVar[int] = logging.INFO
    step: int

    def text(self) -> str:
        return f"save() came in the middle of step {self.step}, and is taken when that step is over"


@dataclass(frozen=True, kw_only=True)
class SavedAgain(Event):
    """The code after a save went on, in the loop body or after the epoch: what that has would be incomplete."""

    level: ClassVar[int] = logging.INFO
    step: int
    changed: list[str]
    where: str

    def text(self) -> str:
        return (
            f"step {self.step} is saved again: after the save() {self.where} these changed: "
            f"{', '.join(self.changed)}. Call save() last"
        )


@dataclass(frozen=True, kw_only=True)
class SaveFailed(Event):
    """A save whose moment does not come again came to nothing."""

    level: ClassVar[int] = logging.WARNING
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class LeftInEpoch(Event):
    """The loop over ckpt.data was left in the middle of an epoch, and the code after it changed the state."""

    level: ClassVar[int] = logging.WARNING
    step: int
    epoch: int
    batches: int
    changed: list[str]

    def text(self) -> str:
        return (
            f"the loop left epoch {self.epoch} after {self.batches} batches, and the code after it changed "
            f"{', '.join(self.changed)}. A restart goes on with the next batch of that epoch, and runs that code "
            "again: leave the outer loop first where that matters"
        )


@dataclass(frozen=True, kw_only=True)
class ResumedInPart(Event):
    """The restored checkpoint lies in the middle of an accumulation."""

    level: ClassVar[int] = logging.WARNING
    step: int
    batches: int

    def text(self) -> str:
        return (
            f"step {self.step} goes on in the middle of an accumulation: its gradients are back. A loop that counts "
            f"batches with enumerate() has to begin at ckpt.data.index ({self.batches}), or it steps too late"
        )


@dataclass(frozen=True, kw_only=True)
class OwnLoader(Event):
    """The loop reads or draws its data itself: a restart cannot skip what was used, nor does it know whether to."""

    level: ClassVar[int] = logging.WARNING
    step: int
    epoch: int
    batches: int

    def text(self) -> str:
        counted = f"of epoch {self.epoch}" if self.epoch else "of epoch 0, or of all without ckpt.epochs()"
        return (
            f"step {self.step} comes after {self.batches} batches {counted}. If they are from a loader that stepwell "
            "does not read, skip as many (ckpt.data.index), or pass data= and iterate ckpt.data. Code after the inner "
            "loop runs again if these were all. A loop that draws its batches from the global generators of torch, "
            "NumPy or Python, or from a tracked object, skips nothing: these are restored"
        )


@dataclass(frozen=True, kw_only=True)
class NotRead(Event):
    """A loader was given as data=, and the loop goes past it."""

    level: ClassVar[int] = logging.WARNING
    step: int
    calls: int

    def text(self) -> str:
        return (
            f"{self.calls} optimizer steps count as one, step {self.step}: data= was given, and no batch came from "
            "ckpt.data, so a restart begins the epoch anew. Iterate ckpt.data instead of the loader"
        )


@dataclass(frozen=True, kw_only=True)
class NoEpochs(Event):
    """Something is asked for at the end of epochs, and nothing says where they end."""

    level: ClassVar[int] = logging.WARNING
    asked: str

    def text(self) -> str:
        return f"{self.asked} never happens: nothing tells where an epoch ends. Iterate ckpt.epochs(n), or ckpt.data"


@dataclass(frozen=True, kw_only=True)
class OutsideEpochs(Event):
    """After a restart the loop does not ask in which epoch it goes on."""

    level: ClassVar[int] = logging.WARNING
    step: int
    epoch: int

    def text(self) -> str:
        more = "1 epoch" if self.epoch == 1 else f"{self.epoch} epochs"
        return (
            f"this restart goes on in epoch {self.epoch}, and the loop does not iterate ckpt.epochs(n): `for epoch in "
            f"range(n)` begins at 0 again, and trains {more} too many. Iterate ckpt.epochs(n). A loop that counts in a "
            "tracked object, and ends by that, is right as it is"
        )


@dataclass(frozen=True, kw_only=True)
class NoSteps(Event):
    """The loop goes on, and no tracked optimizer steps."""

    level: ClassVar[int] = logging.WARNING
    step: int
    batches: int

    def text(self) -> str:
        return (
            f"{self.batches} batches since step {self.step}, and no tracked optimizer has stepped: nothing is saved. "
            "One that was made after the Checkpointer is not known to it: make a new Checkpointer with it"
        )


@dataclass(frozen=True, kw_only=True)
class LeftEpochs(Event):
    """The loop over `ckpt.epochs()` was left early, and the run ends in good order."""

    level: ClassVar[int] = logging.INFO
    step: int
    epoch: int
    epochs: int

    def text(self) -> str:
        return (
            f"training was left in epoch {self.epoch} of {self.epochs}, at step {self.step}: a restart trains on. "
            "ckpt.finish() in the place of break ends the run"
        )


@dataclass(frozen=True, kw_only=True)
class Overridden(Event):
    """The script's own settings are others than when the run began; the checkpoint's hold."""

    level: ClassVar[int] = logging.WARNING
    changed: list[str]

    def text(self) -> str:
        return (
            f"the checkpoint's settings hold, and the script's have changed: {'; '.join(self.changed)}. Set them after "
            "restore() to have the script's"
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
        return f"training ended at step {self.step} ({self.reason}); {where}: a restart does {redone} {steps} again"


@dataclass(frozen=True, kw_only=True)
class StillOpen(Event):
    """Another Checkpointer of this process tracks the same optimizer, over another directory."""

    level: ClassVar[int] = logging.INFO
    place: str

    def text(self) -> str:
        return (
            f"the Checkpointer of {self.place} is still open in this process, and follows the same optimizer: it goes "
            "on saving there, with an agent, threads and memory of its own. close() it if that is over, or use `with`"
        )


@dataclass(frozen=True, kw_only=True)
class LeavesLater(Event):
    """The last checkpoint is made, and another Checkpointer of this process is in the middle of a step."""

    level: ClassVar[int] = logging.INFO
    step: int

    def text(self) -> str:
        return f"step {self.step} is saved; another Checkpointer of this process finishes its step first"


@dataclass(frozen=True, kw_only=True)
class NoSuchVariable(Event):
    """Something is set in the environment that looks like one of ours."""

    level: ClassVar[int] = logging.WARNING
    name: str
    meant: str

    def text(self) -> str:
        return f"{self.name} is set in the environment and has no effect; did you mean {self.meant}?"


@dataclass(frozen=True, kw_only=True)
class Redirected(Event):
    """`stepwell prove` runs a script in a directory that trains in a bucket."""

    level: ClassVar[int] = logging.WARNING
    asked: str
    place: str

    def text(self) -> str:
        return f"STEPWELL_WHERE puts this run into {self.place}, in the place of {self.asked}: the bucket is not used"

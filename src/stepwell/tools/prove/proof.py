"""The facts of a trial, and the verdict that follows from them. Pure.

    identical      the state and all logged values are equal, and every restart really resumed
    different      something is not equal
    failed         the script itself ended with an error after a kill
    unguarded      all is equal, but only because `prove` turns verify_snapshots on: a snapshot was voided that the
                   script's own settings would have taken for good
    inconclusive   nothing was shown: a restart did not resume as it should, or kills could not be placed

Holds:   a difference counts even where a restart did not resume; "identical" is never said of a trial that shows
         nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from stepwell.tools.prove.final_states import Difference, StateComparison
from stepwell.tools.prove.logged_values import LogComparison

Verdict = Literal["identical", "different", "failed", "unguarded", "inconclusive"]
EXIT_CODES: Final[dict[Verdict, int]] = {"identical": 0, "different": 1, "failed": 1, "unguarded": 1, "inconclusive": 3}
_UNSEEDED_BY_NATURE: Final = ("numpy", "python")
_SEEDING: Final = {
    "numpy": "numpy.random.seed(...)",
    "python": "random.seed(...)",
    "torch": "torch.manual_seed(...)",
    "cuda": "torch.manual_seed(...)",
}


_OF_A_SCHEDULE: Final = ("/last_epoch", "/_step_count")
_SCHEDULE: Final = (
    "a scheduler step that follows save() in the loop body, or whose position a restart does not "
    "know: code after a save runs once more or never; call save() last in the body"
)
_OF_THE_COUNT: Final = ("stepwell/step", "stepwell/epoch", "stepwell/consumed")
_COUNT: Final = (
    "repeated or skipped batches or epochs: count epochs with ckpt.epochs(), iterate ckpt.data "
    "once in each, and with your own loader skip ckpt.data.index batches"
)


@dataclass(frozen=True)
class Kill:
    """One kill and the restart after it. `time` in seconds since the epoch; `source` None: the restart began fresh.

    `was_committed`: the checkpoint it resumed from exists, or existed until retention removed it.
    `is_restart`: the run had to begin again; False for an agent, without which it goes on.
    """

    number: int
    time: float
    step: int
    victim: str
    resumed: int | None = None
    source: str | None = None
    was_committed: bool = False
    is_restart: bool = True

    @property
    def redone(self) -> int | None:
        """Steps that were finished before the kill and had to be done again."""
        return None if self.resumed is None else max(0, self.step - self.resumed)


@dataclass(frozen=True)
class VoidTrial:
    """A snapshot that was thrown away, in one of the two runs."""

    run: str
    step: int
    leaf: str
    seen_by: str


@dataclass(frozen=True)
class Failure:
    """The script ended with an error of its own. `after`: number of the kill before it, 0 for none."""

    run: str
    after: int
    status: int
    lines: list[str]


@dataclass(frozen=True)
class Proof:
    """Everything a trial found out."""

    asked: int
    seed: int
    steps: int = 0
    kills: Sequence[Kill] = ()
    interval: int = 0
    states: StateComparison | None = None
    logs: LogComparison | None = None
    voids: Sequence[VoidTrial] = ()
    failure: Failure | None = None
    obstacle: str | None = None
    ignored: Sequence[str] = ()
    lineage_steps: dict[int, int] = field(default_factory=dict)
    ranks: int = 1
    set_for_it: Sequence[str] = ()
    bucket: str | None = None
    """Where the script would train; the trial's runs are in directories."""

    @property
    def differences(self) -> list[Difference]:
        """What counts: a generator that nobody seeded does not, as long as nothing else differs."""
        found = self.states.differences if self.states is not None else []
        real = [item for item in found if item.generator not in _UNSEEDED_BY_NATURE]
        return real or ([] if self.logs is None or self.logs.is_equal else list(found))

    @property
    def unseeded(self) -> list[str]:
        """Global generators that differ at the end."""
        found = self.states.differences if self.states is not None else []
        return sorted({item.generator for item in found if item.generator is not None})

    @property
    def verdict(self) -> Verdict:
        """What was shown."""
        if self.failure is not None and self.failure.after:
            return "failed"
        if self.differences or (self.logs is not None and not self.logs.is_equal):
            return "different"
        if self.unguarded is not None:
            return "unguarded"
        return "inconclusive" if self.doubts else "identical"

    @property
    def unguarded(self) -> VoidTrial | None:
        """The first snapshot that nothing but the content hashes saw to be torn."""
        return next((void for void in self.voids if void.seen_by == "verify_snapshots"), None)

    @property
    def exit_code(self) -> int:
        """0 identical; 1 different, failed or unguarded; 3 inconclusive."""
        return EXIT_CODES[self.verdict]

    @property
    def doubts(self) -> list[str]:
        """Why the trial would show nothing even if everything is equal."""
        found = [] if self.obstacle is None else [self.obstacle]
        if self.states is None and self.failure is None and not found:
            found.append("nothing was compared")
        if len(self.kills) < self.asked and not found:
            found.append(f"only {len(self.kills)} of {self.asked} kills were possible: the run ended before the others")
        for kill in self.kills:
            if (doubt := self._doubt(kill)) is not None:
                found.append(f"kill {kill.number}, at step {kill.step}: {doubt}")
        return found

    def _doubt(self, kill: Kill) -> str | None:
        if not kill.is_restart:
            return None  # had training not gone on, the script would have failed
        if kill.resumed is None:
            return "the script did not start again"
        if kill.source is None:
            return "the restart began from scratch; does the script call ckpt.restore() before its loop?"
        if kill.resumed <= 0:
            return "the restart resumed at step 0, where there is nothing to lose"
        if not kill.was_committed:
            return f"it resumed from step {kill.resumed}, a checkpoint that was never committed"
        if kill.redone is not None and kill.redone > 2 * self.interval:
            return (
                f"{kill.redone} steps were redone, more than two intervals of {self.interval}: storage cannot keep up"
            )
        return None

    @property
    def notes(self) -> list[str]:
        """What a person should know beside the verdict."""
        found = []
        if self.bucket is not None:
            found.append(
                f"the script trains in {self.bucket}, but both runs of this trial used a directory: this "
                "proves nothing about the bucket"
            )
        if self.set_for_it and self.ranks > 1:
            found.append(
                f"prove set {', '.join(self.set_for_it)} for the command: without it, ranks that torchrun "
                "restarts cannot connect; set it in your own jobs too"
            )
        if self.verdict == "identical" and self.unseeded:
            names = " and ".join(f"{name}'s" for name in self.unseeded)
            seeds = ", ".join(_SEEDING[name] for name in self.unseeded)
            what, be = ("generators were", "they were") if len(self.unseeded) > 1 else ("generator was", "it was")
            found.append(
                f"{names} global {what} never seeded, so the two runs differ there; nothing shows that {be} drawn from "
                f"({seeds} would make sure)"
            )
        if self.states is not None and self.logs is not None and not self.logs.values:
            found.append(
                "nothing was logged, so only the final state was compared: ckpt.log(loss=loss) adds every step"
            )
        if self.logs is not None and self.logs.lost:
            found.append(f"logged values lost with a killed trainer before they were written: {self.logs.lost}")
        if self.ignored:
            found.append(f"logged values not compared: {', '.join(self.ignored)}")
        groups: dict[tuple[str, str], list[VoidTrial]] = {}
        for void in self.voids:
            groups.setdefault((void.leaf, void.seen_by), []).append(void)
        for (leaf, seen_by), voids in groups.items():
            found.append(
                f"snapshots voided: {len(voids)}, first that of step {voids[0].step} in {voids[0].run}/, because "
                f"{leaf} changed while it was copied (seen by {seen_by}); guard the change with `with ckpt.updating():`"
            )
        return found

    @property
    def place(self) -> str | None:
        """Where the logged values part: that tells a script that does not repeat from one that does not resume."""
        first = self.logs.first if self.logs is not None else None
        if first is None or not self.kills:
            return None
        if self._parts_before_any_kill:
            return (
                f"before the first kill, at step {first.step}: the script is not deterministic, with or without kills"
            )
        resumed = None if first.lineage is None else self.lineage_steps.get(first.lineage)
        return None if resumed is None else f"at step {first.step}, in the attempt that resumed at step {resumed}"

    @property
    def _parts_before_any_kill(self) -> bool:
        first = self.logs.first if self.logs is not None else None
        return first is not None and first.lineage == min(self.lineage_steps, default=0)

    @property
    def causes(self) -> list[str]:
        """The usual causes of a difference, the likelier ones first."""
        if self.verdict != "different":
            return []
        unseeded = "an unseeded generator: random.Random(), numpy.random.default_rng(), the operating system"
        if self.unseeded:
            seeds = ", ".join(dict.fromkeys(_SEEDING.get(name, name) for name in self.unseeded))
            unseeded += f"; different at the end: {', '.join(self.unseeded)} ({seeds})"
        untracked = "untracked state: an average of weights, a counter, a buffer, your own generator"
        ahead = (
            "a batch drawn before the step that uses it: a restart draws it again, from a generator that "
            "has moved on; draw it at the top of the loop body"
        )
        workers = "augmentation in loader workers: they have their own generators, which no checkpoint contains"
        kernels = "non-deterministic kernels: torch.use_deterministic_algorithms(True)"
        guards = "tensors changed outside every guard, through .data or numpy: use `with ckpt.updating():`"
        if self._parts_before_any_kill:
            return [unseeded, workers, kernels]
        ordered = [untracked, unseeded, ahead, workers, guards, kernels]
        plain = [item.path for item in self.differences if not item.is_tensor]
        if any(path.endswith(_OF_A_SCHEDULE) for path in plain):
            ordered.insert(0, _SCHEDULE)
        if any(path.startswith(_OF_THE_COUNT) for path in plain):
            ordered.insert(0, _COUNT)
        if self.ranks > 2:
            buckets = (
                "DDP rebuilds its buckets after the first step of a start: find_unused_parameters=True prevents that"
            )
            ordered.insert(0, buckets)
        if self.voids:  # somebody was seen doing it
            ordered.sort(key=lambda cause: cause is not guards)
        return ordered


def as_document(proof: Proof) -> dict[str, Any]:
    """The proof as plain values, for `--json` and `prove.json`."""
    differences, logs = proof.differences, proof.logs
    return {
        "verdict": proof.verdict,
        "exit_code": proof.exit_code,
        "kills_asked": proof.asked,
        "seed": proof.seed,
        "steps": proof.steps,
        "ranks": proof.ranks,
        "interval": proof.interval,
        "kills": [{**asdict(kill), "redone": kill.redone} for kill in proof.kills],
        "doubts": proof.doubts,
        "notes": proof.notes,
        "place": proof.place,
        "causes": proof.causes,
        "compared": None
        if proof.states is None
        else {"tensors": proof.states.tensors, "bytes": proof.states.nbytes, "values": proof.states.values},
        "differences": [asdict(item) for item in differences],
        "first_difference": asdict(differences[0]) if differences else None,
        "logged": None if logs is None else asdict(logs),
        "voids": [asdict(void) for void in proof.voids],
        "failure": None if proof.failure is None else asdict(proof.failure),
    }

"""Trying candidates in their order, until the bytes of one are right on every rank.

Owns:    what happens with one that is damaged, or gone, and what is said of it.
Not:     the list (candidates), the reading (restore).
Holds:   a candidate counts only if every rank has it. A damaged one is reported and the next older one is tried. What a
         live run has removed since it was listed is no damage: the list is made again, so many times and no more.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from stepwell.errors import RestoreError, listing
from stepwell.events import run_events
from stepwell.events.restore_events import Gone
from stepwell.faults import crash_point
from stepwell.ranks.groups.consent import lead, vote
from stepwell.ranks.groups.group import Group
from stepwell.restore import needed_records
from stepwell.restore.candidates import Candidate, Places
from stepwell.restore.load import Loaded, Loading, Touched
from stepwell.restore.whole import Part
from stepwell.storage.store.paths import RunPaths
from stepwell.storage.store.progress import read_progress
from stepwell.training.state.tracked import Tracked
from stepwell.types import CheckpointId

_MOST_LISTS: Final = 20
"""How often candidates are listed: each further time because a live run has pruned one before it was open."""

Found = tuple[CheckpointId, Loaded, set[str], int, str | None]
"""Which one, what came back, its frozen leaves, how many ranks saved it, and what makes it lossy, if anything does."""


class _GoneError(Exception):
    """A candidate was removed after it was listed, before its files were open."""


@dataclass
class Search:
    """Tries candidates. All ranks do the same. `only`: these tracked objects; None: all, and the run's own state."""

    places: Places
    tracked: Sequence[Tracked]
    group: Group
    strict: bool
    check: Callable[[dict[str, Any]], None] | None
    only: set[str] | None = None
    damaged: list[str] = field(default_factory=list)
    touched: Touched = field(default_factory=dict)

    def run(self, make_plan: Callable[[], list[list[Any]]]) -> Found | None:
        """The first candidate that is whole; None: there is none. Raises RestoreError when all are damaged, or gone."""
        root = self.places.paths.root
        for turn in range(_MOST_LISTS):
            plans = lead(self.group, "the plan", make_plan)
            if turn and not plans:
                break
            try:
                found = self._try_all([Candidate.load(values) for values in plans])
            except _GoneError:
                continue
            if found is None and self.damaged:
                half = ", and the live state is half overwritten" if self.touched else ""
                raise RestoreError(
                    f"no checkpoint in {root} is whole{half}:\n{listing(self.damaged)}\n"
                    "restore from a copy of the run directory, or start anew in another one",
                    path=str(root),
                )
            return found
        raise RestoreError(
            f"the checkpoints in {root} were removed while they were opened: by a run that saves faster than they are "
            "read (give it keep=Keep(last=10), or a name to the checkpoint to be read), or by hand",
            path=str(root),
        )

    def _try_all(self, candidates: Sequence[Candidate]) -> Found | None:
        for candidate in candidates:
            for source, have in self.places.of(candidate):
                found = self._try(candidate, source, have)
                if found is not None:
                    return found
        return None

    def _try(self, candidate: Candidate, source: str, have: Callable[[], list[Part]]) -> Found | None:
        """None: it is damaged, which was reported. Raises _GoneError, or what another rank could not do."""
        caches, log, started = self.places.caches, self.places.log, time.monotonic()
        if source == "node" and caches is not None:
            caches.complete(candidate.id)
        loaded: Loaded | None = None
        parts: list[Part] = []
        error: Exception | None = None
        try:
            with _no_collection():
                loading, error = self._compare(have, parts, source)
                if self._find_rest(parts, loading, error) and loading is not None:
                    loaded = self._fill(loading)
        except Exception as raised:
            error = raised
        if error is not None and source == "node" and caches is not None:
            caches.doubt(error)
        bad = vote(self.group, f"the vote on step {candidate.id.step}", error)
        if bad is not None:
            if source in ("disk", "chain") and lead(self.group, "what is left", lambda: self.places.is_gone(candidate)):
                log.emit(Gone(directory=candidate.id.directory))
                raise _GoneError
            self.damaged.append(f"{candidate.id} ({source}): {bad}")
            log.emit(run_events.Damage(directory=candidate.id.directory, reason=bad))
            return None
        assert loaded is not None
        id = loaded.id  # a chain may end before the record that was asked for
        crash_point("restore.loaded")
        if loaded.problems:
            log.emit(run_events.Mismatch(problems=loaded.problems))
        log.emit(
            run_events.Restore(
                step=id.step,
                directory=id.directory,
                source=source,
                seconds=time.monotonic() - started,
                nbytes=loaded.nbytes,
                redone=_redone(self.places.paths, id),
                suspect=candidate.is_suspect,
            )
        )
        return id, loaded, loaded.frozen, len(parts), f"chain of {candidate.chain}" if candidate.chain else None

    def _compare(
        self, have: Callable[[], list[Part]], parts: list[Part], source: str
    ) -> tuple[Loading | None, Exception | None]:
        """What this rank finds out from its own record, or why it cannot. `parts` is filled."""
        try:
            parts += have()
            mine = self.group.rank if len(parts) == self.group.size else None
            how: dict[str, Any] = {"only": self.only, "strict": self.strict, "check": self.check}
            # What is in memory was looked at by nobody: whether its parts fit together shows from all of them.
            return Loading(parts, self.tracked, mine=mine, is_lazy=source != "memory", **how), None
        except Exception as raised:
            return None, raised

    def _find_rest(self, parts: Sequence[Part], loading: Loading | None, error: Exception | None) -> bool:
        """Look into the records that hold what this rank lacks. Whether all ranks can go on. Collective."""
        group = self.group
        if group.size == 1:
            return error is None
        question: Any = None
        try:
            question = None if loading is None else needed_records.dump(loading.lacking())
        except Exception as raised:  # the others wait for an answer, whatever went wrong
            error = raised
        told = group.all_gather([error is not None, question], "what the ranks lack")
        if any(is_bad for is_bad, _ in told):
            if error is not None:
                raise error
            return False
        questions = [needed_records.load(values) for _, values in told]
        if not any(questions):
            return True
        answers: dict[str, list[int]] = {}
        try:
            mine = needed_records.turns(group.rank, group.size, len(parts))
            answers = needed_records.answer([parts[number].record for number in mine], questions)
        except Exception as raised:
            error = raised
        told = group.all_gather([error is not None, answers], "which records hold that")
        if error is not None:
            raise error
        assert loading is not None
        loading.whole.look_into(number for _, found in told for number in found.get(str(group.rank), ()))
        return not any(is_bad for is_bad, _ in told)

    def _fill(self, loading: Loading) -> Loaded:
        loaded = loading.run(self.touched)
        if self.touched:
            step = loaded.id.step
            raise RestoreError(
                f"a damaged checkpoint ({self.damaged[-1].partition(' ')[0]}) left its values in these live tensors, "
                f"and that of step {step} has none for them:\n{listing(sorted(self.touched.values()))}\n"
                f"call restore(step={step}, strict=False) in a new process",
                step=step,
            )
        return loaded


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Thousands of new objects would make Python look for garbage, in all there is, while the readers wait."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _redone(paths: RunPaths, id: CheckpointId) -> int | None:
    """Steps the last trainer had finished beyond the restored one, if that is known."""
    progress = read_progress(paths.progress)
    if progress is None or progress.step < id.step:
        return None
    return progress.step - id.step

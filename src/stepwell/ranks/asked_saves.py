"""Saves that the user asks for: one that not every rank asks for can never be whole, and is ended at once.

Owns:    who asked for which save. The first rank that asks lets the others know, by way of rank 0; a rank that goes on
         without asking says so, and rank 0 ends that save.
Not:     when checkpoints come by themselves (agreement), what ends a save (the caller).
         Whoever waits for a save asks rank 0 from time to time which ranks have not asked for it. One of these that
         is in the next step, and stays there, cannot ask for it any more: it may wait for the very rank that waits.
Holds:   nobody waits, but for `explain`, a moment. Without this, a save that one rank takes alone would hold up every
         later one, until the patience of rank 0's agent is over.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

Message = dict[str, Any]
Save = tuple[int, int]
"""Step and repeat."""
KINDS: Final = ("asked", "not asked", "who asked", "where", "missing", "answer")
_ANSWER_SECONDS: Final = 2.0
_NAMED: Final = 4
_MOST_WAITED: Final = 64
_MOST: Final = 256
"""Saves that are remembered: only those of the last steps matter."""


class Asked:
    """Of one rank. `send` hands a message to rank 0, or from there to all, `send_to` from there to one; neither waits.

    on_alone:        rank 0 only, any thread: a save, the rank that asked for it, and one that did not
    is_within_step:  any thread: a step has begun here, so what is asked for now is taken after it
    seconds:         after this long whoever has not asked for a save has no part in it
    """

    def __init__(
        self,
        rank: int,
        send: Callable[[Message], None],
        send_to: Callable[[int, Message], None],
        on_alone: Callable[[int, int, int, int], None],
        *,
        ranks: int,
        is_within_step: Callable[[], bool] = lambda: False,
        seconds: float = 600.0,
    ) -> None:
        self._rank, self._send, self._send_to, self._on_alone = rank, send, send_to, on_alone
        self._ranks, self._is_within_step, self._seconds = ranks, is_within_step, seconds
        self.slice_seconds = max(0.5, min(60.0, seconds / 5))
        """How often somebody who waits is to call `explain`."""
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)
        self._about: Save | None = None
        self._missing: tuple[int, list[int]] = -1, []
        self._answers: dict[int, str] = {}
        """Of the save that this rank waits for: how many have not asked (-1: not known), some of these, and where."""
        self._asked_by: dict[Save, set[int]] = {}
        self._within: dict[Save, float] = {}
        """Since when somebody waits for a save, and this rank is in the step after it."""
        self._mine: deque[Save] = deque(maxlen=_MOST)
        self._open: dict[Save, int] = {}
        """Asked for elsewhere, and not here so far: by which rank."""
        self._told: deque[Save] = deque(maxlen=_MOST)
        self._ended: deque[Save] = deque(maxlen=_MOST)
        self._passed = -1
        self._is_over = False

    # -- the training thread ------------------------------------------------------------------------------------------

    def ask(self, step: int, repeat: int) -> None:
        """This rank takes a save that all ranks are to ask for."""
        with self._lock:
            self._mine.append((step, repeat))
            self._open.pop((step, repeat), None)
        message = {"type": "asked", "step": step, "repeat": repeat, "by": self._rank}
        if self._rank == 0:
            self._note_asked((step, repeat), 0)
            self._tell_all(message)
        else:
            self._send(message)

    def pass_step(self, step: int) -> None:
        """A step is over: what was to be asked for after those before it was."""
        self._passed = step
        self._look()

    def end(self) -> None:
        """This rank asks for nothing any more."""
        self._is_over = True
        self._look()

    def explain(self, step: int, repeat: int, waited: float) -> str:
        """Which ranks have not asked for a save that this one waits for, in words; "" if all have. Waits a moment."""
        question = {"type": "who asked", "step": step, "repeat": repeat, "by": self._rank, "waited": waited}
        with self._lock:
            self._about, self._missing, self._answers = (step, repeat), (-1, []), {}
        if self._rank == 0:
            self._hear_question((step, repeat), question)
        else:
            self._send(question)
        with self._answered:
            self._answered.wait_for(self._is_answered, _ANSWER_SECONDS)
            (count, ranks), answers = self._missing, dict(self._answers)
        if count <= 0:
            return ""  # all have asked, or rank 0 does not answer
        named = [f"rank {rank} {answers.get(rank, 'does not answer')}" for rank in ranks]
        more = [f"{count - len(ranks)} more"] if count > len(ranks) else []
        return f"not all ranks have called save() after step {step}: {', '.join(named + more)}"

    def _is_answered(self) -> bool:
        count, ranks = self._missing
        return count >= 0 and self._answers.keys() >= set(ranks)

    def _look(self) -> None:
        with self._lock:
            late = {save: by for save, by in self._open.items() if self._is_past(save)}
            self._open = {save: by for save, by in self._open.items() if save not in late}
        for save, by in late.items():
            self._deny(save, by)

    def _is_past(self, save: Save) -> bool:
        return self._is_over or save[0] < self._passed

    # -- any thread ---------------------------------------------------------------------------------------------------

    def on_message(self, rank: int, message: Message) -> None:
        """A message of this module."""
        save = message["step"], message["repeat"]
        if message["type"] == "not asked":
            self._end(save, message["by"], rank)
            return
        if message["type"] == "who asked":
            self._hear_question(save, message)
            return
        if message["type"] == "where":
            self._hear_probe(save, message)
            return
        if message["type"] == "answer" and self._rank == 0:
            self._reply(save, message["by"], {name: message[name] for name in ("type", "rank", "where")})
            return
        if message["type"] in ("missing", "answer"):
            self._hear_reply(save, message)
            return
        if self._rank == 0:
            self._note_asked(save, rank)
            self._tell_all(message)
        with self._lock:
            is_known = save in self._mine or save in self._open
            if not is_known and not self._is_past(save):
                self._open[save] = message["by"]
                return
        if not is_known:
            self._deny(save, message["by"])

    def _note_asked(self, save: Save, rank: int) -> None:
        """Rank 0: of the newest saves, who asked for them."""
        with self._lock:
            self._asked_by.setdefault(save, set()).add(rank)
            for old in sorted(self._asked_by)[:-_MOST_WAITED]:
                del self._asked_by[old]

    def _tell_all(self, message: Message) -> None:
        """Rank 0: the first rank that asks is enough."""
        save = message["step"], message["repeat"]
        with self._lock:
            if save in self._told:
                return
            self._told.append(save)
        self._send(message)

    def _deny(self, save: Save, by: int) -> None:
        """This rank has gone on without it."""
        if self._rank == 0:
            self._end(save, by, 0)
        else:
            self._send({"type": "not asked", "step": save[0], "repeat": save[1], "by": by})

    def _hear_question(self, save: Save, question: Message) -> None:
        """Rank 0: somebody waits for a save. It knows who has asked; only some of the others are asked where they are,
        or many ranks that wait for a slow disk would fill the line with questions.
        """
        with self._lock:
            found = self._asked_by.get(save, set())
            missing = [] if len(found) == self._ranks else [rank for rank in range(self._ranks) if rank not in found]
        self._reply(save, question["by"], {"type": "missing", "count": len(missing), "ranks": missing[:_NAMED]})
        for rank in missing[:_NAMED]:
            if rank == 0:
                self._hear_probe(save, question)
            else:
                self._send_to(rank, question | {"type": "where"})

    def _reply(self, save: Save, by: int, facts: Message) -> None:
        """Rank 0: to the rank that waits."""
        message = {"step": save[0], "repeat": save[1], "by": by, **facts}
        if by == 0:
            self._hear_reply(save, message)
        else:
            self._send_to(by, message)

    def _hear_reply(self, save: Save, message: Message) -> None:
        with self._answered:
            if save == self._about and message["type"] == "missing":
                self._missing = message["count"], message["ranks"]
            elif save == self._about:
                self._answers[message["rank"]] = message["where"]
            self._answered.notify_all()

    def _hear_probe(self, save: Save, question: Message) -> None:
        """This rank has not asked, as far as rank 0 knows."""
        with self._lock:
            if save in self._mine:
                return  # that is on its way to rank 0
        at, by = self._passed, question["by"]
        is_within = at == save[0] and self._is_within_step()
        where = f"is in step {at + 1}" if is_within else f"is at step {max(0, at)}"
        answer = {"type": "answer", "rank": self._rank, "where": where}
        if self._rank == 0:
            self._reply(save, by, answer)
        else:
            self._send({"step": save[0], "repeat": save[1], "by": by, **answer})
        if self._is_given_up(save, question["waited"], is_within=is_within):
            self._deny(save, by)

    def _is_given_up(self, save: Save, waited: float, *, is_within: bool) -> bool:
        """This rank has not asked, and will not: it was in the next step a good while ago, and still is."""
        now = time.monotonic()
        with self._lock:
            since = self._within.setdefault(save, now) if is_within else self._within.pop(save, None)
            self._within = {other: time for other, time in self._within.items() if other[0] >= self._passed}
        is_stuck = is_within and since is not None and now - since >= self.slice_seconds / 2
        return is_stuck or waited >= self._seconds

    def _end(self, save: Save, by: int, missing: int) -> None:
        with self._lock:
            if save in self._ended:
                return
            self._ended.append(save)
        self._on_alone(*save, by, missing)

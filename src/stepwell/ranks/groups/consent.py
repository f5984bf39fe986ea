"""What the ranks do with one another's errors: one that refuses makes all refuse, and nobody waits for it.

Owns:    the answer of rank 0 for all, and the vote of all on what each did for itself.
Holds:   an error is raised as itself where it happened, and as one of its kind that names the rank on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepwell import errors
from stepwell.errors import DamagedError, StepwellError
from stepwell.ranks.groups.group import Group


def lead(group: Group, what: str, call: Callable[[], Any]) -> Any:
    """What rank 0 found, on all ranks; or its error. Collective."""
    answer: dict[str, Any] = {}
    error: Exception | None = None
    if group.is_leader:
        try:
            answer = {"value": call()}
        except Exception as raised:  # the others wait for an answer, whatever went wrong
            error, answer = raised, {"error": type(raised).__name__, "text": str(raised)}
    answer = group.broadcast(answer, what)
    if error is not None:
        raise error
    if "error" in answer:
        raise _same_kind(answer["error"], f"rank 0: {answer['text']}")
    return answer["value"]


def each(group: Group, what: str, call: Callable[[], None]) -> None:
    """What every rank does for itself, and may refuse. Collective."""
    error: Exception | None = None
    try:
        call()
    except Exception as raised:
        error = raised
    if (damage := vote(group, what, error)) is not None:
        raise error if error is not None else DamagedError(damage)


def vote(group: Group, what: str, error: Exception | None) -> str | None:
    """None: no rank has an error. Else what is damaged, on the first rank where it is; other errors are raised."""
    votes = group.all_gather(None if error is None else [type(error).__name__, str(error)], what)
    if error is not None and not isinstance(error, DamagedError):
        raise error
    for rank, found in enumerate(votes):
        if found is not None and found[0] != DamagedError.__name__:
            raise _same_kind(found[0], f"rank {rank}: {found[1]}")
    bad = [(rank, found[1]) for rank, found in enumerate(votes) if found is not None]
    if not bad:
        return None
    text: str = bad[0][1]
    return text if group.size == 1 else f"rank {bad[0][0]}: {text}"


def _same_kind(name: str, text: str) -> StepwellError:
    kind = getattr(errors, name, None)
    return kind(text) if isinstance(kind, type) and issubclass(kind, StepwellError) else StepwellError(text)

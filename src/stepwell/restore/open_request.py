"""What a start wants of its run.

Owns:    the types of the request; nothing here reads or decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from stepwell.errors import ConfigError
from stepwell.levels.level_spec import Levels
from stepwell.types import Keep

if TYPE_CHECKING:
    from stepwell.storage.codecs.assignment import Deltas


PREFERENCES: Final = (None, "exact", "newest")


@dataclass(frozen=True)
class Wish:
    """What is asked for: this step, or the newest below one; and whether it may be lossy.

    worth: seconds of work that make a lossy one preferable, where nothing is said; None: never
    """

    step: int | None = None
    before: int | None = None
    prefer: str | None = None
    worth: float | None = None

    def __post_init__(self) -> None:
        if self.prefer not in PREFERENCES:
            raise ConfigError(f"prefer={self.prefer!r}: give 'exact' or 'newest'", name="prefer")


@dataclass(frozen=True)
class OpenRequest:
    """How a run is opened, and which checkpoint comes back.

    attach:       gets the run's seed, before anything is read
    check:        gets the run's own state, if `strict`, before anything is changed; may refuse it
    keep:         noted with the lineage, for whoever prunes the run later
    fresh:        restore nothing: refused where there are checkpoints, unless
    may_abandon:  the user took single objects out of them and goes on from step 0
    """

    attach: Callable[[int], None]
    check: Callable[[dict[str, Any]], None]
    seed: int | None = None
    levels: Levels | None = None
    deltas: Deltas | None = None
    keep: Keep | None = None
    wish: Wish = field(default_factory=Wish)
    strict: bool = True
    fresh: bool = False
    may_abandon: bool = False

    @property
    def wish_with_worth(self) -> Wish:
        """`wish`, and from `deltas` how much lost work makes a lossy state preferable."""
        return self.wish if self.deltas is None else replace(self.wish, worth=self.deltas.worth)


@dataclass(frozen=True)
class LoadRequest:
    """Which tracked objects are taken out of which checkpoint."""

    only: frozenset[str]
    wish: Wish = field(default_factory=Wish)
    strict: bool = True

    @classmethod
    def of(cls, only: str | set[str], wish: Wish, *, strict: bool = True) -> LoadRequest:
        """One name, or several."""
        return cls(frozenset({only} if isinstance(only, str) else only), wish, strict)

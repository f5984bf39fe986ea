"""A run as a picture: progress, iteration times and stalls, snapshots and commits, kills and restores, over wall time.

Owns:    the drawing. matplotlib is loaded here and only when something is drawn; no global state of it is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Protocol

from stepwell.events import read_events
from stepwell.report.story import Lineage, Point, Story, tell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito: told apart by everyone, and in grey.
_INK: Final = "#222222"
_GREY: Final = "#8a8a8a"
_BLUE: Final = "#0072b2"
_SKY: Final = "#56b4e9"
_ORANGE: Final = "#e69f00"
_GREEN: Final = "#009e73"
_RED: Final = "#d55e00"
_PURPLE: Final = "#cc79a7"
_SOURCES: Final = {"memory": (_GREEN, "o"), "disk": (_BLUE, "s")}


class KillLike(Protocol):
    """What is drawn of a kill."""

    @property
    def number(self) -> int:
        """Counted from 1."""
        ...

    @property
    def time(self) -> float:
        """Seconds since the epoch."""
        ...

    @property
    def step(self) -> int:
        """The last step that was finished."""
        ...

    @property
    def victim(self) -> str:
        """Who was killed."""
        ...


def why_no_picture() -> str | None:
    """The reason why nothing can be drawn here, or None."""
    if find_spec("matplotlib") is None:
        return "matplotlib is not installed; pip install 'stepwell[plot]'"
    return None


def write_timeline(events: Path, picture: Path, *, kills: Sequence[KillLike] = ()) -> None:
    """Draw the run behind an event file. Raises OSError if the picture cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    story = tell(read_events(events))
    figure = Figure(figsize=(12, 7.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [5, 3, 1.1]})
    for axes in (top, middle, bottom):
        _prepare(axes)
        _draw_downtime(axes, story, kills)
    _draw_progress(top, story, kills)
    _draw_iterations(middle, story)
    _draw_strip(bottom, story)
    bottom.set_xlabel("seconds since the first start")
    bottom.set_xlim(-0.01 * story.seconds, 1.01 * story.seconds)
    top.set_title(_title(story, kills), loc="left", fontsize=13, fontweight="bold", color=_INK)
    figure.align_ylabels([top, middle, bottom])
    figure.savefig(picture)


def _title(story: Story, kills: Sequence[KillLike]) -> str:
    steps = max((lineage.end.step for lineage in story.lineages), default=0)
    killed = f", killed {len(kills)} time{'s' if len(kills) != 1 else ''}" if kills else ""
    return f"{steps} steps in {story.seconds:.0f} s{killed}"


def _prepare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)


def _draw_downtime(axes: Axes, story: Story, kills: Sequence[KillLike]) -> None:
    """From each kill to the start after it: the script loads, nothing trains."""
    for kill in kills:
        killed = kill.time - story.began
        again = min((life.start.time for life in story.lineages if life.start.time > killed), default=killed)
        axes.axvspan(killed, again, color="#f2f2f2", linewidth=0, zorder=0)


def _draw_progress(axes: Axes, story: Story, kills: Sequence[KillLike]) -> None:
    axes.set_ylabel("step")
    reached = 0
    for life in story.lineages:
        again = [point for point in life.path if point.step <= reached]
        _line(axes, life.path, _INK, 1.6)
        _line(axes, again, _ORANGE, 4.0)
        reached = max(reached, life.end.step)
    for kill in kills:
        time = kill.time - story.began
        axes.axvline(time, color=_RED, linewidth=0.9, alpha=0.6, zorder=1)
        is_both = kill.victim != "trainer"
        axes.plot(time, kill.step, "X" if is_both else "x", color=_RED, markersize=10, markeredgewidth=1.8, zorder=5)
        axes.annotate(
            f"{kill.number}", (time, kill.step), (-9, 5), textcoords="offset points", ha="right", color=_RED, fontsize=10
        )
    for life in story.lineages:
        if life.source is not None:
            _draw_restore(axes, life)
    axes.margins(y=0.08)
    axes.legend(handles=_legend(story, kills), loc="upper left", fontsize=9, frameon=False, ncols=2)


def _draw_restore(axes: Axes, life: Lineage) -> None:
    colour, marker = _SOURCES.get(life.source or "", (_INK, "D"))
    axes.plot(life.start.time, life.start.step, marker, color=colour, markersize=8, markeredgecolor="white", zorder=6)


def _line(axes: Axes, path: Sequence[Point], colour: str, width: float) -> None:
    if len(path) > 1:
        times, steps = [point.time for point in path], [point.step for point in path]
        axes.plot(times, steps, color=colour, linewidth=width, solid_capstyle="round", zorder=3 if width < 3 else 2)


def _legend(story: Story, kills: Sequence[KillLike]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def mark(marker: str, colour: str, label: str) -> Line2D:
        return Line2D([], [], marker=marker, color=colour, linestyle="none", markersize=8, label=label)

    entries: list[Any] = [Line2D([], [], color=_INK, linewidth=1.6, label="training")]
    if kills:
        entries.append(Line2D([], [], color=_ORANGE, linewidth=4, label="steps done again"))
        entries.append(Patch(color="#e4e4e4", label="script starts again"))
    victims = {kill.victim != "trainer" for kill in kills}
    if False in victims:
        entries.append(mark("x", _RED, "trainer killed"))
    if True in victims:
        entries.append(mark("X", _RED, "trainer and agent killed"))
    for source, (colour, marker) in _SOURCES.items():
        if any(life.source == source for life in story.lineages):
            entries.append(mark(marker, colour, f"resumed from {source}"))
    return entries


def _draw_iterations(axes: Axes, story: Story) -> None:
    points = [point for life in story.lineages for point in life.iterations]
    axes.set_ylabel("milliseconds")
    if not points:
        axes.text(0.5, 0.5, "nothing was logged: no iteration times", transform=axes.transAxes, ha="center", color=_GREY)
        return
    milliseconds = [1000 * max(point.value, 1e-6) for point in points]
    axes.plot([p.time for p in points], milliseconds, ".", color=_SKY, markersize=4, label="iteration", zorder=2)
    middle = median(milliseconds)
    axes.axhline(middle, color=_BLUE, linewidth=1, zorder=3, label=f"median iteration, {middle:.1f} ms")
    stalls = [(point.time, 1000 * point.value) for point in story.stalls if point.value > 0]
    if stalls:
        worst = max(stall for _, stall in stalls)
        axes.vlines([t for t, _ in stalls], 1e-3, [stall for _, stall in stalls], color=_ORANGE, linewidth=1.6, zorder=4,
                    label=f"stall for a snapshot, at most {worst:.1f} ms")  # fmt: skip
    axes.set_yscale("log")
    low = min([*milliseconds, *(stall for _, stall in stalls)])
    axes.set_ylim(low / 2, max(milliseconds) * 4)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.legend(loc="upper left", fontsize=9, frameon=False, ncols=3)


def _draw_strip(axes: Axes, story: Story) -> None:
    rows = [("snapshot", story.snapshots, _SKY), ("commit", story.commits, _GREEN)]
    if story.voids:
        rows.append(("void", story.voids, _PURPLE))
    axes.grid(visible=False)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for height, (_, points, colour) in enumerate(rows):
        axes.vlines([p.time for p in points], height - 0.36, height + 0.36, color=colour, linewidth=1.5)

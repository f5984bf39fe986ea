"""A run as a picture: progress, iteration times and stalls, snapshots and commits, kills and restores, over wall time.

Owns:    the drawing. matplotlib is loaded here and only when something is drawn; no global state of it is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Protocol

from stepwell.events.journal import read_events
from stepwell.tools.report.axis import Gap, TimeAxis
from stepwell.tools.report.story import LineageLife, Point, Story, tell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito: told apart by everyone, and in grey.
_INK: Final = "#222222"
_GREY: Final = "#767676"
_SHADE: Final = "#ececec"
_BLUE: Final = "#0072b2"
_SKY: Final = "#56b4e9"
_ORANGE: Final = "#e69f00"
_GREEN: Final = "#009e73"
_RED: Final = "#d55e00"
_PURPLE: Final = "#cc79a7"
_WITH_AGENT: Final = {"trainer and agent", "everything"}
_SOURCES: Final = {"memory": (_GREEN, "o"), "disk": (_BLUE, "s")}


class KillLike(Protocol):
    """What is drawn of a kill: its number from 1, when (seconds since the epoch), after which step, and whom."""

    @property
    def number(self) -> int: ...
    @property
    def time(self) -> float: ...
    @property
    def step(self) -> int: ...
    @property
    def victim(self) -> str: ...


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
    figure = Figure(figsize=(12, 7.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [5, 3, 1]})
    _Drawing(story, kills).draw(*panels)
    figure.suptitle(_title(story, kills), x=0.01, ha="left", fontsize=14, fontweight="bold", color=_INK)
    figure.align_ylabels(panels)
    figure.savefig(picture)


def _title(story: Story, kills: Sequence[KillLike]) -> str:
    killed = f", killed {len(kills)} time{'s' if len(kills) != 1 else ''}" if kills else ""
    dropped = f"; {story.dropped} older events were dropped" if story.dropped else ""
    return f"{story.steps} steps in {story.seconds:.0f} s{killed}{dropped}"


def _gaps(story: Story) -> list[Gap]:
    """From the last sign of one life to the start of the next."""
    pairs = zip(story.lineages, story.lineages[1:], strict=False)
    return [Gap(old.end.time, new.start.time) for old, new in pairs if new.start.time > old.end.time]


class _Drawing:
    """One story on three panels."""

    def __init__(self, story: Story, kills: Sequence[KillLike]) -> None:
        self._story = story
        self._kills = kills
        self._axis = TimeAxis(story.seconds, _gaps(story))

    def draw(self, top: Axes, middle: Axes, bottom: Axes) -> None:
        """Progress, iteration times, and what the agent did."""
        for axes in (top, middle, bottom):
            _prepare(axes)
            self._draw_gaps(axes)
        self._draw_progress(top)
        self._draw_iterations(middle)
        self._draw_strip(bottom)
        bottom.set_xlim(-0.01 * self._axis.end, 1.01 * self._axis.end)
        bottom.set_xticks(*self._axis.ticks())
        cut = "; restarts are cut to grey strips" if self._axis.gaps else ""
        bottom.set_xlabel(f"seconds of training{cut}", color=_INK)

    def _places(self, points: Sequence[Point]) -> list[float]:
        return [self._axis.place(point.time) for point in points]

    def _draw_gaps(self, axes: Axes) -> None:
        for gap in self._axis.gaps:
            axes.axvspan(self._axis.place(gap.start), self._axis.place(gap.end), color=_SHADE, linewidth=0, zorder=0)

    # -- progress -----------------------------------------------------------------------------------------------------

    def _draw_progress(self, axes: Axes) -> None:
        axes.set_ylabel("step", color=_INK)
        reached = 0
        for life in self._story.lineages:
            self._line(axes, life.path, _INK, 1.5)
            self._line(axes, [point for point in life.path if point.step <= reached], _ORANGE, 4.5)
            reached = max(reached, life.end.step)
        for gap in self._axis.gaps:
            middle = (self._axis.place(gap.start) + self._axis.place(gap.end)) / 2
            axes.annotate(f"{gap.seconds:.1f} s", (middle, 0.02), xycoords=("data", "axes fraction"), rotation=90,
                          ha="center", va="bottom", color=_GREY, fontsize=9)  # fmt: skip
        for kill in self._kills:
            self._draw_kill(axes, kill)
        for life in self._story.lineages:
            if life.source is not None:
                self._draw_restore(axes, life)
        axes.margins(y=0.08)
        _legend(axes, self._handles(), columns=7)

    def _line(self, axes: Axes, path: Sequence[Point], colour: str, width: float) -> None:
        if len(path) > 1:
            steps = [point.step for point in path]
            axes.plot(self._places(path), steps, color=colour, linewidth=width, solid_capstyle="round", zorder=3)

    def _draw_kill(self, axes: Axes, kill: KillLike) -> None:
        place = self._axis.place(kill.time - self._story.began)
        marker = "X" if kill.victim in _WITH_AGENT else "x"
        axes.plot(place, kill.step, marker, color=_RED, markersize=9, markeredgewidth=1.8, zorder=5)
        axes.annotate(f"{kill.number}", (place, kill.step), (-8, 6), textcoords="offset points", ha="right",
                      color=_RED, fontsize=10, fontweight="bold")  # fmt: skip

    def _draw_restore(self, axes: Axes, life: LineageLife) -> None:
        colour, marker = _SOURCES.get(life.source or "", (_INK, "D"))
        place = self._axis.place(life.start.time)
        axes.plot(place, life.start.step, marker, color=colour, markersize=9, markeredgecolor="white", zorder=6)

    def _handles(self) -> list[Any]:
        from matplotlib.lines import Line2D

        def mark(marker: str, colour: str, label: str) -> Line2D:
            return Line2D([], [], marker=marker, color=colour, linestyle="none", markersize=8, label=label)

        handles: list[Any] = [Line2D([], [], color=_INK, linewidth=1.5, label="training")]
        if len(self._story.lineages) > 1:
            handles.append(Line2D([], [], color=_ORANGE, linewidth=4.5, label="steps done again"))
        victims = {kill.victim for kill in self._kills}
        for marker, chosen in (("x", victims - _WITH_AGENT), ("X", victims & _WITH_AGENT)):
            if chosen:
                what = chosen.pop() if len(chosen) == 1 else "a rank or an agent"
                handles.append(mark(marker, _RED, f"{what} killed"))
        for source, (colour, marker) in _SOURCES.items():
            if any(life.source == source for life in self._story.lineages):
                handles.append(mark(marker, colour, f"resumed from {source}"))
        return handles

    # -- iteration times ----------------------------------------------------------------------------------------------

    def _draw_iterations(self, axes: Axes) -> None:
        points = [point for life in self._story.lineages for point in life.iterations]
        axes.set_ylabel("milliseconds", color=_INK)
        if not points:
            axes.set_yticks([])
            axes.text(0.5, 0.5, "nothing was logged, so iteration times are unknown", transform=axes.transAxes,
                      ha="center", va="center", color=_GREY)  # fmt: skip
            return
        lengths = [1000 * max(point.value, 1e-6) for point in points]
        middle = median(lengths)
        axes.plot(self._places(points), lengths, ".", color=_SKY, markersize=5, label="iteration", zorder=2)
        axes.axhline(middle, color=_BLUE, linewidth=1.2, zorder=3, label=f"median iteration, {middle:.1f} ms")
        stalls = [point for point in self._story.stalls if point.value > 0]
        if stalls:
            worst = 1000 * max(point.value for point in stalls)
            axes.vlines(self._places(stalls), 1e-6, [1000 * point.value for point in stalls], color=_ORANGE, zorder=4,
                        linewidth=2, label=f"wait for a snapshot, at most {worst:.1f} ms")  # fmt: skip
        axes.set_yscale("log")
        axes.set_ylim(min([*lengths, *(1000 * point.value for point in stalls)]) / 2, max(lengths) * 2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _legend(axes, None, columns=3)

    # -- what the agent did -------------------------------------------------------------------------------------------

    def _draw_strip(self, axes: Axes) -> None:
        rows = [("snapshot", self._story.snapshots, _BLUE), ("commit", self._story.commits, _GREEN)]
        if self._story.voids:
            rows.append(("void", self._story.voids, _PURPLE))
        axes.grid(visible=False)
        axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        for height, (_, points, colour) in enumerate(rows):
            axes.vlines(self._places(points), height - 0.36, height + 0.36, color=colour, linewidth=1.6)


def _prepare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)


def _legend(axes: Axes, handles: list[Any] | None, *, columns: int) -> None:
    """Above the panel, where it hides nothing."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "borderaxespad": 0.2}
    style: dict[str, Any] = {"fontsize": 9, "frameon": False, "ncols": columns, "handletextpad": 0.5}
    if handles is None:
        axes.legend(**place, **style)
    else:
        axes.legend(handles=handles, **place, **style)

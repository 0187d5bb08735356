"""An evaluation's plots as PNG files: bytes against quality, and where the needle is found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from ascend_kv.evaluate.quality.policies import UNQUANTIZED
from ascend_kv.evaluate.quality.results import EvalResult, Interval, NeedlePoint
from ascend_kv.plot_style import COLOURS, colour, new_figure, save, style

_MARKERS = "osD^vP*X"
_COLUMNS = 4
_LINEAR_PERCENT = 0.1
"""Changes up to this are drawn to scale, larger ones by their logarithm."""


def draw_plots(result: EvalResult, directory: Path) -> list[str]:
    """Write the plots for which there are results; returns their file names.

    Raises:
        OSError: a file cannot be written.
    """
    drawn: list[str] = []
    with style():
        if points := _pareto_points(result):
            save(_pareto(result, points), directory / "pareto.png")
            drawn.append("pareto.png")
        if result.needles:
            save(_needles(result), directory / "needle.png")
            drawn.append("needle.png")
    return drawn


def _pareto_points(result: EvalResult) -> list[tuple[str, float, Interval]]:
    """Policy, bytes a token, change of perplexity in percent."""
    costs = {row.name: row.cost for row in result.policies}
    return [
        (
            row.policy,
            costs[row.policy].bytes_per_token,
            Interval(*(100 * (x - 1) for x in (row.change.value, row.change.low, row.change.high))),
        )
        for row in result.perplexity
        if row.change is not None and row.policy in costs
    ]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points than which none is at most as large in both and smaller in one, by the first."""
    front: list[tuple[float, float]] = []
    for size, change in sorted(set(points)):
        if not front or change < front[-1][1]:
            front.append((size, change))
    return front


def _pareto(result: EvalResult, points: Sequence[tuple[str, float, Interval]]) -> Figure:
    figure, axes = new_figure("What a byte of cache buys", _origin(result), 6.4)
    front = pareto_front([(size, change.value) for _, size, change in points])
    axes.plot(*zip(*front, strict=True), color="0.8", zorder=1, drawstyle="steps-post")
    for number, (name, size, change) in enumerate(points):
        axes.errorbar(
            size,
            change.value,
            yerr=[[change.value - change.low], [change.high - change.value]],
            color=colour(number),
            marker=_MARKERS[(number // len(COLOURS) + number) % len(_MARKERS)],
            capsize=3,
            linestyle="none",
            label=name,
        )
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_yscale("symlog", linthresh=_LINEAR_PERCENT)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:+g} %" if value else "0")
    axes.set_xlabel("bytes a token, scales included")
    axes.set_ylabel("perplexity against unquantized, 95 % interval")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4.2, ncols=2, fontsize=8)
    return figure


def _needles(result: EvalResult) -> Figure:
    names = list(dict.fromkeys(point.policy for point in result.needles))
    names.sort(key=lambda name: name != UNQUANTIZED)
    lengths = sorted({point.length for point in result.needles})
    depths = sorted({point.depth for point in result.needles})
    rows = -(-len(names) // _COLUMNS)
    columns = min(_COLUMNS, len(names))
    figure = Figure(
        figsize=(2.6 * columns + 1.2, 2.4 * rows + 0.8),
        layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08),
    )
    grid = figure.subplots(rows, columns, squeeze=False)
    image: Any = None
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    for name, axes in zip(names, grid.flat):
        points = {(p.length, p.depth): p for p in result.needles if p.policy == name}
        values = [[_probability(points.get((x, y))) for x in lengths] for y in depths]
        image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_title(name, fontsize=8)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=7)
        axes.set_yticks(range(len(depths)), [f"{depth:g} %" for depth in depths], fontsize=7)
        for (length, depth), point in points.items():
            place = (lengths.index(length), depths.index(depth))
            shade = "black" if _probability(point) > 0.6 else "white"
            axes.text(*place, f"{point.exact:.0%}", ha="center", va="center", fontsize=7, c=shade)
    figure.colorbar(image, ax=grid, label="probability of an answer's token", shrink=0.8)
    figure.suptitle("Needle by depth and length; figures: exact answers", fontsize=10)
    figure.supxlabel(_origin(result), x=0.99, ha="right", fontsize=7, color="0.45")
    return figure


def _probability(point: NeedlePoint | None) -> float:
    """Geometric mean over the answers' tokens; NaN, drawn white, where there is none."""
    if point is None or point.log_probability is None:
        return math.nan
    return math.exp(point.log_probability)


def _origin(result: EvalResult) -> str:
    return f"{result.model.name}, measured on {result.machine.label}"

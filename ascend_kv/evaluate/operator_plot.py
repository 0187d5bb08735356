"""The plot of ``tools/bench_ops.py``: fractions of the machine's limits, and time by context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from ascend_kv.plot_style import COLOURS, new_figure, save, style


def draw_operators(report: Mapping[str, Any], machine: str, path: Path) -> None:
    """Draw a report's native operators.

    Args:
        report: ``operators`` and ``fits`` as ``tools/bench_ops.py --json`` prints them.
        machine: what it was measured on.
        path: a PNG file.

    Raises:
        OSError: the file cannot be written.
    """
    rows = [row for row in report["operators"] if row["implementation"] == "native"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    colours = {shape: COLOURS[1 + n % (len(COLOURS) - 1)] for n, shape in enumerate(shapes)}
    with style():
        figure, above = new_figure(
            "Native operators: fraction of the tighter limit", f"measured on {machine}", 9.6
        )
        grid = figure.add_gridspec(2, 1, height_ratios=(3, 2))
        above.set_subplotspec(grid[0])
        _fractions(above, rows, colours)
        _times(figure.add_subplot(grid[1]), rows, report["fits"], colours)
        save(figure, path)


def _fractions(axes: Any, rows: Sequence[Mapping[str, Any]], colours: Mapping[str, str]) -> None:
    """A line for each operator and format, a colour for each shape, side by side in the line."""
    names = list(dict.fromkeys(_name(row) for row in rows))
    longest = {name: max(row["context"] for row in rows if _name(row) == name) for name in names}
    for number, (shape, colour) in enumerate(colours.items()):
        those = [row for row in rows if row["shape"] == shape]
        beside = (number - (len(colours) - 1) / 2) * 0.6 / len(colours)
        axes.scatter(
            [row["fraction_of_limit"] for row in those],
            [names.index(_name(row)) + beside for row in those],
            color=colour,
            s=28,
            # Long contexts are what the limits are about: short ones mostly show a call's cost.
            alpha=[1.0 if row["context"] == longest[_name(row)] else 0.35 for row in those],
            label=shape,
        )
    axes.axvline(1, color="0.3", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("reached, of medians (pale: with less than the longest context)")
    axes.grid(alpha=0.25)
    _legend(axes, colours)


def _times(
    axes: Any,
    rows: Sequence[Mapping[str, Any]],
    fits: Sequence[Mapping[str, Any]],
    colours: Mapping[str, str],
) -> None:
    """INT8 decodes by tokens read."""
    axes.set_title("INT8 decode: time against context, with the linear fit")
    decodes = [row for row in rows if _name(row) == "paged_attention decode, int8"]
    lines = {fit["shape"]: fit for fit in fits}
    for shape, colour in colours.items():
        points = [
            (row["batch"] * row["context"], 1e3 * row["median_seconds"])
            for row in decodes
            if row["shape"] == shape
        ]
        if not points:
            continue
        axes.scatter(*zip(*points), color=colour, s=28, label=shape)
        if shape in lines:
            fit = lines[shape]
            ends = [min(points)[0], max(points)[0]]
            times = [fit["start_seconds"] + fit["seconds_per_token"] * count for count in ends]
            axes.plot(ends, [1e3 * seconds for seconds in times], color=colour, linewidth=1)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens read (batch x context)")
    axes.set_ylabel("median milliseconds")
    axes.grid(alpha=0.25)
    _legend(axes, colours)


def _legend(axes: Any, colours: Mapping[str, str]) -> None:
    """Shapes by colour; handles of its own, since those of the points may be pale."""
    handles = [
        Line2D([], [], color=colour, marker="o", linestyle="", label=shape)
        for shape, colour in colours.items()
    ]
    axes.legend(handles=handles, fontsize=9)


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['operator']}, {row['format']}"

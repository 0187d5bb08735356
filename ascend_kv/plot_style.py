"""How plots look: one palette, one style, one kind of figure for every command that draws."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#7f7f7f", "#e69f00", "#56b4e9", "#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Okabe and Ito's palette: it can be told apart with any kind of colour vision."""
FREE = "#dddddd"
"""Of what is not used: free memory, gaps between steps."""
_STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "legend.frameon": False,
}
_DOTS_PER_INCH = 150


def style() -> Any:
    """A context in which figures are made and saved so."""
    import matplotlib  # half a second that a table does not need

    return matplotlib.rc_context(_STYLE)


def colour(number: int) -> str:
    """Of the ``number``-th series."""
    return COLOURS[number % len(COLOURS)]


def new_figure(title: str, origin: str = "", height: float = 4.8) -> tuple[Figure, Any]:
    """A figure and its axes; ``origin``, in small print below, says what was measured where."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(8, height), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
    axes = figure.add_subplot()
    axes.set_title(title)
    if origin:
        figure.supxlabel(origin, x=0.99, ha="right", fontsize=8, color="0.45")
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    """Write a PNG file.

    Raises:
        OSError: it cannot be written.
    """
    figure.savefig(path, dpi=_DOTS_PER_INCH)

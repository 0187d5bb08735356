"""A profile in pictures: its parts as a bar, its steps as a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ascend_kv.profile.attribution import PARTS
from ascend_kv.profile.summary import Profile

# Okabe and Ito's palette, which can be told apart with any kind of colour vision; gaps are grey.
_COLOURS = ("#0072b2", "#009e73", "#e69f00", "#56b4e9", "#d55e00", "#cc79a7", "#dddddd")
_MOST_STEPS = 200
_STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "legend.frameon": False,
}


def draw_plots(profiles: Sequence[tuple[str, Profile]], directory: Path) -> list[str]:
    """Write ``parts.png``, and ``steps.png`` for the last profile if it knows steps.

    Args:
        profiles: with what each is called.
        directory: where they go.

    Returns:
        The names of the files.

    Raises:
        OSError: a file cannot be written.
    """
    import matplotlib  # half a second that a table does not need

    names = ["parts.png"]
    with matplotlib.rc_context(_STYLE):
        _parts(profiles).savefig(directory / "parts.png", dpi=150)
        if profiles[-1][1].steps:
            _steps(*profiles[-1]).savefig(directory / "steps.png", dpi=150)
            names.append("steps.png")
    return names


def _figure(title: str, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def _parts(profiles: Sequence[tuple[str, Profile]]) -> Any:
    figure, axes = _figure("Where the time went", 1.6 + 0.7 * len(profiles))
    names = [name for name, _ in profiles]
    left = [0.0] * len(profiles)
    for part, colour in zip(PARTS, _COLOURS, strict=True):
        widths = [profile.part_ns(part) / 1e6 for _, profile in profiles]
        axes.barh(names, widths, left=left, color=colour, label=part, height=0.6)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_xlabel("ms, mean over the devices")
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=4, fontsize=9)
    return figure


def _steps(name: str, profile: Profile) -> Any:
    figure, axes = _figure(f"Steps, {name}", 4.8)
    steps = profile.steps[:_MOST_STEPS]
    bottom = [0.0] * len(steps)
    for part, colour in zip(PARTS, _COLOURS, strict=True):
        heights = [step.parts_ns[part] / 1e6 for step in steps]
        axes.bar(range(len(steps)), heights, bottom=bottom, color=colour, label=part, width=1.0)
        bottom = [start + height for start, height in zip(bottom, heights, strict=True)]
    axes.set_xlabel("step" if len(steps) == len(profile.steps) else f"step (first {len(steps)})")
    axes.set_ylabel("ms")
    axes.set_xlim(-0.5, len(steps) - 0.5)
    figure.legend(loc="outside lower center", ncols=4, fontsize=9)
    return figure

"""A profile in pictures: its parts as a bar, its steps as a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ascend_kv.plot_style import COLOURS, FREE, new_figure, save, style
from ascend_kv.profile.attribution import PARTS
from ascend_kv.profile.summary import Profile

_COLOURS = (*(COLOURS[number] for number in (3, 5, 1, 2, 4, 6)), FREE)
"""Of ``PARTS``; the last are gaps."""
_MOST_STEPS = 200


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
    names = ["parts.png"]
    with style():
        save(_parts(profiles), directory / "parts.png")
        if profiles[-1][1].steps:
            save(_steps(*profiles[-1]), directory / "steps.png")
            names.append("steps.png")
    return names


def _parts(profiles: Sequence[tuple[str, Profile]]) -> Any:
    figure, axes = new_figure("Where the time went", height=1.6 + 0.7 * len(profiles))
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
    figure, axes = new_figure(f"Steps, {name}")
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

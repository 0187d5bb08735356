"""The report's plots as PNG files: throughput, memory, utilisation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ascend_kv.evaluate.results import BenchResult, SchemeResult
from ascend_kv.plot_style import COLOURS, FREE, colour, new_figure, save, style

_MIB = 2**20


def draw_plots(result: BenchResult, directory: Path) -> list[str]:
    """Write the plots for which there are results.

    Returns:
        Their file names, in the order a reader wants them.

    Raises:
        OSError: a file cannot be written.
    """
    if not result.schemes:
        return []
    drawings: dict[str, Callable[[BenchResult], Figure]] = {
        "throughput.png": _throughput,
        "memory.png": _memory,
        "utilisation.png": _utilisation,
    }
    with style():
        for name, draw in drawings.items():
            save(draw(result), directory / name)
    return list(drawings)


def _figure(result: BenchResult, title: str) -> tuple[Figure, Any]:
    return new_figure(title, f"{result.model.name}, measured on {result.machine.label}")


def _legend_below(axes: Any, columns: int) -> None:
    """A legend so many letters' heights below the axes: past the ticks and the axis' label."""
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4.2, ncols=columns, fontsize=9
    )


def _throughput(result: BenchResult) -> Figure:
    figure, axes = _figure(result, "Throughput against batch")
    if (sweep := result.sweep) is not None:
        axes.plot(
            [point.batch for point in sweep.points],
            [point.tokens_per_second for point in sweep.points],
            color="0.75",
            marker=".",
            zorder=1,
            label=f"decode alone, {sweep.kv_cache_dtype}, {sweep.context_tokens} tokens each",
        )
    for number, scheme in enumerate(result.schemes):
        measured = scheme.measured
        axes.scatter(
            measured.batch_mean,
            measured.tokens_per_second,
            s=70,
            zorder=2,
            color=colour(number),
            label=f"{scheme.name} ({scheme.ratio_to_first:.2f}x)",
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("sequences at once (mean over the whole run)")
    axes.set_ylabel("generated tokens per second, prompts included")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", fontsize=9)
    return figure


def _memory(result: BenchResult) -> Figure:
    figure, axes = _figure(result, "What the KV budget holds, averaged over time")
    names = [scheme.name for scheme in result.schemes]
    budget = result.budget.bytes / _MIB
    left = [0.0] * len(names)
    parts: tuple[tuple[str, str, Callable[[SchemeResult], float]], ...] = (
        ("tokens", COLOURS[3], lambda s: s.measured.kv_token_bytes_mean),
        (
            "reserved, without a token",
            COLOURS[1],
            lambda s: s.measured.kv_held_bytes_mean - s.measured.kv_token_bytes_mean,
        ),
        (
            "free",
            FREE,
            lambda s: s.measured.kv_allocated_bytes - s.measured.kv_held_bytes_mean,
        ),
    )
    for label, shade, size in parts:
        widths = [size(scheme) / _MIB for scheme in result.schemes]
        axes.barh(names, widths, left=left, color=shade, label=label, height=0.62)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, scheme in enumerate(result.schemes):
        note = f"{scheme.measured.utilisation:.0%} used, {scheme.measured.batch_mean:.1f} at once"
        axes.text(1.03 * budget, row, note, va="center", fontsize=9)
    axes.axvline(budget, color="0.3", linestyle="--", linewidth=1)
    # The notes lie right of the axes: the layout makes room for them, however long they are.
    axes.set_xlim(0, 1.01 * budget)
    axes.set_xlabel("MiB (dashed: the budget)")
    axes.invert_yaxis()
    _legend_below(axes, 3)
    return figure


def _utilisation(result: BenchResult) -> Figure:
    figure, axes = _figure(result, "Held token slots that hold a token")
    for number, scheme in enumerate(result.schemes):
        timeline = scheme.measured.timeline
        axes.plot(
            timeline.seconds,
            [100 * share for share in timeline.utilisation],
            color=colour(number),
            linewidth=1.6,
            label=f"{scheme.name} ({scheme.measured.utilisation:.1%})",
        )
    axes.set_xlabel("seconds since the start of the scheme")
    axes.set_ylabel("utilisation, %")
    axes.set_ylim(0, 102)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    _legend_below(axes, 2)  # a curve may run anywhere within the axes
    return figure

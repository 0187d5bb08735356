"""What a run beside other engines says: as JSON, as a table, as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from ascend_kv.evaluate.peers import Outcome, Plan
from ascend_kv.plot_style import COLOURS, new_figure, save, style
from ascend_kv.text_table import TextTable

COMPARED = (
    "Compared: what one token of context more adds to a decode step of one sequence, that is "
    "attention over the cache (reading it, dequantizing it, whatever an engine does to all of it "
    "in every step). Measured in turns; median and quartiles over turns, and the difference "
    "of the fastest turns, which shows what a busy machine hides.",
    "Not compared: what does not grow with context, which cancels out: weights (each engine has "
    "its own type and kernels for them), sampling, bookkeeping. Nor prefill, memory, quality, "
    "batches; nor what is done once in many steps, such as the quantization of a full residual "
    "in transformers' QuantizedCache. The milliseconds a step are therefore no comparison.",
)


def as_rows(outcomes: Sequence[Outcome], ours: str) -> list[dict[str, Any]]:
    """A row for each engine and cache, with figures or the reason why there are none.

    Args:
        outcomes: what became of them.
        ours: the variant of ascend_kv that the others' costs are divided by.
    """
    rows = [_row(outcome) for outcome in outcomes]
    (base,) = [
        row.get("marginal_median_seconds")
        for row in rows
        if (row["peer"], row["variant"]) == ("ascend_kv", ours)
    ] or [None]
    for row in rows:
        if "marginal_median_seconds" in row and base is not None and base > 0:
            row["ratio_to_ours"] = row["marginal_median_seconds"] / base
    return rows


def _row(outcome: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {"peer": outcome.peer, "variant": outcome.variant}
    row |= {"loaded": outcome.loaded, "versions": outcome.versions, "skipped": outcome.skipped}
    if outcome.skipped is None:
        costs = outcome.marginal_seconds()
        low, _, high = quantiles(costs, n=4)
        (few, short), (many, long) = sorted(outcome.step_seconds.items())
        row |= {
            "marginal_median_seconds": median(costs),
            "marginal_quartile_seconds": [low, high],
            "marginal_best_seconds": (min(long) - min(short)) / (many - few),
            "step_median_seconds": {few: median(short), many: median(long)},
            "turn_step_seconds": outcome.step_seconds,
        }
    return row


def table(rows: Sequence[dict[str, Any]], plan: Plan) -> TextTable:
    """Figures of all that ran; below them what was loaded, why others were skipped."""
    few, many = plan.contexts
    measured = [row for row in rows if row["skipped"] is None]
    notes = [*COMPARED, *_loaded(measured)]
    notes += [f"Skipped: {_name(row)}: {row['skipped']}" for row in rows if row["skipped"]]
    return TextTable(
        f"Marginal cost of context, {plan.model.name}, decode, batch 1, {plan.threads} threads "
        f"(measured in {plan.turns} turns of {plan.steps} tokens)",
        (
            "engine, cache",
            "us a token of context",
            "quartiles",
            "of the fastest",
            "ratio to ours",
            f"ms a step at {few}",
            f"at {many}",
        ),
        [_cells(row, few, many) for row in measured],
        notes,
    )


def _cells(row: dict[str, Any], few: int, many: int) -> tuple[str, ...]:
    low, high = (1e6 * x for x in row["marginal_quartile_seconds"])
    ratio = row.get("ratio_to_ours")
    return (
        _name(row),
        f"{1e6 * row['marginal_median_seconds']:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{1e6 * row['marginal_best_seconds']:.2f}",
        "-" if ratio is None else f"{ratio:.2f}",
        *(f"{1e3 * row['step_median_seconds'][context]:.2f}" for context in (few, many)),
    )


def _name(row: dict[str, Any]) -> str:
    return f"{row['peer']}, {row['variant']}"


def _loaded(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line for those that have it in common."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        used = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        groups.setdefault(f"{row['loaded']} ({used})", []).append(_name(row))
    return [f"Loaded: {' and '.join(names)}: {what}" for what, names in groups.items()]


def draw(rows: Sequence[dict[str, Any]], plan: Plan, machine: str, path: Path) -> None:
    """The marginal costs with their quartiles.

    Raises:
        OSError: the file cannot be written.
    """
    measured = [row for row in rows if row["skipped"] is None]
    peers = list(dict.fromkeys(row["peer"] for row in measured))
    origin = f"{plan.model.name}, batch 1, measured on {machine}"
    with style():
        figure, axes = new_figure("What one token of context more adds to a decode step", origin)
        for place, row in enumerate(measured):
            cost = 1e6 * row["marginal_median_seconds"]
            ends = [1e6 * x for x in row["marginal_quartile_seconds"]]
            colour = COLOURS[-1 - peers.index(row["peer"]) % len(COLOURS)]
            axes.plot(ends, [place, place], color=colour, linewidth=2)
            axes.plot(cost, place, "o", color=colour, markersize=8)
            axes.annotate(
                f"{cost:.2f}",
                (max(cost, *ends), place),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        if all(row["marginal_quartile_seconds"][0] > 0 for row in measured):
            axes.set_xscale("log")  # else noise hid a cost, and there is no place for it
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_yticks(range(len(measured)), [_name(row) for row in measured])
        axes.invert_yaxis()
        axes.set_xlabel(
            "microseconds (line: quartiles over turns), "
            f"from steps at {plan.contexts[0]} and {plan.contexts[1]} tokens"
        )
        axes.grid(alpha=0.25, axis="both", which="both")
        save(figure, path)

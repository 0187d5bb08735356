"""Where an evaluation's results go: the terminal, ``report.md``, ``report.json`` and plots."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ascend_kv.errors import RunError
from ascend_kv.evaluate.console import Log
from ascend_kv.evaluate.quality.plots import draw_plots
from ascend_kv.evaluate.quality.results import EvalResult
from ascend_kv.evaluate.quality.tables import tables
from ascend_kv.evaluate.report import (
    machine_line,
    markdown_table,
    model_line,
    print_report,
    write_files,
)


class Saver:
    """Keeps the report up to date while the evaluation runs.

    That it cannot be written is said once and does not end the run: what counts is in the cells.
    """

    def __init__(self, directory: Path, log: Log) -> None:
        self._directory, self._log = directory, log
        self._failed = False

    def __call__(self, result: EvalResult) -> None:
        if self._failed:
            return
        try:
            write_report(result, self._directory)
        except RunError as error:
            self._failed = True
            self._log.say(f"warning: {error}")


def write_report(result: EvalResult, directory: Path) -> None:
    """Write ``report.json``, the plots and ``report.md``.

    Raises:
        RunError: one of them cannot be written.
    """
    write_files(
        directory,
        result.as_json(),
        lambda: draw_plots(result, directory),
        lambda plots: markdown(result, plots),
    )


def show(result: EvalResult, console: Console) -> None:
    """Print the tables and what has to be known to read them."""
    print_report(tables(result), _context(result), console)


def markdown(result: EvalResult, plots: list[str]) -> str:
    """The whole report as text; ``plots`` are file names beside it."""
    parts = [f"# Quality of KV caches: {result.model.name}", *_context(result)]
    if not result.complete:
        parts.append(
            f"**Unfinished: {result.cells_done:,} of {result.cells:,} cells have been computed.**"
        )
    parts += [markdown_table(table) for table in tables(result)]
    parts += [f"![{Path(name).stem}]({name})" for name in plots]
    served = ", ".join(f"{name}: {by}" for name, by in sorted(result.operators.items()))
    parts.append(f"Operators on this device, whether the run called them or not: {served}.")
    if result.whole_number_bits:
        parts.append(f"Attention over codes: whole numbers of {result.whole_number_bits} bits.")
    return "\n\n".join(parts) + "\n"


def _context(result: EvalResult) -> list[str]:
    return [
        machine_line(result.machine, result.started, result.wall_seconds, result.quick),
        model_line(result.model),
        f"Text: {result.text.source}, {result.text.tokens:,} tokens, SHA-256 "
        f"{result.text.sha256[:16]}.",
    ]

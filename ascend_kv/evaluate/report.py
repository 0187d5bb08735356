"""Where results go: the terminal, ``report.md``, ``report.json`` and plots.

The layout of ``report.json`` is documented in ``recipes/qwen_910b.md``.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ascend_kv.errors import RunError, UsageError
from ascend_kv.evaluate.console import Log, print_table
from ascend_kv.evaluate.machine import Machine
from ascend_kv.evaluate.plots import draw_plots
from ascend_kv.evaluate.results import BenchResult, ModelInfo, Sample
from ascend_kv.evaluate.tables import (
    comparison_table,
    factor_table,
    perplexity_table,
    planted_table,
    routes_table,
    scheme_table,
    speed_table,
    sweep_table,
)
from ascend_kv.evaluate.workload import LengthRecipe
from ascend_kv.text_table import TextTable
from ascend_kv.whole_files import cannot_write, write_whole

_PROBE_BYTES = 4 << 20
"""More than a report and its plots take."""


def prepare_directory(directory: Path) -> None:
    """Create the output directory and see that a report can be written there.

    Raises:
        RunError: it cannot; said before the long work, not after it.
    """
    probe = directory / ".probe"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(cannot_write(directory, error)) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


@contextlib.contextmanager
def output_directory(directory: Path, schema: str) -> Iterator[None]:
    """``prepare_directory``; what was made and is still empty is gone again if the run fails.

    Args:
        directory: where results go.
        schema: of the ``report.json`` that will be written there.

    Raises:
        UsageError: a report lies there that is another command's.
        RunError: as ``prepare_directory``.
    """
    _keep_other_reports(directory / "report.json", schema)
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    prepare_directory(directory)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the first that is not empty ends it
            for path in made:
                path.rmdir()
        raise


def _keep_other_reports(path: Path, schema: str) -> None:
    try:
        lies_there = json.loads(path.read_text(encoding="utf-8"))["schema"]
    except (OSError, ValueError, LookupError, TypeError):
        return  # none, or nothing that could be read again
    if str(lies_there).partition("/")[0] != schema.partition("/")[0]:
        legal = f"a directory without a report, or with one of {schema.partition('/')[0]}"
        hint = f"Its report.json is of {lies_there} and would be overwritten."
        raise UsageError("--output", str(path.parent), legal, hint)


class Saver:
    """Keeps ``report.json`` up to date while the job runs.

    That it cannot be written is said once and does not end the job: the tables will still be
    printed, and the last write, which counts, will say it again.
    """

    def __init__(self, directory: Path, log: Log) -> None:
        self._directory, self._log = directory, log
        self._failed = False
        self._result: BenchResult | None = None

    def __call__(self, result: BenchResult) -> None:
        self._result = result
        if self._failed:
            return
        try:
            write_json(result, self._directory)
        except RunError as error:
            self._failed = True
            self._log.say(f"warning: {error}")

    def write_unfinished(self) -> None:
        """After a job that broke off: the whole report of the parts that were done, if any.

        That it cannot be written is said, not raised: what broke the job off matters more.
        """
        if self._result is None:
            return
        try:
            write_report(self._result, self._directory)
        except RunError as error:
            self._log.say(f"warning: {error}")
        else:
            self._log.say(f"Report of the parts that were done: {self._directory / 'report.md'}")


def write_json(result: BenchResult, directory: Path) -> None:
    """Write ``report.json`` whole or not at all.

    Raises:
        RunError: it cannot be written; an older one is still there then.
    """
    write_whole(directory / "report.json", json.dumps(result.as_json(), indent=1) + "\n")


def write_report(result: BenchResult, directory: Path) -> None:
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


def write_files(
    directory: Path,
    content: Any,
    draw: Callable[[], list[str]],
    text: Callable[[list[str]], str],
) -> None:
    """Write ``report.json``, plots and ``report.md``, in this order.

    Args:
        directory: where they go.
        content: of ``report.json``.
        draw: writes the plots; returns their file names.
        text: makes the text of these names.

    Raises:
        RunError: one of them cannot be written.
    """
    write_whole(directory / "report.json", json.dumps(content, indent=1) + "\n")
    try:
        plots = draw()
    except OSError as error:
        raise RunError(cannot_write(directory, error)) from error
    write_whole(directory / "report.md", text(plots))


def show(result: BenchResult, console: Console) -> None:
    """Print the tables that answer the question; the rest is in the report."""
    print_report(_tables(result), _context(result), console)


def print_report(tables: Sequence[TextTable], context: Sequence[str], console: Console) -> None:
    """Tables, and below them what has to be known to read them, a paragraph each."""
    for table in tables:
        print_table(table, console)
    for line in context:
        console.print(line, markup=False, highlight=False)


def _tables(result: BenchResult) -> list[TextTable]:
    tables = [
        scheme_table(result),
        factor_table(result),
        comparison_table(result),
        speed_table(result),
    ]
    if result.perplexity is not None:
        tables.append(perplexity_table(result.perplexity))
    if result.planted_bias:
        tables.append(planted_table(result.planted_bias))
    if result.attention_routes:
        tables.append(routes_table(result.attention_routes))
    return tables


def markdown(result: BenchResult, plots: list[str]) -> str:
    """The whole report as text; ``plots`` are file names beside it."""
    parts = [f"# KV cache side by side: {result.model.name}", *_context(result)]
    if not result.complete:
        parts.append("**Unfinished: parts of this run are missing.**")
    tables = _tables(result)
    if result.sweep is not None:
        tables.append(sweep_table(result.sweep))
    parts += [markdown_table(table) for table in tables]
    parts += [f"![{Path(name).stem.replace('_', ' ')}]({name})" for name in plots]
    if result.samples:
        parts.append("## Samples, greedy (measured)")
        parts += [_markdown_sample(sample) for sample in result.samples]
    parts.append(_operators(result))
    return "\n\n".join(parts) + "\n"


def _context(result: BenchResult) -> list[str]:
    """What has to be known to read the figures, one paragraph each."""
    drawn, budget = result.workload, result.budget
    prompts, outputs = (
        LengthRecipe(**result.recipe["workload"][name]).description
        for name in ("prompt_tokens", "output_tokens")
    )
    return [
        machine_line(result.machine, result.started, result.wall_seconds, result.quick),
        model_line(result.model),
        f"Budget: {budget.bytes:,} bytes, what {budget.sequences} contiguous "
        f"{budget.kv_cache_dtype} sequences of {budget.max_model_len:,} tokens take; blocks of "
        f"{budget.block_size} tokens.",
        f"Requests: {drawn.requests}, prompts of {drawn.prompt_min} to {drawn.prompt_max} tokens "
        f"(mean {drawn.prompt_mean:.0f} as drawn; {prompts}), "
        f"outputs of {drawn.output_min} to {drawn.output_max} tokens "
        f"(mean {drawn.output_mean:.0f} as drawn; {outputs}); "
        f"together {drawn.total_mean:.0f} on the average. Prompts are slices of "
        f"{result.text.source} ({result.text.tokens:,} tokens). Greedy, fixed output lengths: all "
        "schemes do the same work, in the order listed, each after a short warm-up.",
    ]


def machine_line(machine: Machine, started: str, wall_seconds: float, quick: bool) -> str:
    """What ran it, when, and for how long."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return (
        f"Machine: {machine.device}; {machine.processor}, {machine.cores} cores, "
        f"{machine.threads} threads; {machine.system}; {versions}. Started {started}, "
        f"{wall_seconds:.0f} s{' (quick)' if quick else ''}."
    )


def model_line(model: ModelInfo) -> str:
    """What ran."""
    return (
        f"Model: {model.name} ({model.model_type}, {model.num_layers} layers, "
        f"{model.num_heads} query and {model.num_kv_heads} KV heads of {model.head_dim}), "
        f"computed in {model.dtype}."
    )


def _operators(result: BenchResult) -> str:
    served = ", ".join(f"{name}: {by}" for name, by in sorted(result.operators.items()))
    fused = "see its table" if result.attention_routes else "not used"
    return (
        f"Operators on this device, whether the run called them or not: {served}. "
        f"CANN's fused attention: {fused}."
    )


def markdown_table(table: TextTable) -> str:
    """A table as Markdown, its title a heading."""

    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    ruler = ("---", *["---:"] * (len(table.header) - 1))
    lines = [f"## {table.title}", "", *map(line, (table.header, ruler, *table.rows))]
    for note in table.notes:
        lines += ["", note]
    return "\n".join(lines)


def _markdown_sample(sample: Sample) -> str:
    return "\n\n".join(
        [
            f"**{sample.prompt}** ({sample.equal_tokens} of {sample.tokens} tokens equal before "
            "the first difference)",
            f"{sample.reference_dtype}:\n\n{_quote(sample.reference_text)}",
            f"{sample.quantized_dtype}:\n\n{_quote(sample.quantized_text)}",
        ]
    )


def _quote(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.strip().splitlines() or [""])

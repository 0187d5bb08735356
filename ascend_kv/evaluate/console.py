"""The terminal: progress on standard error, tables of results on standard output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ascend_kv.text_table import TextTable

_PLAIN_WIDTH = 140
"""Columns of text where the output is no terminal."""
_LONGEST_FIGURE = 40
"""Characters; a column with more in a cell is read as text, from the left."""
_WIDEST = 1000
"""Columns that a table may take there: in a file or a log nothing needs to be folded."""


class Log:
    """Says what is going on: a line for each part, a bar while it runs."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, message: str) -> None:
        """One line, without markup: file names may hold brackets."""
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def bar(self, title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """A progress bar; calls of what it yields advance it. Nothing where nobody watches."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn(f"{{task.completed}}/{{task.total}} {unit}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(
            *columns, console=self.console, transient=True, disable=not self.console.is_terminal
        ) as progress:
            task = progress.add_task(title, total=total)

            def advance(steps: int) -> None:
                progress.advance(task, steps)

            yield advance


def table_console(stderr: bool = False, file: IO[str] | None = None) -> Console:
    """A console for tables: as wide as the terminal, wide where there is none or for ``file``."""
    console = Console(stderr=stderr, file=file)
    if not console.is_terminal:
        console = Console(stderr=stderr, file=file, width=_PLAIN_WIDTH)
    return console


def print_table(table: TextTable, console: Console) -> None:
    """Print a table with its title above and its remarks below."""
    shown = Table(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    # Cells fold between words where the terminal is narrow, and no word is ever cut: a figure that
    # has lost a digit is a wrong figure.
    for number, name in enumerate(table.header):
        cells = [row[number] for row in table.rows]
        words = (word for cell in (name, *cells) for word in cell.split())
        prose = max(map(len, cells), default=0) > _LONGEST_FIGURE
        shown.add_column(
            name,
            justify="right" if number and not prose else "left",
            overflow="fold",
            min_width=max(map(len, words), default=1),
        )
    for row in table.rows:
        shown.add_row(*(Text(cell) for cell in row))
    width = console.width
    if not console.is_terminal:  # then lines may be as long as whole words make the table
        anywhere = console.options.update(max_width=_WIDEST)
        console.width = max(width, Measurement.get(console, anywhere, shown).minimum)
    console.print(shown, crop=False)
    console.width = width
    for note in table.notes:
        console.print(Text(note, style="dim"))
    console.print()

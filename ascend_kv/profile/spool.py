"""Sorting more records than fit into memory: sorted runs in a file, merged when they are read.

A profile's rows stand in no order that can be relied on: a trace has them by stream, a folder in
several files. What is kept in memory is one run, and a page of each run while they are merged.
"""

from __future__ import annotations

import heapq
import struct
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO

Record = tuple[int, int, int, int]
"""Lane, start in nanoseconds, minus the end, operator.

Of tasks that begin together the longer one comes first: it is the one that calls the other.
"""

_LAYOUT = struct.Struct("<iqqi")
_RUN_RECORDS = 1 << 17
_PAGE_RECORDS = 1 << 10


class Spool:
    """Takes records in any order and gives them back sorted, once."""

    def __init__(self, run_records: int = _RUN_RECORDS) -> None:
        self.run_records = run_records
        self.file: IO[bytes] | None = None
        self.run: list[Record] = []
        self.runs: list[tuple[int, int]] = []  # place in the file, number of records

    def add(self, record: Record) -> None:
        """Keep a record.

        Raises:
            OSError: there is no room for temporary files.
        """
        self.run.append(record)
        if len(self.run) >= self.run_records:
            self._write()

    def sorted(self) -> Iterator[Record]:
        """All records in order."""
        self.run.sort()
        yield from heapq.merge(*(self._read(*run) for run in self.runs), self.run)

    def _write(self) -> None:
        if self.file is None:
            self.file = tempfile.TemporaryFile(prefix="ascend_kv_")  # noqa: SIM115
        self.run.sort()
        self.runs.append((self.file.seek(0, 2), len(self.run)))
        self.file.write(b"".join(_packed(self.run)))
        self.run.clear()

    def _read(self, place: int, records: int) -> Iterator[Record]:
        assert self.file is not None
        while records:
            page = min(records, _PAGE_RECORDS)
            self.file.seek(place)
            data = self.file.read(page * _LAYOUT.size)
            yield from _LAYOUT.iter_unpack(data)  # type: ignore[misc]
            place += len(data)
            records -= page


def _packed(run: Iterable[Record]) -> Iterator[bytes]:
    return (_LAYOUT.pack(*record) for record in run)

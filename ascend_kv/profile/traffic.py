"""Bytes that a call has to move, from the shapes in the profile, where they say so.

Each byte counts once, as if caches were perfect; whole sectors do not count. So an operator that
reads things twice, or that skips slots, has another bandwidth than the one computed here.

Attention reads as many tokens as its sequences have: this package's operator names their lengths,
CANN's fused attention takes them from the host, where no profile shows them. There only the
device's own counters help (``--aic-metrics=MemoryAccess``), or what ``--profile`` wrote beside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import prod

from ascend_kv.profile.tasks import Task

_BYTES = {
    "float": 4, "float32": 4, "fp32": 4, "half": 2, "float16": 2, "fp16": 2, "bfloat16": 2,
    "bf16": 2, "bf": 2, "int8": 1, "signed char": 1, "uint8": 1, "unsigned char": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int32": 4, "int": 4, "int64": 8,
    "long": 8, "long int": 8, "double": 8,
}  # fmt: skip
_SCALAR_TYPES = {"5": 2, "6": 4, "7": 8, "15": 2}
"""torch's numbers of half, float, double and bfloat16, as a profile shows a dtype argument."""


def moved_bytes(task: Task, operator: str) -> int | None:
    """Bytes that a call has to move; None where the profile does not tell.

    Args:
        task: with shapes, or with what the device counted, which comes first.
        operator: as ``categories.label_of`` calls it.
    """
    if task.counted_bytes is not None:
        return task.counted_bytes
    rule = _RULES.get(operator)
    if rule is None or not task.shapes:
        return None
    try:
        return rule(_Inputs(task))
    except _Untold:
        return None


class _Untold(Exception):
    """The profile leaves something out."""


class _Inputs:
    """A call's inputs by place."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def shape(self, place: int) -> tuple[int, ...]:
        if place >= len(self.task.shapes) or not self.task.shapes[place]:
            raise _Untold
        return self.task.shapes[place]

    def dtype(self, place: int) -> str:
        name = self.task.dtypes[place] if place < len(self.task.dtypes) else ""
        return name.strip().lower().removeprefix("c10::").removeprefix("dt_")

    def item_bytes(self, place: int) -> int:
        size = _BYTES.get(self.dtype(place))
        if size is None:
            raise _Untold
        return size

    def bytes(self, place: int) -> int:
        return prod(self.shape(place)) * self.item_bytes(place)

    def has(self, place: int) -> bool:
        return place < len(self.task.shapes) and bool(self.task.shapes[place])

    def text(self, place: int) -> str:
        return self.task.lengths[place] if place < len(self.task.lengths) else ""

    def total(self, place: int) -> int:
        """The sum of a list of whole numbers; a list that was cut off tells nothing."""
        text = self.text(place)
        if not re.fullmatch(r"\[[\d, ]*\]", text):
            raise _Untold
        return sum(int(number) for number in re.findall(r"\d+", text))


def _token_bytes(inputs: _Inputs, caches: Sequence[int], scales: Sequence[int]) -> int:
    """One cached token of all heads: codes, and the scales that are kept for every token."""
    total = 0
    for place in caches:
        _, heads, _, dim = _cache(inputs, place)
        total += heads * dim * inputs.item_bytes(place)
    blocks, _, block_size, _ = _cache(inputs, caches[0])
    for place in scales:
        if inputs.has(place) and inputs.shape(place)[2] == block_size:  # else static
            total += inputs.bytes(place) // (blocks * block_size)
    return total


def _cache(inputs: _Inputs, place: int) -> tuple[int, int, int, int]:
    shape = inputs.shape(place)
    if len(shape) != 4 or 0 in shape:
        raise _Untold
    return shape[0], shape[1], shape[2], shape[3]


def _store(inputs: _Inputs) -> int:
    tokens = inputs.shape(0)[0]
    read = inputs.bytes(0) + inputs.bytes(1)
    return read + tokens * _token_bytes(inputs, (2, 3), (5, 6, 7, 8))


def _load(inputs: _Inputs) -> int:
    tokens = inputs.total(3)
    size = _SCALAR_TYPES.get(inputs.text(11))
    if size is None:
        raise _Untold
    written = 0
    for place in (0, 1):
        _, heads, _, dim = _cache(inputs, place)
        packed = inputs.dtype(place) in ("uint8", "unsigned char")  # INT4, two in a byte
        written += heads * dim * (2 if packed else 1) * size
    return tokens * (_token_bytes(inputs, (0, 1), (4, 5, 6, 7)) + written)


def _attention(inputs: _Inputs) -> int:
    read = inputs.total(5) * _token_bytes(inputs, (1, 2), (7, 8, 9, 10))
    return read + 2 * inputs.bytes(0)  # the output is as large as the queries


def _compress(inputs: _Inputs) -> int:
    return inputs.bytes(0) + inputs.bytes(1)


def _scatter(inputs: _Inputs) -> int:
    """New keys and values, read and written in one type."""
    return 2 * (inputs.bytes(0) + inputs.bytes(1))


_RULES: dict[str, Callable[[_Inputs], int]] = {
    "kv_cache_store": _store,
    "kv_cache_load": _load,
    "paged_attention": _attention,
    "hca_compress": _compress,
    "ReshapeAndCache": _scatter,
    "ScatterPaKvCache": _scatter,
}

"""Calls of the operators as models make them, with the traffic that no kernel can save.

A workload's tensors hold ones: what a kernel moves and issues depends on shapes, slots and block
tables, not on values. Unavoidable is every 32-byte sector of an input or of the result, once; a
scale that is found over many rows needs its input twice, and that counts as unavoidable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ascend_kv.ops.kv_cache_quantize import scale_shape
from ascend_kv.plan.roofline import SECTOR_BYTES

Tensor = torch.Tensor

BLOCK_SIZE = 128
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
PREFILL_TOKENS = 8192
QWEN = "Qwen2.5-7B"
DEEPSEEK = "DeepSeek-V4 Flash"


class Call(NamedTuple):
    """The operator's arguments, and the bytes of the sectors that it has to touch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    unavoidable_bytes: int


class Workload(NamedTuple):
    """One call, built when it is needed: some are large."""

    model: str
    name: str
    operator: str
    build: Callable[[], Call]


def whole_bytes(*tensors: Tensor) -> int:
    """Bytes of the sectors of whole tensors."""
    return sum(SECTOR_BYTES * -(-x.numel() * x.element_size() // SECTOR_BYTES) for x in tensors)


def touched_bytes(starts: Tensor, width: int) -> int:
    """Bytes of the sectors under pieces of ``width`` bytes at the byte offsets ``starts``, once."""
    first = starts.flatten() // SECTOR_BYTES
    last = (starts.flatten() + width - 1) // SECTOR_BYTES
    most = int((last - first).max()) + 1 if len(first) else 0
    spread = first[:, None] + torch.arange(most)
    return SECTOR_BYTES * len(spread[spread <= last[:, None]].unique())


def cache_bytes(slots: Tensor, heads: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes of the sectors of one side's cached tokens and, in INT8, of their scales."""
    rows = (slots[:, None] // BLOCK_SIZE * heads + torch.arange(heads)) * BLOCK_SIZE
    rows = rows + slots[:, None] % BLOCK_SIZE
    width = dim * dtype.itemsize
    scales = touched_bytes(rows * 4, 4) if dtype is torch.int8 else 0
    return touched_bytes(rows * width, width) + scales


def _caches(blocks: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[list[Tensor], dict]:
    shape = (blocks, heads, BLOCK_SIZE, dim)
    caches = [torch.ones(shape, dtype=dtype) for _ in range(2)]
    if dtype is not torch.int8:
        return caches, {}
    return caches, {f"{side}_scale": torch.ones(shape[:3]) for side in ("key", "value")}


def store(tokens: int, heads: int, dim: int, dtype: torch.dtype, prefill: bool) -> Call:
    """New bf16 tokens: a prompt into blocks in random order, or one each for many sequences."""
    generator = torch.Generator().manual_seed(0)
    index = torch.arange(tokens)
    blocks = -(-tokens // BLOCK_SIZE) if prefill else tokens
    order = torch.randperm(blocks, generator=generator)
    slots = order[index // BLOCK_SIZE if prefill else index] * BLOCK_SIZE
    slots = slots + (index if prefill else index * 37) % BLOCK_SIZE
    key = torch.ones(tokens, heads, dim, dtype=torch.bfloat16)
    caches, scales = _caches(blocks, heads, dim, dtype)
    moved = whole_bytes(key, key, slots) + 2 * cache_bytes(slots, heads, dim, dtype)
    return Call((key, key, *caches, slots), scales, moved)


def load(lengths: Sequence[int], heads: int, dim: int, dtype: torch.dtype) -> Call:
    """Cached prefixes, in blocks in random order, as dense bf16."""
    counts = [-(-n // BLOCK_SIZE) for n in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    slots, start = [], 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, :count] = order[start : start + count]
        index = torch.arange(length)
        slots.append(order[start + index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE)
        start += count
    caches, scales = _caches(sum(counts), heads, dim, dtype)
    result = len(lengths) * heads * max(lengths) * dim * 2
    moved = 2 * cache_bytes(torch.cat(slots), heads, dim, dtype) + 2 * result
    moved += whole_bytes(tables, torch.empty(len(lengths), dtype=torch.int32))
    kwargs: dict[str, Any] = {**scales, "dtype": torch.bfloat16}
    return Call((*caches, tables, list(lengths)), kwargs, moved)


def quantize(tokens: int, heads: int, dim: int, granularity: str) -> Call:
    """Dense bf16 keys of one sequence."""
    x = torch.ones(1, heads, tokens, dim, dtype=torch.bfloat16)
    scales = torch.ones(scale_shape(x.shape, granularity))
    reads = 2 if granularity in ("layer", "head", "channel") else 1
    moved = reads * whole_bytes(x) + x.numel() + whole_bytes(scales)
    return Call((x, granularity), {}, moved)


def dequantize(tokens: int, heads: int, dim: int, granularity: str) -> Call:
    """Back to dense bf16."""
    codes = torch.ones(1, heads, tokens, dim, dtype=torch.int8)
    scales = torch.ones(scale_shape(codes.shape, granularity))
    moved = whole_bytes(codes, scales) + 2 * codes.numel()
    return Call((codes, scales), {"dtype": torch.bfloat16}, moved)


def compress(
    lengths: Sequence[int], ratio: int, dim: int, overlap: bool, first_window: int = 0
) -> Call:
    """bf16 projections of some sequences, with position bias, norm and RoPE of 64 channels.

    With overlap a window needs its own half of the channels, and of the window before it the other
    half: from ``previous_kv`` where that lies in an earlier call, nothing for window 0.
    """
    channels, rotary_dim = 2 * dim if overlap else dim, 64
    kv = torch.ones(sum(lengths), channels, dtype=torch.bfloat16)
    counts = [n // ratio for n in lengths]
    bias, weight = torch.ones(ratio, channels), torch.ones(dim)
    table = torch.ones(ratio * (first_window + max(counts)), rotary_dim // 2, 2)
    kwargs = {
        "position_bias": bias,
        "overlap": overlap,
        "first_windows": [first_window] * len(lengths),
        "norm_weight": weight,
        "rotary_table": table,
        "rotary_dim": rotary_dim,
    }
    halves = sum(counts)
    if overlap:
        halves += sum(counts) - (0 if first_window else len(lengths))
        if first_window:
            previous = torch.ones(len(lengths), ratio, dim, dtype=torch.bfloat16)
            kwargs |= {"previous_kv": previous, "previous_gate": previous}
    moved = 2 * halves * ratio * dim * 2 + whole_bytes(bias, weight)
    moved += sum(counts) * (2 * dim + 4 * rotary_dim)
    return Call((kv, kv, list(lengths), ratio), kwargs, moved)


def decompress(tokens: int, ratio: int, dim: int) -> Call:
    """The entries of one sequence."""
    entries = torch.ones(tokens // ratio, dim, dtype=torch.bfloat16)
    return Call((entries, [tokens], ratio), {}, whole_bytes(entries) * (1 + ratio))


def qwen_workloads(
    batches: Sequence[int] = BATCHES, tokens: int = PREFILL_TOKENS
) -> list[Workload]:
    """Of one layer of Qwen2.5-7B: 4 KV heads of 128."""
    heads, dim, found = 4, 128, []

    def add(name: str, operator: str, build: Callable[..., Call], *arguments: Any) -> None:
        found.append(Workload(QWEN, name, operator, partial(build, *arguments)))

    for dtype, kind in ((torch.int8, "int8"), (torch.bfloat16, "bf16")):
        for batch in batches:
            name = f"store {kind}, decode {batch}"
            add(name, "kv_cache_store", store, batch, heads, dim, dtype, False)
        name = f"store {kind}, prefill {tokens}"
        add(name, "kv_cache_store", store, tokens, heads, dim, dtype, True)
        add(f"load {kind}, prefix {tokens}", "kv_cache_load", load, [tokens], heads, dim, dtype)
    for granularity in ("token_head", "head", "channel"):
        name = f"quantize {granularity}, {tokens}"
        add(name, "kv_cache_quantize", quantize, tokens, heads, dim, granularity)
    name = f"dequantize token_head, {tokens}"
    add(name, "kv_cache_dequantize", dequantize, tokens, heads, dim, "token_head")
    return found


def deepseek_workloads(
    batches: Sequence[int] = BATCHES, tokens: int = PREFILL_TOKENS
) -> list[Workload]:
    """Of one layer of DeepSeek-V4 Flash: HCA (128 : 1), CSA (4 : 1, overlapping), its indexer.

    A decode step compresses where a window has just become full; here it has in every sequence.
    """
    kinds = (("HCA", 128, 512, False), ("CSA", 4, 512, True), ("indexer", 4, 128, True))
    found = []

    def add(name: str, operator: str, build: Callable[..., Call], *arguments: Any) -> None:
        found.append(Workload(DEEPSEEK, name, operator, partial(build, *arguments)))

    for kind, ratio, dim, overlap in kinds:
        for batch in batches:
            name = f"{kind}, decode {batch}"
            add(name, "hca_compress", compress, [ratio] * batch, ratio, dim, overlap, 7)
        add(f"{kind}, prefill {tokens}", "hca_compress", compress, [tokens], ratio, dim, overlap)
    add(f"HCA entries back, {tokens}", "hca_decompress", decompress, tokens, 128, 512)
    return found


MODELS: dict[str, Callable[..., list[Workload]]] = {
    "qwen": qwen_workloads,
    "deepseek": deepseek_workloads,
}

"""The calls that the self-test makes: sizes at random, odd ones among them, and extreme values.

A case is drawn from its number, so that the same list runs everywhere: on the NPU, on native CPU
code and on the twin.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor

HALF_TYPES = (torch.float16, torch.bfloat16)
DIMS = (8, 40, 64, 72, 80, 96, 128, 192, 256)
GRANULARITIES = ("layer", "head", "token", "token_head", "channel", "group")


class Case(NamedTuple):
    """One call.

    Attributes:
        operator: its name.
        sizes: what it is, in a few words.
        args, kwargs: the operator's, on the CPU; tensors that it writes are among them.
        pooled: the result is a sum in float32 whose order is free, so it is compared by rows.
    """

    operator: str
    sizes: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pooled: bool = False


def draw_cases(operator: str, count: int) -> list[Case]:
    """The first ``count`` cases of an operator."""
    make = _MAKERS[operator]
    cases = []
    for number in range(count):
        draw = random.Random(f"{operator} {number}")
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        cases.append(make(draw, generator, number))
    return cases


def random_values(generator: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Normal values, with rows of zeros, constants, denormals and extreme numbers among them."""
    x = torch.randn(tuple(shape), generator=generator) * 3
    rows = x.view(-1, shape[-1])
    limits = torch.finfo(dtype)
    special = torch.randint(0, 12, (rows.shape[0],), generator=generator)
    rows[special == 0] = 0.0
    rows[special == 1] = -1.7
    rows[special == 2] *= limits.tiny / 4
    rows[special == 3] *= limits.max / 40
    rows[special == 4] = rows[special == 4].round()
    return x.clamp(limits.min, limits.max).to(dtype)


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dense(draw: random.Random) -> tuple[tuple[int, int, int, int], str, int]:
    """Shape, granularity and group size of dense keys."""
    granularity, dim = draw.choice(GRANULARITIES), draw.choice(DIMS)
    tokens = draw.choice([1, 2, 7, 17, 48, 65, 130, 301])
    shape = (draw.choice([1, 1, 2]), draw.choice([1, 2, 3, 8]), tokens, dim)
    groups = [size for size in (8, 16, 24, 32, 64) if dim % size == 0]
    return shape, granularity, draw.choice(groups) if granularity == "group" else 0


def _quantize(draw: random.Random, generator: torch.Generator, number: int) -> Case:
    shape, granularity, group_size = _dense(draw)
    symmetric, dtype = draw.random() < 0.5, draw.choice(HALF_TYPES)
    x = random_values(generator, shape, dtype)
    if number % 4 == 3:
        x.view(-1)[:: max(1, x.numel() // 3)] = float("nan")
    sizes = f"{list(shape)} {_kind(dtype)} {granularity}{'' if symmetric else ' asymmetric'}"
    return Case("kv_cache_quantize", sizes, (x, granularity, symmetric), {"group_size": group_size})


def _dequantize(draw: random.Random, generator: torch.Generator, number: int) -> Case:
    from ascend_kv.ops.kv_cache_quantize import scale_shape

    shape, granularity, group_size = _dense(draw)
    groups = scale_shape(shape, granularity, group_size)
    codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    scale = torch.randn(groups, generator=generator) * 10.0 ** draw.choice([-3, 0, 3])
    zeros = torch.randn(groups, generator=generator) if draw.random() < 0.5 else None
    dtype = draw.choice(HALF_TYPES)
    kwargs = {"zero_point": zeros, "group_size": group_size, "dtype": dtype}
    return Case(
        "kv_cache_dequantize", f"{list(shape)} {_kind(dtype)} {granularity}", (codes, scale), kwargs
    )


def _store(draw: random.Random, generator: torch.Generator, number: int) -> Case:
    tokens, heads = draw.choice([1, 2, 5, 33, 70, 200]), draw.choice([2, 4, 5, 8])
    dim, block_size = draw.choice(DIMS), draw.choice([32, 64, 128])
    dtype = draw.choice(HALF_TYPES)
    granularity = draw.choice(["none", "token_head", "token", "channel"])
    blocks = 3 + tokens // block_size
    key, value = (random_values(generator, (tokens, heads, dim), dtype) for _ in range(2))
    if draw.random() < 0.5:  # a slice of a fused projection
        fused = torch.cat([key, value, value], 1)
        key, value = fused[:, :heads], fused[:, heads : 2 * heads]
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[torch.rand(tokens, generator=generator) < 0.2] = -1
    cache_type = dtype if granularity == "none" else torch.int8
    shape = (blocks, heads, block_size, dim)
    caches = [torch.full(shape, 85).to(cache_type) for _ in range(2)]
    kwargs: dict[str, Any] = {"dynamic": granularity != "channel"}
    if granularity != "none":
        names = ("scale",) if draw.random() < 0.5 else ("scale", "zero_point")
        rows = 1 if granularity == "token" else heads
        size = (1, heads, 1, dim) if granularity == "channel" else (blocks, rows, block_size)
        for side in ("key", "value"):
            for name in names:
                kwargs[f"{side}_{name}"] = torch.rand(size, generator=generator) + 0.01
    if draw.random() < 0.5:
        kwargs["key_positions"] = torch.zeros(shape[:3], dtype=torch.int32)
        kwargs["positions"] = torch.arange(tokens) * 3
    sizes = (
        f"{tokens} tokens, {heads} x {dim} {_kind(dtype)}, blocks of {block_size}, {granularity}"
    )
    return Case("kv_cache_store", sizes, (key, value, *caches, slots), kwargs)


def _load(draw: random.Random, generator: torch.Generator, number: int) -> Case:
    heads, block_size = draw.choice([2, 4, 5, 8]), draw.choice([32, 64, 128])
    lengths = [draw.choice([0, 1, 5, 33, 140, 300]) for _ in range(draw.choice([1, 2, 5]))]
    lengths[draw.randrange(len(lengths))] = draw.choice([3, 130])
    offset = draw.random() < 0.4
    dim = draw.choice([64, 80, 128]) if offset else draw.choice(DIMS)
    dtype = draw.choice(HALF_TYPES)
    granularity = draw.choice(["none", "token_head", "token", "channel"])
    counts = [-(-n // block_size) for n in lengths]
    blocks = sum(counts) + 2
    order = torch.randperm(blocks, generator=generator).tolist()
    tables = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    shape = (blocks, heads, block_size, dim)
    if granularity == "none":
        caches = [random_values(generator, shape, dtype) for _ in range(2)]
    else:
        codes = torch.randint(-128, 128, (2, *shape), generator=generator, dtype=torch.int8)
        caches = list(codes)
    kwargs: dict[str, Any] = {"dtype": dtype}
    if granularity != "none":
        rows = 1 if granularity == "token" else heads
        size = (1, heads, 1, dim) if granularity == "channel" else (blocks, rows, block_size)
        for side in ("key", "value"):
            kwargs[f"{side}_scale"] = torch.rand(size, generator=generator)
    if offset:
        angles = torch.rand(max(lengths), dim // 2, generator=generator) * 6
        kwargs["key_offset"] = torch.randn(heads, dim, generator=generator) * 100
        kwargs["rotary_table"] = torch.stack([angles.cos(), angles.sin()], -1).contiguous()
    sizes = f"{lengths} tokens, {heads} x {dim} {_kind(dtype)}, {granularity}"
    sizes += ", key offset" if offset else ""
    return Case("kv_cache_load", sizes, (*caches, tables, lengths), kwargs)


def _compress(draw: random.Random, generator: torch.Generator, number: int) -> Case:
    ratio, dim = draw.choice([2, 4, 4, 5, 32, 128, 128]), draw.choice([64, 72, 128, 512])
    overlap, dtype = draw.random() < 0.5, draw.choice(HALF_TYPES)
    lengths = [draw.randrange(0, 4 * ratio + 3) for _ in range(draw.choice([1, 2, 5]))]
    lengths[draw.randrange(len(lengths))] = 3 * ratio + 1
    first = [draw.choice([0, 0, 1, 7]) for _ in lengths]
    channels, tokens = 2 * dim if overlap else dim, sum(lengths)
    kv = torch.randn(tokens, channels, generator=generator).to(dtype)
    gate = (torch.randn(tokens, channels, generator=generator) * 4).to(dtype)
    rotary_dim = draw.choice([0, 8, 64])
    last = max(a + n // ratio for a, n in zip(first, lengths, strict=True))
    angles = torch.rand(ratio * last + 1, rotary_dim // 2, generator=generator) * 6
    kwargs: dict[str, Any] = {
        "position_bias": torch.randn(ratio, channels, generator=generator),
        "overlap": overlap,
        "first_windows": first,
        "norm_weight": torch.randn(dim, generator=generator) if draw.random() < 0.7 else None,
        "rotary_dim": rotary_dim,
    }
    if rotary_dim:
        kwargs["rotary_table"] = torch.stack([angles.cos(), angles.sin()], -1).contiguous()
    if overlap:
        before = torch.randn(2, len(lengths), ratio, dim, generator=generator).to(dtype)
        kwargs["previous_kv"], kwargs["previous_gate"] = before
    sizes = f"{lengths} tokens / {ratio}, {dim} {_kind(dtype)}{', overlap' if overlap else ''}"
    return Case("hca_compress", sizes, (kv, gate, lengths, ratio), kwargs, pooled=True)


def _decompress(draw: random.Random, generator: torch.Generator, number: int) -> Case:
    ratio, dtype = draw.choice([2, 4, 5, 33, 128]), draw.choice(HALF_TYPES)
    count, dim = draw.choice([1, 2, 7, 60]), draw.choice([8, 40, 64, 72, 512])
    entries = torch.randn(count, dim, generator=generator).to(dtype)
    entries[0, 0] = float("nan")
    sizes = f"{count} entries x {ratio}, {dim} {_kind(dtype)}"
    return Case("hca_decompress", sizes, (entries, [count * ratio], ratio), {})


_MAKERS: dict[str, Callable[[random.Random, torch.Generator, int], Case]] = {
    "kv_cache_quantize": _quantize,
    "kv_cache_dequantize": _dequantize,
    "kv_cache_store": _store,
    "kv_cache_load": _load,
    "hca_compress": _compress,
    "hca_decompress": _decompress,
}

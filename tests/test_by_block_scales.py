"""Scales of a block's channels in paged_attention, attention_scores and kv_cache_load.

Every form against the same operator over a float32 cache of what the codes stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_calls import tolerance

from ascend_kv import ops
from ascend_kv.errors import UsageError
from ascend_kv.formats import INT4, INT8
from ascend_kv.formats.base import Encoded
from ascend_kv.ops.registration import REFERENCE_NAMESPACE, operator

Tensor = torch.Tensor
SERVED = [pytest.param(served, id="reference" if served else "served") for served in (True, False)]


class Case:
    """Keys with scales by block, values with scales by token, and both as float32."""

    def __init__(self, block_size: int, dim: int, lengths: list[int], symmetric: bool) -> None:
        generator = torch.Generator().manual_seed(block_size)
        width = -(-max(lengths) // block_size)
        blocks, kv_heads = len(lengths) * width + 2, 2
        order = torch.randperm(blocks, generator=generator)
        self.tables = order[: len(lengths) * width].view(len(lengths), width).to(torch.int32)
        self.lengths = lengths
        shape = (blocks, kv_heads, block_size, dim)
        key = torch.randn(shape, generator=generator) + 3 * torch.randn(1, 2, 1, dim)
        value = torch.randn(shape, generator=generator)
        kept, held = INT4.encode(key, (2,), symmetric), INT4.encode(value, (3,), symmetric)
        self.dense = {"key_cache": INT4.decode(kept), "value_cache": INT4.decode(held)}
        self.quantized = {"key_cache": kept.codes, "value_cache": held.codes}
        self.scales: dict[str, Any] = {"key_scale": kept.scale, **_squeezed("value", held)}
        if not symmetric:
            self.scales["key_zero_point"] = kept.zero_point
        unused = order[len(lengths) * width :]  # nobody's: what is there must not matter
        for scale in self.scales.values():
            scale[unused] = math.nan
        self.query = torch.randn(7 * len(lengths), 6, dim, generator=generator)


def _squeezed(side: str, encoded: Encoded) -> dict[str, Tensor]:
    parts = {"scale": encoded.scale, "zero_point": encoded.zero_point}
    return {f"{side}_{name}": x.squeeze(3) for name, x in parts.items() if x is not None}


def call(name: str, reference: bool) -> Callable[..., Any]:
    if reference:
        return operator(name, REFERENCE_NAMESPACE)
    wrapper: Callable[..., Any] = getattr(ops, name)
    return wrapper


SIZES = [
    (64, 32, [64, 192, 128]),
    (16, 8, [47, 3, 16]),
    (5, 6, [23, 5, 9]),
    (48, 70, [1500, 1, 97]),
]


@pytest.mark.parametrize("reference", SERVED)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(("block_size", "dim", "lengths"), SIZES)
@pytest.mark.parametrize("extra", ["", "window", "bias"])
def test_attention(
    block_size: int,
    dim: int,
    lengths: list[int],
    queries: int,
    symmetric: bool,
    reference: bool,
    extra: str,
) -> None:
    case = Case(block_size, dim, lengths, symmetric)
    counts = [min(queries, length) for length in lengths]
    query = case.query[: sum(counts)]
    options: dict[str, Any] = {"window": 11} if extra == "window" else {}
    if extra == "bias":
        options["score_bias"] = torch.randn(len(query), 6, max(lengths))
    batch = case.tables, counts, lengths, 0.2
    wanted, sums = ops.paged_attention(query, *case.dense.values(), *batch, **options)
    found, found_sums = call("paged_attention", reference)(
        query, *case.quantized.values(), *batch, **case.scales, **options
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found_sums, sums, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("block_size", [16, 48])
def test_int8_keys(block_size: int, group: int) -> None:
    shape, lengths = (9, 2, block_size, 40), [4 * block_size, block_size + 3]
    key, value = (INT8.encode(torch.randn(shape), axes, True) for axes in ((2,), (3,)))
    tables = torch.randperm(9)[:8].view(2, 4)
    query = torch.randn(2, 2 * group, 40)
    options = {"key_scale": key.scale, **_squeezed("value", value)}
    batch = query, key.codes, value.codes, tables, [1, 1], lengths, 0.2
    found = call("paged_attention", False)(*batch, **options)
    wanted = call("paged_attention", True)(*batch, **options)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance(), atol=tolerance())


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("strided", ["key_scale", "key_zero_point", "both"])
@pytest.mark.parametrize("step", [0, 2])
def test_parameters_whose_channels_do_not_lie_side_by_side(
    step: int, strided: str, queries: int
) -> None:
    """Step 0: one number, expanded to all channels."""
    case = Case(16, 40, [64], False)
    by_block = {name: x for name, x in case.scales.items() if x.dim() == 4}
    wide = {name: x.repeat_interleave(2, 3)[..., ::2] for name, x in by_block.items()}
    if step == 0:
        wide = {name: x[..., :1].clone().expand(-1, -1, -1, 40) for name, x in wide.items()}
    names = list(wide) if strided == "both" else [strided]
    plain = {**case.scales, **{name: wide[name].contiguous() for name in names}}
    views = {**case.scales, **{name: wide[name] for name in names}}
    assert all(views[name].stride(3) == step for name in names)
    query = torch.randn(queries, 6, 40)
    batch = query, *case.quantized.values(), case.tables, [queries], [64], 0.2
    found = call("paged_attention", False)(*batch, **views)
    wanted = call("paged_attention", False)(*batch, **plain)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    loads = [
        ops.kv_cache_load(*case.quantized.values(), case.tables, [64], **scales)
        for scales in (views, plain)
    ]
    assert all(torch.equal(x, y) for x, y in zip(*loads, strict=True))


@pytest.mark.parametrize("reference", SERVED)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("block_size", "dim", "lengths"), SIZES)
def test_load(
    block_size: int, dim: int, lengths: list[int], symmetric: bool, reference: bool
) -> None:
    case = Case(block_size, dim, lengths, symmetric)
    wanted = ops.kv_cache_load(*case.dense.values(), case.tables, lengths)
    found = call("kv_cache_load", reference)(
        *case.quantized.values(), case.tables, lengths, **case.scales
    )
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y)


def test_attention_scores() -> None:
    case = Case(5, 6, [23, 5, 9], False)
    batch = case.tables, [3, 1, 2], case.lengths, 0.2
    wanted = ops.attention_scores(case.query[:6], case.dense["key_cache"], *batch)
    keys = {name: x for name, x in case.scales.items() if name.startswith("key")}
    found = ops.attention_scores(case.query[:6], case.quantized["key_cache"], *batch, **keys)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_lists_of_entries() -> None:
    case = Case(5, 6, [23, 5], False)
    entries = torch.tensor([[0, 7, 22, -1], [4, 1, -1, 0]], dtype=torch.int32)
    batch = case.tables, [1, 1], case.lengths, 0.2
    wanted, _ = ops.paged_attention(case.query[:2], *case.dense.values(), *batch, entries=entries)
    found, _ = ops.paged_attention(
        case.query[:2], *case.quantized.values(), *batch, **case.scales, entries=entries
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_what_is_refused() -> None:
    case = Case(5, 6, [9], False)
    tokens = torch.zeros(1, 2, 6)
    slots = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(UsageError, match="all of its tokens at once"):
        ops.kv_cache_store(tokens, tokens, *case.quantized.values(), slots, **case.scales)
    for wrong in (case.scales["key_scale"][:2], case.scales["key_scale"][..., :4]):
        scales = {**case.scales, "key_scale": wrong}
        with pytest.raises(UsageError, match="by block"):
            ops.kv_cache_load(*case.quantized.values(), case.tables, case.lengths, **scales)

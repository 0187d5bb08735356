"""More than 2**31 elements: shapes and indices beyond int32, without the memory.

Shapes are asked of fake tensors. Reading is tried on tensors whose strides overlap, so that a
cache of 2**34 elements lies in a few megabytes and still holds another value at each index.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ascend_kv import ops
from ascend_kv.errors import UsageError

Tensor = torch.Tensor
LIMIT = 2**31
K, N, S, D = 2**17, 8, 128, 128  # 2**34 elements


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def overlapping(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[i, j, ...]`` holds i + j + ..., modulo 100."""
    elements = sum(shape)
    values = (torch.arange(elements) % 100).to(dtype)
    return values.as_strided(shape, (1,) * len(shape))


@pytest.mark.usefixtures("fake")
def test_shapes_over_the_paged_cache() -> None:
    cache, scale = torch.empty(K, N, S, D, dtype=torch.int8), torch.empty(K, N, S)
    assert cache.numel() > LIMIT
    table, length = torch.empty(2, K, dtype=torch.int32), K * S
    scales = {"key_scale": scale, "value_scale": scale}
    query = torch.empty(3, 2 * N, D)
    batch = table, [1, 2], [length, 9]
    output, sums = ops.paged_attention(query, cache, cache, *batch, 1.0, **scales)
    assert output.shape == (3, 2 * N, D) and sums.shape == (3, 2 * N)
    entries = torch.empty(3, 2**20, dtype=torch.int32)
    output, _ = ops.paged_attention(query, cache, cache, *batch, 1.0, **scales, entries=entries)
    assert output.shape == (3, 2 * N, D)
    scores = ops.attention_scores(query, cache, *batch, 1.0, key_scale=scale)
    assert scores.shape == (2, N, length)
    key, _ = ops.kv_cache_load(cache, cache, table, [length, 9], **scales)
    assert key.shape == (2, N, length, D) and key.numel() > LIMIT
    tokens = torch.empty(2**24, N, D)
    assert tokens.numel() > LIMIT
    slots = torch.empty(2**24, dtype=torch.int64)
    ops.kv_cache_store(tokens, tokens, cache, cache.clone(), slots, **scales)
    ops.kv_cache_move([cache, scale], [cache, scale], slots, slots, unit="slot")


@pytest.mark.usefixtures("fake")
def test_shapes_of_dense_tensors() -> None:
    x = torch.empty(4, 8, 2**20, 128)
    assert x.numel() > LIMIT
    codes, scale, zero_point = ops.kv_cache_quantize(x, "group", False, group_size=32)
    assert codes.shape == x.shape and scale.shape == zero_point.shape == (4, 8, 2**20, 4)
    assert ops.kv_cache_dequantize(codes, scale, zero_point, 32).shape == x.shape
    kv = torch.empty(2**23 + 3, 1024)
    assert kv.numel() > LIMIT
    entries = ops.hca_compress(kv, kv, [2**22, 2**22 + 3], 4, overlap=True)
    assert entries.shape == (2**21, 512)
    assert ops.hca_decompress(entries, [2**22, 2**22 + 3], 4).shape == (2**23, 512)
    parts = [torch.empty(2**20, 64, 128)] * 2
    output, _ = ops.merge_attention(parts, [x[..., 0] for x in parts])
    assert output.shape == (2**20, 64, 128) and output.numel() > LIMIT
    assert ops.select_topk(torch.empty(2**12, 2**20), 512).shape == (2**12, 512)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_loading_from_far_into_a_cache(dtype: torch.dtype) -> None:
    cache = overlapping(K, N, S, D)
    table = torch.tensor([[K - 1, 5], [77, K - 2]], dtype=dtype)
    key, value = ops.kv_cache_load(cache, cache, table, [S + 2, S + 1])
    for row, length in ((0, S + 2), (1, S + 1)):
        for token in (0, S - 1, S, length - 1):
            expected = cache[int(table[row, token // S]), :, token % S]
            assert torch.equal(key[row, :, token], expected)
            assert torch.equal(value[row, :, token], expected)


@pytest.mark.parametrize("listed", [False, True])
def test_attending_far_into_a_cache(listed: bool) -> None:
    cache = overlapping(K, N, S, D)
    near = torch.stack([cache[K - 1], cache[5]])
    query, lengths = torch.randn(2, N, D), [S + 2]
    entries = None
    if listed:
        entries = torch.tensor([[S + 1, 3, 9], [S, 0, -1]], dtype=torch.int32)
    far_table, near_table = torch.tensor([[K - 1, 5]]), torch.tensor([[0, 1]])
    given, wanted = (
        ops.paged_attention(query, x, x, table, [2], lengths, 0.01, entries=entries)
        for x, table in ((cache, far_table), (near, near_table))
    )
    for a, b in zip(given, wanted, strict=True):
        assert torch.equal(a, b)


def test_entries_up_to_the_last_int32() -> None:
    """A sequence of 2**31 tokens, of which a few are attended to."""
    size, blocks = 2**20, 2**11
    cache = overlapping(blocks, 1, size, 8)
    # wider than needed, so that an index that wrapped around finds another block
    table = torch.arange(-5, blocks).clamp(min=0).flip(0)[None].to(torch.int32)
    entries = torch.tensor([[LIMIT - 1, LIMIT - size - 7, 3]], dtype=torch.int32)
    tokens = torch.stack(
        [cache[int(table[0, e // size]), :, e % size] for e in entries[0].tolist()]
    )
    query = torch.randn(1, 2, 8)
    given = ops.paged_attention(
        query, cache, cache, table, [1], [LIMIT], 0.01, entries=entries, window=LIMIT
    )
    small = tokens.transpose(0, 1)[None]
    wanted = ops.paged_attention(query, small, small, torch.tensor([[0]]), [1], [3], 0.01)
    for a, b in zip(given, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_moving_slots_beyond_int32() -> None:
    size, blocks = 2**20, 2**12
    source, destination = overlapping(blocks, 2, size, 3), torch.zeros(2, 2, size, 3)
    slots = torch.tensor([blocks * size - 1, LIMIT + 5, LIMIT - 1, 3])
    ops.kv_cache_move(
        [destination], [source], slots, torch.tensor([0, 1, size, 2 * size - 1]), unit="slot"
    )
    for slot, target in zip(slots.tolist(), (0, 1, size, 2 * size - 1), strict=True):
        expected = source[slot // size, :, slot % size]
        assert torch.equal(destination[target // size, :, target % size], expected)
    with pytest.raises(UsageError):
        ops.kv_cache_move(
            [destination], [source], slots + 1, torch.tensor([0, 1, 2, 3]), unit="slot"
        )


@pytest.mark.parametrize("slot", [K * S * 2**8, -2])
def test_slots_beyond_a_large_cache_are_refused(slot: int) -> None:
    cache = overlapping(K * 2**8, 1, S, 4)
    assert cache.shape[0] * S > LIMIT
    key = torch.randn(1, 1, 4)
    with pytest.raises(UsageError) as error:
        ops.kv_cache_store(key, key, cache, cache, torch.tensor([slot]))
    assert error.value.field == "slot_mapping"

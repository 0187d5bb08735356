"""kv_cache_load against the oracle's reading of single vectors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compare import assert_rounded, assert_within, largest

from ascend_kv import ops
from ascend_kv.errors import UsageError

LENGTHS = [20, 1, 0, 33, 16]


def truth(cache: Any) -> list[np.ndarray]:
    """Keys and values in float64, zeros past each length."""
    dense = []
    for side in cache.sides:
        _, heads, _, dim = side.cache.shape
        out = np.zeros((len(cache.kv_lengths), heads, max(cache.kv_lengths), dim))
        for row, length in enumerate(cache.kv_lengths):
            out[row, :, :length] = oracle.read_sequence(side, cache.tables[row].tolist(), length)
        dense.append(out)
    return dense


def load(cache: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.kv_cache_load(
        *cache.tensors, cache.tables, cache.kv_lengths, **cache.scales, **options
    )


@pytest.mark.parametrize(
    "granularity", ["token", "token_head", "layer", "head", "channel", "group"]
)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block_size", [1, 16])
def test_int8(cache_with: Any, granularity: str, symmetric: bool, block_size: int) -> None:
    options = {"granularity": granularity, "symmetric": symmetric, "block_size": block_size}
    cache = cache_with(LENGTHS, dim=40, **options)
    for given, exact in zip(load(cache), truth(cache), strict=True):
        assert given.dtype == torch.float32 and given.is_contiguous()
        # one rounding of the product, one of the sum
        assert_within(given, exact, np.finfo(np.float32).eps * largest(exact))


@pytest.mark.parametrize("dim", [40, 64, 80, 128, 512])
@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_sizes(cache_with: Any, dim: int, block_size: int, kv_heads: int) -> None:
    cache = cache_with([7, 25, 2], dim=dim, block_size=block_size, kv_heads=kv_heads)
    for given, exact in zip(load(cache), truth(cache), strict=True):
        assert_within(given, exact, np.finfo(np.float32).eps * largest(exact))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_unquantized_comes_back_bit_for_bit(cache_with: Any, stored: torch.dtype) -> None:
    cache = cache_with(LENGTHS, dtype=stored)
    for given, exact in zip(load(cache), truth(cache), strict=True):
        assert given.dtype == stored
        assert_within(given, exact, 0.0)


@pytest.mark.parametrize("stored", [torch.int8, torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtype(cache_with: Any, stored: torch.dtype, dtype: torch.dtype) -> None:
    cache = cache_with(LENGTHS, dtype=stored)
    for given, exact in zip(load(cache, dtype=dtype), truth(cache), strict=True):
        assert given.dtype == dtype
        # at most the rounding of int8's product comes before
        assert_rounded(given, exact, slack=np.finfo(np.float32).eps * largest(exact))


@pytest.mark.parametrize("value", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
@pytest.mark.parametrize("key", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
@pytest.mark.parametrize("granularity", ["token", "token_head", "group"])
def test_fp8_and_int4(
    cache_with: Any, granularity: str, key: torch.dtype, value: torch.dtype
) -> None:
    cache = cache_with(
        LENGTHS, dtype=key, value_dtype=value, granularity=granularity, symmetric=False, dim=40
    )
    for dtype in (torch.float32, torch.bfloat16):
        for given, exact in zip(load(cache, dtype=dtype), truth(cache), strict=True):
            assert given.is_contiguous()
            assert_rounded(given, exact, slack=np.finfo(np.float32).eps * largest(exact))
    assert load(cache)[0].dtype == torch.float32


@pytest.mark.parametrize("granularity", ["layer", "head", "channel"])
def test_static_scales_of_fp8(cache_with: Any, granularity: str) -> None:
    cache = cache_with(LENGTHS, dtype=torch.float8_e4m3fn, granularity=granularity, dim=40)
    for given, exact in zip(load(cache), truth(cache), strict=True):
        assert_within(given, exact, np.finfo(np.float32).eps * largest(exact))


@pytest.mark.parametrize("lengths", [[], [0, 0]])
@pytest.mark.parametrize("stored", [torch.int8, torch.float16])
def test_nothing_cached(cache_with: Any, lengths: list[int], stored: torch.dtype) -> None:
    cache = cache_with(lengths, dtype=stored)
    for given in load(cache):
        assert given.shape == (len(lengths), 2, 0, 64)
        assert given.dtype == (torch.float32 if stored == torch.int8 else stored)


def test_nan_that_is_stored_comes_back_and_no_other(cache_with: Any) -> None:
    cache = cache_with([20, 20])
    cache.scales["value_scale"][int(cache.tables[0, 1]), 1, 3] = math.nan  # token 19, head 1
    key, value = load(cache)
    assert key.isfinite().all()
    assert value[0, 1, 19].isnan().all()
    value[0, 1, 19] = 0.0
    assert value.isfinite().all()


def test_half_overflows_to_infinity(cache_with: Any) -> None:
    cache = cache_with([2], symmetric=True)
    block = int(cache.tables[0, 0])
    cache.scales["key_scale"][block, 0, 1] = 1000.0
    cache.tensors[0][block, 0, 1, :3] = torch.tensor([127, -127, 1])
    key, _ = load(cache, dtype=torch.float16)
    assert key[0, 0, 1, :3].tolist() == [math.inf, -math.inf, 1000.0]


def rotary_table(positions: int, dim: int) -> torch.Tensor:
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(dim // 2) * 2 / dim)
    return torch.stack((angles.cos(), angles.sin()), -1)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("stored", [torch.int8, torch.float32])
def test_key_offset_is_given_back(cache_with: Any, moved: bool, stored: torch.dtype) -> None:
    cache = cache_with([20, 0, 33], dtype=stored, dim=8)
    offset, table = torch.randn(2, 8) * 100, rotary_table(70, 8)
    places = [list(range(length)) for length in cache.kv_lengths]
    options: dict[str, torch.Tensor] = {}
    if moved:
        places = [[2 * place + 1 for place in row] for row in places]
        options["key_positions"] = torch.full(cache.tensors[0].shape[:3], 2**30, dtype=torch.int32)
        for row, length in enumerate(cache.kv_lengths):
            for j in range(length):
                block = int(cache.tables[row, j // 16])
                options["key_positions"][block, :, j % 16] = places[row][j]
    key, value = load(cache, key_offset=offset, rotary_table=table, **options)
    exact_key, exact_value = truth(cache)
    for row, length in enumerate(cache.kv_lengths):
        for n, j in np.ndindex(2, length):
            exact_key[row, n, j] += oracle.rotate(
                offset[n].double().numpy(), places[row][j], table.double().numpy()
            )
    assert_within(key, exact_key, 3 * np.finfo(np.float32).eps * largest(exact_key))
    assert_within(value, exact_value, np.finfo(np.float32).eps * largest(exact_value))


def test_rotation_is_hugging_faces(cache_with: Any) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    cache = cache_with([9], dtype=torch.float32, dim=8)
    offset, table = torch.randn(2, 8), rotary_table(9, 8)
    given, _ = load(cache, key_offset=offset, rotary_table=table)
    plain, _ = load(cache)
    cosine, sine = (torch.cat((x, x), -1)[None] for x in table.unbind(-1))
    expected, _ = llama.apply_rotary_pos_emb(
        offset[None, :, None].expand(1, 2, 9, 8), torch.zeros(1, 2, 9, 8), cosine, sine
    )
    assert_within(given - plain, expected, 1e-6)


def test_opcheck(cache_with: Any, opcheck: Any) -> None:
    for stored, symmetric in ((torch.int8, False), (torch.bfloat16, True)):
        cache = cache_with([20, 0, 5], dtype=stored, symmetric=symmetric, dim=8)
        extras: list[dict[str, Any]] = [
            {},
            {
                "dtype": torch.float16,
                "key_offset": torch.randn(2, 8),
                "rotary_table": rotary_table(20, 8),
            },
        ]
        for extra in extras:
            arguments = (*cache.tensors, cache.tables, cache.kv_lengths)
            opcheck("kv_cache_load", *arguments, **cache.scales, **extra)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("key_cache", {"key_cache": torch.zeros(5, 2, 16 * 64, dtype=torch.int8)}),
        ("value_cache", {"value_cache": torch.zeros(5, 2, 16, 32, dtype=torch.int8)}),
        ("key_scale", {"key_scale": None}),
        ("value_scale", {"value_scale": torch.rand(5, 2)}),
        ("block_tables", {"block_tables": torch.full((2, 3), 5, dtype=torch.int32)}),
        ("block_tables", {"block_tables": torch.zeros(2, 3, dtype=torch.int16)}),
        ("kv_lengths", {"kv_lengths": [20, 49]}),
        ("dtype", {"dtype": torch.float64}),
        ("key_positions", {"key_positions": torch.zeros(5, 2, 16)}),
        ("key_offset", {"rotary_table": torch.zeros(20, 32, 2)}),
        ("rotary_table", {"key_offset": torch.zeros(2, 64)}),
        ("key_offset", {"key_offset": torch.zeros(64), "rotary_table": torch.zeros(20, 32, 2)}),
        (
            "rotary_table",
            {"key_offset": torch.zeros(2, 64), "rotary_table": torch.zeros(19, 32, 2)},
        ),
        *(
            (
                "key_positions",
                {
                    "key_offset": torch.zeros(2, 64),
                    "rotary_table": torch.zeros(20, 32, 2),
                    "key_positions": torch.full((5, 2, 16), position, dtype=torch.int32),
                },
            )
            for position in (-1, 20)
        ),
    ],
)
def test_mistakes_name_the_argument(cache_with: Any, field: str, change: dict[str, Any]) -> None:
    cache = cache_with([20, 5])
    legal = {
        "key_cache": cache.tensors[0],
        "value_cache": cache.tensors[1],
        "block_tables": cache.tables,
        "kv_lengths": [20, 5],
        **cache.scales,
    }
    with pytest.raises(UsageError) as error:
        ops.kv_cache_load(**{**legal, **change})
    assert error.value.field == field


def test_an_offset_wants_pairs_of_channels(cache_with: Any) -> None:
    cache = cache_with([5], dim=41)
    extra = {"key_offset": torch.zeros(2, 41), "rotary_table": torch.zeros(5, 20, 2)}
    with pytest.raises(UsageError) as error:
        ops.kv_cache_load(*cache.tensors, cache.tables, cache.kv_lengths, **cache.scales, **extra)
    assert error.value.field == "key_offset"

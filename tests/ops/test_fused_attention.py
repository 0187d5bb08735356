"""paged_attention through the NPU's fused attention: what comes out, and what was asked of it.

A stand-in takes torch_npu's place: it refuses what the documents forbid and computes the rest in
float64 from the arguments as they are given.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compare import assert_rounded, assert_within, largest
from fused_runs import (
    DECODES,
    HALF,
    MIXED,
    PREFILLS,
    SCALE,
    Run,
    arrange,
    check,
    draw,
    expected,
    int8_cache,
    names,
    tensors_of,
)
from npu_stand_in import StandIn

from ascend_kv.ops import fused_execute
from ascend_kv.ops.fused_attention import FUNCTION, FUNCTION_V2, plan
from ascend_kv.ops.fused_request import request_of, split
from ascend_kv.ops.fused_sources import logical

Tensor = torch.Tensor

# ---- antiquant modes ---------------------------------------------------------------------------

PAIRS = {
    ("token_head", "token_head", True): (5, 5),
    ("token", "token", True): (4, 4),
    ("token", "token_head", True): (3, 3),
    ("token_head", "token", True): (3, 3),
    ("token_head", "token_head", False): (3, 3),
    ("token", "token", False): (1, 1),
    ("layer", "layer", True): (0, 0),
    ("channel", "channel", True): (0, 0),
    ("layer", "channel", True): (0, 0),
    ("head", "head", True): (2, 2),
    ("head", "layer", True): (2, 2),
    ("layer", "layer", False): (0, 0),
    ("channel", "channel", False): (0, 0),
    ("head", "head", False): (2, 2),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("pair", PAIRS)
def test_modes(cache_with: Any, pair: tuple[str, str, bool], dtype: torch.dtype) -> None:
    key, value, symmetric = pair
    queries, lengths = DECODES
    cache = int8_cache(cache_with, lengths, key, value, symmetric=symmetric)
    run = check(cache, draw(queries, 6, 32, dtype), queries)
    assert run.routes == ["paged"]
    told = run.told
    assert (told.get("key_antiquant_mode", 0), told.get("value_antiquant_mode", 0)) == PAIRS[pair]
    assert ("key_antiquant_offset" in told) == (not symmetric and PAIRS[pair][0] in (1, 3))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("key", ["layer", "head", "channel"])
def test_key_channels_with_value_tokens(cache_with: Any, key: str, symmetric: bool) -> None:
    queries, lengths = DECODES
    cache = int8_cache(cache_with, lengths, key, "token", symmetric=symmetric)
    run = check(cache, draw(queries, 4, 32, torch.float16), queries)
    assert run.told["value_antiquant_mode"] == 1 and "key_antiquant_mode" not in run.told
    assert ("value_antiquant_offset" in run.told) == (not symmetric)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("layout", ["BNSD", "NZ"])
def test_groups_of_channels_are_loaded(cache_with: Any, symmetric: bool, layout: str) -> None:
    queries, lengths = MIXED
    options = {"granularity": "group", "symmetric": symmetric, "dim": 64}
    cache = cache_with(lengths, block_size=32, **options)
    query = draw(queries, 4, 64, torch.float16)
    run = check(cache, query, queries, cache_layout=layout)
    assert run.routes == ["loaded", "loaded"]


@pytest.mark.parametrize("granularity", ["token_head", "token", "head"])
def test_scales_by_block_are_loaded(cache_with: Any, granularity: str) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, block_size=32, dim=64, granularity=granularity)
    scales = {**cache.scales, "key_scale": torch.rand(len(cache.tensors[0]), 2, 1, 64) * 0.03}
    query = draw(queries, 4, 64, torch.float16)
    run = check(cache._replace(scales=scales), query, queries)
    assert run.routes == ["loaded", "loaded"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (torch.int8, torch.float16),
        (torch.float16, torch.int8),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
        (torch.uint8, torch.float8_e5m2),
    ],
)
def test_other_types_and_mixtures_are_loaded(
    cache_with: Any, key: torch.dtype, value: torch.dtype
) -> None:
    """The device reads int8 and its query's own type, keys and values alike."""
    queries, lengths = MIXED
    cache = cache_with(lengths, block_size=32, dim=64, dtype=key, value_dtype=value)
    run = check(cache, draw(queries, 4, 64, torch.float16), queries)
    assert run.routes == ["loaded", "loaded"]
    assert "cache type" in names(run.plan.calls[0].fallbacks)


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("granularity", ["token", "token_head", "head", "channel"])
def test_one_side_asymmetric(cache_with: Any, granularity: str, side: str) -> None:
    queries, lengths = DECODES
    cache = int8_cache(cache_with, lengths, granularity, granularity, symmetric=False)
    scales = {name: x for name, x in cache.scales.items() if name != f"{side}_zero_point"}
    run = check(cache._replace(scales=scales), draw(queries, 4, 32, torch.float16), queries)
    assert run.routes == ["paged"]


@pytest.mark.parametrize(("granularity", "mode"), [("token", 1), ("token_head", 3)])
def test_scales_may_be_gathered_instead(cache_with: Any, granularity: str, mode: int) -> None:
    queries, lengths = DECODES
    cache = int8_cache(cache_with, lengths, granularity, granularity)
    query = draw(queries, 4, 32, torch.bfloat16)
    run = check(cache, query, queries, paged_scales=False)
    assert run.told["key_antiquant_mode"] == run.told["value_antiquant_mode"] == mode


def test_constant_rows_come_back_as_they_are(cache_with: Any) -> None:
    """Asymmetric rows of one value have the scale 0, which no offset could be divided by."""
    cache = int8_cache(cache_with, [40], "token_head", "token_head", symmetric=False)
    for side, codes in zip(("key", "value"), cache.tensors, strict=True):
        block = int(cache.tables[0, 0])
        cache.scales[f"{side}_scale"][block, :, 3] = 0
        codes[block, :, 3] = 0
    check(cache, draw([1], 4, 32, torch.float16), [1])


# ---- unquantized, prefill, mixed ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("lengths", [DECODES, PREFILLS, MIXED])
@pytest.mark.parametrize("causal", [True, False])
def test_unquantized(cache_with: Any, lengths: Any, dtype: torch.dtype, causal: bool) -> None:
    cache = cache_with(lengths[1], dtype=dtype, block_size=128, dim=16)
    run = check(cache, draw(lengths[0], 6, 16, dtype), lengths[0], causal=causal)
    assert set(run.routes) == {"paged"} and not any(call.fallbacks for call in run.plan.calls)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("lengths", [PREFILLS, MIXED])
@pytest.mark.parametrize("granularity", ["token_head", "channel"])
def test_prefill_over_a_quantized_prefix(
    cache_with: Any, lengths: Any, dtype: torch.dtype, granularity: str
) -> None:
    cache = int8_cache(cache_with, lengths[1], granularity, granularity, symmetric=False)
    run = check(cache, draw(lengths[0], 4, 32, dtype), lengths[0])
    assert run.routes == (["loaded"] if lengths is PREFILLS else ["paged", "loaded"])
    assert names(run.plan.calls[-1].fallbacks) == ["prefill cache"]


def test_a_mixed_batch_is_two_calls(cache_with: Any) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, dtype=torch.float16, block_size=128, dim=16)
    run = check(cache, draw(queries, 4, 16, torch.float16), queries)
    decode, prefill = (arguments for _, arguments in run.calls)
    assert decode["query"].shape == (4, 4, 1, 16) and "sparse_mode" not in decode
    assert decode["actual_seq_lengths_kv"] == [20, 160, 1, 128]
    assert prefill["query"].shape == (3, 4, 33, 16) and prefill["sparse_mode"] == 3
    assert prefill["actual_seq_lengths"] == [5, 33, 17]
    assert prefill["actual_seq_lengths_kv"] == [5, 140, 130]
    for arguments in (decode, prefill):  # host numbers: nothing has to be fetched from a device
        assert all(type(n) is int for n in arguments["actual_seq_lengths_kv"])


@pytest.mark.parametrize("queries", [[], [0, 0], [1, 0, 3]])
def test_sequences_that_have_nothing(cache_with: Any, queries: list[int]) -> None:
    lengths = [0 if count == 0 else count + 4 for count in queries]
    cache = cache_with(lengths, dtype=torch.float16, block_size=128, dim=16)
    run = check(cache, draw(queries, 2, 16, torch.float16), queries)
    assert len(run.calls) == len({count == 1 for count in queries if count})


def test_a_query_without_keys_is_zero(cache_with: Any) -> None:
    """Only key positions allow it, which the reference serves; but then too no row may be wild."""
    cache = cache_with([0, 5], dtype=torch.float16, block_size=128, dim=16)
    request = request_of(tensors_of(cache, draw([1, 1], 2, 16, torch.float16)), [1, 1], [0, 5], 1.0)
    (part,) = split(request)
    assert part.rows == (1,) and part.spans == ((1, 1),)


def test_strided_input(cache_with: Any) -> None:
    queries, lengths = MIXED
    cache = int8_cache(cache_with, lengths, "token_head", "token_head")
    query = draw(queries, 8, 32, torch.float16)[:, ::2]
    strided = cache._replace(
        tensors=tuple(torch.stack((x, x), 1)[:, 0] for x in cache.tensors),
        scales={name: torch.stack((x, x), 2)[:, :, 0] for name, x in cache.scales.items()},
        tables=torch.stack((cache.tables,) * 2, 2)[..., 0].long(),
    )
    assert not strided.tensors[0].is_contiguous() and not query.is_contiguous()
    wanted, given = Run(cache, query, queries), Run(strided, query, queries)
    assert torch.equal(given.output, wanted.output) and torch.equal(given.lse, wanted.lse)


# ---- windows, sinks, score bias ----------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 5, 32, 33, 300, 1000])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("quantized", [True, False])
def test_windows(cache_with: Any, window: int, causal: bool, quantized: bool) -> None:
    queries, lengths = [1, 5, 1, 33, 1], [50, 137, 320, 140, 1]
    if quantized:
        cache = int8_cache(cache_with, lengths, "token_head", "token_head")
    else:
        cache = cache_with(lengths, dtype=torch.float16, block_size=128, dim=32)
    query = draw(queries, 4, 32, torch.float16)
    run = check(cache, query, queries, window=window, causal=causal)
    decode, prefill = run.calls[0][1], run.calls[1][1]
    assert (prefill["sparse_mode"], prefill["pre_tokens"]) == (4, window - 1)
    assert prefill.get("next_tokens", 2**31 - 1) == (0 if causal else 2**31 - 1)
    size = 32 if quantized else 128
    firsts = [max(0, n - window) // size for n in (50, 320, 1)]
    kept = [n - first * size for n, first in zip((50, 320, 1), firsts, strict=True)]
    assert decode["actual_seq_lengths_kv"] == kept
    assert decode["block_table"].shape[1] == max(-(-n // size) for n in kept)
    assert ("atten_mask" in decode) == any(max(0, n - window) % size for n in (50, 320))
    assert "pse_shift" not in decode


@pytest.mark.parametrize("quantized", [True, False])
def test_a_long_window_is_a_bias(cache_with: Any, quantized: bool) -> None:
    """With a mask at one query the device loses the keys from 512 on, and says nothing."""
    queries, lengths = [1, 1, 1], [700, 90, 640]
    if quantized:
        cache = int8_cache(cache_with, lengths, "token_head", "token_head")
    else:
        cache = cache_with(lengths, dtype=torch.float16, block_size=128, dim=32)
    query = draw(queries, 4, 32, torch.float16)
    run = check(cache, query, queries, window=601)
    assert "atten_mask" not in run.told and run.told["pse_shift"].shape[:3] == (3, 4, 1)
    run = check(cache, query, queries, window=600 + 40)  # hides nothing in the first block kept
    assert ("pse_shift" in run.told) == (60 % (32 if quantized else 128) != 0)
    assert "pse_shift" not in check(cache, query, queries, window=700).told


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("quantized", [True, False])
def test_sinks(cache_with: Any, dtype: torch.dtype, quantized: bool) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, dtype=torch.int8 if quantized else dtype, block_size=128, dim=32)
    sinks = torch.tensor([-3.0, 0.0, 4.5, -math.inf])
    run = check(cache, draw(queries, 4, 32, dtype), queries, sinks=sinks)
    assert not any("learnable_sink" in arguments for _, arguments in run.calls)
    assert all(arguments["softmax_lse_flag"] for _, arguments in run.calls)


def test_sinks_of_sequences_without_keys(cache_with: Any) -> None:
    cache = cache_with([5, 0], dtype=torch.float16, block_size=128, dim=16)
    sinks = torch.tensor([0.5, -1.0])
    tensors = tensors_of(cache, draw([1, 1], 2, 16, torch.float16), sinks=sinks)
    request = request_of(tensors, [1, 1], [5, 0], SCALE)
    output, lse = fused_execute.execute(plan(request), tensors, StandIn())
    assert torch.equal(output[1], torch.zeros(2, 16).half()) and torch.equal(lse[1], sinks)


def device_bias(bias: Tensor, queries: list[int], lengths: list[int], **options: Any) -> Tensor:
    """The bias as the device holds it: less a query's largest, in half, and that given back."""
    held, start = bias.clone(), 0
    window, dtype = options.get("window", 0), options["dtype"]
    for count, length in zip(queries, lengths, strict=True):
        for i in range(count):
            asked = length - count + i
            seen = slice(max(0, asked + 1 - window) if window else 0, asked + 1)
            row = bias[start + i, :, seen]
            most = row.amax(-1, keepdim=True)
            held[start + i, :, seen] = (row - most).to(dtype).float() + most
        start += count
    return held


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("window", [0, 20])
def test_score_bias(cache_with: Any, dtype: torch.dtype, quantized: bool, window: int) -> None:
    queries, lengths = MIXED
    cache = (
        int8_cache(cache_with, lengths, "token_head", "token_head")
        if quantized
        else (cache_with(lengths, dtype=dtype, block_size=128, dim=32))
    )
    query = draw(queries, 4, 32, dtype)
    bias = torch.randn(sum(queries), 4, max(lengths) + 3) * 4 + 500  # far too coarse in half
    options: dict[str, Any] = {"window": window, "sinks": torch.tensor([500.0, 1.0, 0.0, 502.0])}
    held = device_bias(bias, queries, lengths, window=window, dtype=dtype)
    start = 0
    for count, length in zip(queries, lengths, strict=True):  # what no query sees may be anything
        bias[start : start + count, :, length:] = math.nan
        start += count
    run = Run(cache, query, queries, score_bias=bias, **options)
    output, lse = expected(run, cache, query, queries, score_bias=held, **options)
    assert_rounded(run.output, output, torch.finfo(dtype).eps * largest(output))
    assert_within(run.lse, lse, 3e-4)  # float32 at 500
    for _, arguments in run.calls:
        assert arguments["pse_shift"].dtype is dtype
        assert arguments["pse_shift"].isfinite().all() and arguments["pse_shift"].max() <= 0
    assert "atten_mask" not in run.calls[0][1]


def test_a_bias_may_hide_keys_and_everything(cache_with: Any) -> None:
    cache = cache_with([40, 40], dtype=torch.float16, block_size=128, dim=16)
    bias = torch.zeros(4, 2, 40)
    bias[0] = -math.inf
    bias[1, 0] = -math.inf
    bias[1, 1, 3:30] = -math.inf
    bias[3, :, 5] = -math.inf
    run = check(cache, draw([1, 3], 2, 16, torch.float16), [1, 3], score_bias=bias)
    assert torch.equal(run.output[0], torch.zeros(2, 16).half())
    assert torch.isneginf(run.lse[0]).all() and torch.isneginf(run.lse[1, 0])


def test_a_nan_in_the_bias_stays_visible(cache_with: Any) -> None:
    cache = cache_with([40, 40], dtype=torch.float16, block_size=128, dim=16)
    bias = torch.zeros(2, 2, 40)
    bias[0, 1, 7] = math.nan
    run = Run(cache, draw([1, 1], 2, 16, torch.float16), [1, 1], score_bias=bias)
    assert run.output[0, 1].isnan().all() and run.output[0, 0].isfinite().all()
    assert run.output[1].isfinite().all()


# ---- layouts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "NZ"])
def test_layouts_can_be_undone(layout: Any) -> None:
    cache = torch.arange(3 * 2 * 4 * 64).view(3, 2, 4, 64)
    stored = arrange(cache, layout)
    shapes = {"BNSD": (3, 2, 4, 64), "BSND": (3, 4, 2, 64), "NZ": (3, 2, 2, 4, 32)}
    assert stored.shape == shapes[layout] and stored.is_contiguous()
    assert torch.equal(logical(stored, layout), cache)


@pytest.mark.parametrize("quantized", [True, False])
def test_bsnd(cache_with: Any, quantized: bool) -> None:
    queries, lengths = MIXED
    dtype = torch.int8 if quantized else torch.float16
    cache = cache_with(lengths, dtype=dtype, block_size=128, dim=32)
    query = draw(queries, 4, 32, torch.float16)
    run = check(cache, query, queries, cache_layout="BSND", window=50)
    assert run.calls[0][1]["input_layout"] == "BSND"
    assert run.calls[0][1]["key"].shape == (cache.tensors[0].shape[0], 128, 64)
    assert run.routes == ["paged", "loaded" if quantized else "paged"]
    bias = torch.randint(-40, 40, (sum(queries), 4, max(lengths))) / 8.0  # exact in half
    run = check(cache, query, queries, cache_layout="BSND", score_bias=bias)
    assert run.calls[0][1]["key"].dim() == 3 and "pse_shift" in run.calls[0][1]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["layer", "head", "channel", "token"])
@pytest.mark.parametrize("count", [1, 3])
def test_nz(cache_with: Any, granularity: str, symmetric: bool, count: int) -> None:
    """Without log-sum-exp, which the contract does not give."""
    cache = cache_with(
        [200, 3, 128],
        kv_heads=1,
        block_size=128,
        dim=128,
        granularity=granularity,
        symmetric=symmetric,
    )
    queries = [count] * 3
    query = draw(queries, 10, 128, torch.bfloat16)
    run = check(cache, query, queries, cache_layout="NZ", log_sum_exp=False)
    paged = symmetric or granularity != "token"
    assert run.routes == ["paged" if paged else "loaded"]
    assert [name for name, _ in run.calls] == [FUNCTION_V2 if paged else FUNCTION]
    if paged:
        assert run.lse.isnan().all() and run.told["inner_precise"] == 1
        assert run.told.get("sparse_mode", 0) == (0 if count == 1 else 3)
        assert run.told.get("key_quant_mode", 0) == (1 if granularity == "token" else 0)


def test_nz_with_a_log_sum_exp_is_loaded(cache_with: Any) -> None:
    queries, lengths = MIXED
    cache = cache_with(lengths, kv_heads=1, block_size=128, dim=128)
    run = check(cache, draw(queries, 10, 128, torch.bfloat16), queries, cache_layout="NZ")
    assert run.routes == ["loaded", "loaded"]

"""Native CPU operators against their references: the same bytes, whatever the values and threads.

What an operator computes is tested in ``tests/ops``, with either implementation. Here is what only
the native ones could get wrong: bytes at the edges of formats and vectors, how work is cut, and
what they hand to the references.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_calls import bits_of, tolerance
from compare import assert_as_good
from kernel_harness import poison_some, random_values, same
from oracle import round_to_bits

from ascend_kv import ops
from ascend_kv.errors import UsageError
from ascend_kv.formats import FLOAT_DTYPES, format_named, format_of
from ascend_kv.ops import platform, registration
from ascend_kv.ops.registration import REFERENCE_NAMESPACE, has_kernel, operator

Tensor = torch.Tensor
GRANULARITIES = ("layer", "head", "token", "token_head", "channel", "group")

pytestmark = pytest.mark.skipif(
    not has_kernel("paged_attention", "cpu"),
    reason="the native CPU operators are not built here",
)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def both(name: str, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """What the native operator and the reference return."""
    native, reference = operator(name), operator(name, REFERENCE_NAMESPACE)
    return native(*arguments, **options), reference(*arguments, **options)


def draw(shape: tuple[int, ...], dtype: torch.dtype, poison: bool) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + poison)
    x = random_values(generator, shape, dtype)
    return poison_some(generator, x) if poison else x


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("poison", [True, False])
def test_quantize_and_back(
    granularity: str, symmetric: bool, dtype: torch.dtype, poison: bool
) -> None:
    for shape in ((2, 3, 5, 40), (1, 2, 300, 64), (1, 1, 1, 1), (2, 1, 3, 77), (1, 4, 2, 130)):
        group = 0 if granularity != "group" else max(1, shape[3] // 5)
        if group and shape[3] % group:
            continue
        x = draw(shape, dtype, poison)
        native, reference = both("kv_cache_quantize", x, granularity, symmetric, group_size=group)
        for found, expected in zip(native, reference, strict=True):
            same(found, expected)
        for result in FLOAT_DTYPES:
            same(*both("kv_cache_dequantize", *reference, group, result))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("exponent", [-126, -100, 0, 90, 126])
def test_values_on_and_beside_ties_round_as_divided(symmetric: bool, exponent: int) -> None:
    # A product with 1 / scale is a little off the quotient, which shows only beside a tie.
    steps = torch.arange(-126.5, 127.0) if symmetric else torch.arange(-127.5, 127.5)
    rows = []
    for scale in torch.rand(200, generator=torch.Generator().manual_seed(0)) + 1:
        ties = steps * scale
        ties[0], ties[1] = 127 * scale, (-127 if symmetric else -128) * scale
        up, down = (torch.nextafter(ties, torch.tensor(end)) for end in (math.inf, -math.inf))
        rows += [
            ties,
            torch.where(ties == ties[0], ties, up),
            torch.where(ties == ties[0], ties, down),
        ]
    x = torch.stack(rows)[None, None]
    x = x * 2.0**exponent if exponent < 100 else x / 127 * 2.0**exponent
    native, reference = both("kv_cache_quantize", x, "token_head", symmetric)
    for found, expected in zip(native, reference, strict=True):
        same(found, expected)


LOW_BITS = ("fp8_e4m3", "fp8_e5m2", "int4")


def same_bytes(found: Tensor, expected: Tensor) -> None:
    """Codes bit for bit; scales and zero points as ``same``."""
    if found.dtype in (torch.float32, torch.float16):
        same(found, expected)
    else:
        assert found.dtype is expected.dtype
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("storage", LOW_BITS)
def test_quantize_to_fp8_and_int4_and_back(
    storage: str, granularity: str, dtype: torch.dtype
) -> None:
    for poison in (True, False):
        for shape in ((2, 3, 5, 40), (1, 2, 300, 64), (2, 1, 3, 78), (1, 4, 2, 130)):
            group = shape[3] // 5 if granularity == "group" else 0
            if group % 2 or (group and shape[3] % group):
                continue
            x = draw(shape, dtype, poison)
            for symmetric in (True, False) if storage == "int4" else (True,):
                options = {"group_size": group, "storage": storage}
                native, reference = both("kv_cache_quantize", x, granularity, symmetric, **options)
                for found, expected in zip(native, reference, strict=True):
                    same_bytes(found, expected)
                for result in FLOAT_DTYPES:
                    same(*both("kv_cache_dequantize", *reference, group, result))


@pytest.mark.parametrize("storage", LOW_BITS[:2])
def test_every_float_of_16_bits_becomes_the_same_fp8(storage: str) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    for dtype in (torch.float16, torch.bfloat16):
        x = bits.view(dtype)
        x = x[x.isfinite()].view(1, 1, -1, 8)
        for factor in (1.0, 3.7e-3, 2.0**-20, 1e30):
            scale = torch.full((1, 1, 1, 1), factor)
            arguments = (x, "layer", True, scale, None, 0, storage)
            native, reference = both("kv_cache_quantize", *arguments)
            same_bytes(native[0], reference[0])
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 2, 128).view(native[0].dtype)
    same(*both("kv_cache_dequantize", codes, torch.ones(1, 1, 1, 1)))


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("granularity", ["token_head", "token", "group"])
@pytest.mark.parametrize("key", LOW_BITS)
@pytest.mark.parametrize("value", ["int8", *LOW_BITS])
def test_store_and_load_fp8_and_int4(
    key: str, value: str, granularity: str, dtype: torch.dtype
) -> None:
    shape = (9, 3, 24, 40)
    tokens = [draw((50 + i, 3, 40), dtype, True)[:50] for i in range(2)]
    slots = torch.randperm(9 * 24)[:50]
    slots[[3, 17]] = -1
    kinds = {"key": format_named(key), "value": format_named(value)}
    written = []
    for namespace in ("ascend_kv", REFERENCE_NAMESPACE):
        caches = [
            torch.zeros(*shape[:3], 40 // kind.codes_per_element, dtype=torch.uint8).view(
                kind.dtype
            )
            for kind in kinds.values()
        ]
        scales = {
            name: x.to(kinds[name.partition("_")[0]].scale_dtype)
            for name, x in paged(granularity, False, shape).items()
            if name.endswith("scale") or kinds[name.partition("_")[0]].zero_points
        }
        operator("kv_cache_store", namespace)(*tokens, *caches, slots, **scales)
        written.append([*caches, *scales.values()])
    for found, expected in zip(*written, strict=True):
        same_bytes(found, expected)
    tables, lengths = torch.randperm(9).view(3, 3), [72, 0, 49]
    for result in FLOAT_DTYPES:
        loaded = both("kv_cache_load", *caches, tables, lengths, **scales, dtype=result)
        for found, expected in zip(*loaded, strict=True):
            same(found, expected)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_quantize_with_given_scales(granularity: str, symmetric: bool) -> None:
    group = 8 if granularity == "group" else 0
    x = draw((2, 3, 5, 40), torch.float16, False)
    _, scale, zero_point = operator("kv_cache_quantize")(
        draw((2, 3, 5, 40), torch.float32, False), granularity, symmetric, group_size=group
    )
    given = (x, granularity, symmetric, scale, None if symmetric else zero_point, group)
    for found, expected in zip(*both("kv_cache_quantize", *given), strict=True):
        same(found, expected)


def paged(granularity: str, symmetric: bool, shape: tuple[int, ...]) -> dict[str, Tensor]:
    blocks, heads, size, dim = shape
    scale = {
        "token_head": (blocks, heads, size),
        "token": (blocks, 1, size),
        "group": (blocks, heads, size, dim // 8),
    }[granularity]
    names = ("scale",) if symmetric else ("scale", "zero_point")
    return {f"{s}_{n}": torch.full(scale, math.nan) for s in ("key", "value") for n in names}


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["token_head", "token", "group"])
def test_store_and_load(granularity: str, symmetric: bool, dtype: torch.dtype) -> None:
    shape = (9, 3, 24, 40)
    key, value = (draw((50 + i, 3, 40), dtype, True)[:50] for i in range(2))
    slots = torch.randperm(9 * 24)[:50]
    slots[[3, 17]] = -1
    written = []
    for namespace in ("ascend_kv", REFERENCE_NAMESPACE):
        caches = [torch.zeros(shape, dtype=torch.int8) for _ in range(2)]
        scales = paged(granularity, symmetric, shape)
        operator("kv_cache_store", namespace)(key, value, *caches, slots, **scales)
        written.append([*caches, *scales.values()])
    for found, expected in zip(*written, strict=True):
        same(found, expected)
    tables, lengths = torch.randperm(9).view(3, 3), [72, 0, 49]
    for result in FLOAT_DTYPES:
        loaded = both("kv_cache_load", *caches, tables, lengths, **scales, dtype=result)
        for found, expected in zip(*loaded, strict=True):
            same(found, expected)


@pytest.mark.parametrize("stored", FLOAT_DTYPES)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_store_unquantized(stored: torch.dtype, dtype: torch.dtype) -> None:
    key, value = (draw((33 + i, 2, 77), dtype, True)[:33] for i in range(2))
    slots = torch.randperm(5 * 16)[:33]
    written = []
    for namespace in ("ascend_kv", REFERENCE_NAMESPACE):
        caches = [torch.zeros(5, 2, 16, 77, dtype=stored) for _ in range(2)]
        operator("kv_cache_store", namespace)(key, value, *caches, slots)
        written.append(caches)
    for found, expected in zip(*written, strict=True):
        same(found, expected)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_slot_named_twice_holds_one_token_whole(
    threads: Callable[[int], None], count: int
) -> None:
    threads(count)
    tokens, slots = 4096, torch.randint(0, 32, (4096,))
    key = torch.arange(1, tokens + 1).view(-1, 1, 1).expand(-1, 2, 64).float()
    caches = [torch.zeros(2, 2, 16, 64, dtype=torch.int8) for _ in range(2)]
    scales = paged("token_head", True, (2, 2, 16, 64))
    ops.kv_cache_store(key, key, *caches, slots, **scales)
    last = {int(slot): token + 1 for token, slot in enumerate(slots.tolist())}
    for slot, number in last.items():
        place = slot // 16, slice(None), slot % 16
        assert torch.equal(scales["key_scale"][place], torch.full((2,), number / 127))
        assert torch.equal(scales["value_scale"][place], torch.full((2,), number / 127))
        assert caches[0][place].eq(127).all() and caches[1][place].eq(127).all()


def attention_case(
    dtype: torch.dtype, lengths: list[int], kv_heads: int = 2, dim: int = 40
) -> tuple[list[Any], dict[str, Tensor]]:
    """Caches, tables and scales of sequences in shuffled blocks of 16."""
    counts = [-(-length // 16) for length in lengths]
    shape = (sum(counts) + 1, kv_heads, 16, dim)
    scales: dict[str, Tensor] = {}
    kind = format_of(dtype)
    if kind.quantized:
        vectors = torch.randn(2, *shape)
        encoded = [kind.encode(x, (3,), not kind.zero_points) for x in vectors]
        caches = [x.codes for x in encoded]
        for side, x in zip(("key", "value"), encoded, strict=True):
            scales[f"{side}_scale"] = x.scale.squeeze(-1)
            if x.zero_point is not None:
                scales[f"{side}_zero_point"] = x.zero_point.squeeze(-1)
    else:
        caches = [torch.randn(shape).to(dtype) for _ in range(2)]
    free = torch.randperm(shape[0]).tolist()
    tables = torch.full((len(lengths), max(counts)), -1)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([free.pop() for _ in range(count)])
    return [*caches, tables], scales


# decodes, prefills and chunks; 2500 and 5000 tokens are cut into parts
LENGTHS = [5000, 1, 2500, 64, 65, 300]
QUERIES = [1, 1, 40, 64, 1, 7]


CACHES = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8]


@pytest.mark.parametrize("dtype", [*CACHES, *FLOAT_DTYPES])
@pytest.mark.parametrize("group", [1, 3, 9])
def test_long_sequences_are_exact(dtype: torch.dtype, group: int) -> None:
    tensors, scales = attention_case(dtype, LENGTHS)
    query = torch.randn(sum(QUERIES), 2 * group, 40)
    options = {**scales, "sinks": torch.randn(2 * group), "window": 4000}
    call = (*tensors, QUERIES, LENGTHS)
    exact = _attention(query.double(), *call, torch.float64, **options)
    bits = bits_of(tensors[0], None)
    naive = _attention(query, *call, torch.float32, bits, **options)
    found = ops.paged_attention(query, *tensors, QUERIES, LENGTHS, 40**-0.5, **options)
    for result, truth, baseline in zip(found, exact, naive, strict=True):
        assert_as_good(result, truth, baseline)


def _round_to_bits(rows: Tensor, bits: int | None) -> Tensor:
    return torch.from_numpy(round_to_bits(rows.numpy(), bits))


def _attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tables: Tensor,
    query_lengths: list[int],
    kv_lengths: list[int],
    dtype: torch.dtype,
    bits: int | None = None,
    *,
    sinks: Tensor,
    window: int,
    **scales: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attention by dense matrices, sequence by sequence; queries and weights of so many bits."""
    query = _round_to_bits(query, bits)
    outputs, sums, start = [], [], 0
    heads = query.shape[1]
    for row, (queries, length) in enumerate(zip(query_lengths, kv_lengths, strict=True)):
        blocks = tables[row, : -(-length // 16)]
        sides = []
        for name, cache in (("key", key_cache), ("value", value_cache)):
            values = format_of(cache.dtype).codes_as_floats(cache[blocks]).to(dtype)
            if scales:
                values = values * scales[f"{name}_scale"][blocks].to(dtype)[..., None]
            if f"{name}_zero_point" in scales:
                values = values + scales[f"{name}_zero_point"][blocks].to(dtype)[..., None]
            dense = values.transpose(0, 1).flatten(1, 2)[:, :length]
            sides.append(dense.repeat_interleave(heads // dense.shape[0], 0))
        part = query[start : start + queries].transpose(0, 1).to(dtype)
        scores = part @ sides[0].mT * 40**-0.5
        distance = torch.arange(length - queries, length)[:, None] - torch.arange(length)
        scores = scores.masked_fill((distance < 0) | (distance >= window), -math.inf)
        sink = sinks.to(dtype)[:, None, None].expand(-1, queries, 1)
        joined = torch.cat((scores, sink), -1)
        sizes = sides[1].abs().amax(-1)[:, None]
        weights = _round_to_bits(joined.softmax(-1)[..., :-1] * sizes, bits) / sizes
        outputs.append((weights @ sides[1]).transpose(0, 1))
        sums.append(joined.logsumexp(-1).transpose(0, 1))
        start += queries
    return torch.cat(outputs), torch.cat(sums)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 14])
@pytest.mark.parametrize("dim", [1, 15, 17, 63, 64, 80, 128, 130, 300])
def test_query_heads_that_share_int8_keys(group: int, dim: int) -> None:
    lengths = [1, 15, 17, 33, 64, 1100, 0]
    tensors, scales = attention_case(torch.int8, lengths, dim=dim)
    for scale in scales.values():  # of tokens that are not there
        scale[tensors[2][2, 1], :, 1:] = math.nan
    query_lengths = [1] * 6 + [0]
    query = torch.randn(sum(query_lengths), 2 * group, dim)
    options = {**scales, "sinks": torch.randn(2 * group), "window": 1050}
    call = (query, *tensors, query_lengths, lengths, dim**-0.5)
    native, reference = both("paged_attention", *call, **options)
    for found, expected in zip(native, reference, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance(), atol=tolerance())


@pytest.mark.parametrize("hidden", [slice(0, 1500), slice(1500, 3000), slice(0, 3000)])
def test_parts_of_which_nothing_is_seen(hidden: slice) -> None:
    tensors, scales = attention_case(torch.float32, [3000], dim=64)
    bias = torch.randn(2, 4, 3000)
    bias[0, :, hidden] = -math.inf
    call = (torch.randn(2, 4, 64), *tensors, [2], [3000], 0.125)
    native, reference = both("paged_attention", *call, **scales, score_bias=bias)
    for found, expected in zip(native, reference, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.isinf(native[1][0]).all() == (hidden == slice(0, 3000))


def test_the_same_bits_for_any_number_of_threads(threads: Callable[[int], None]) -> None:
    cases = [attention_case(dtype, LENGTHS) for dtype in CACHES]
    query = torch.randn(sum(QUERIES), 6, 40)
    x = torch.randn(2, 3, 700, 64)
    frequencies = torch.rand(20, dtype=torch.float64)
    offset = {"key_offset": torch.randn(2, 40), "rotary_frequencies": frequencies}
    gate, lengths = torch.randn(2000, 48), [900, 1100]
    results: list[list[Tensor]] = []
    for count in (1, 2, 3, 7):
        threads(count)
        found: list[Tensor] = []
        for tensors, scales in cases:
            found += ops.paged_attention(query, *tensors, QUERIES, LENGTHS, 0.2, **scales)
            found += ops.kv_cache_load(*tensors, LENGTHS, **scales)
        found += ops.paged_attention(query, *tensors, QUERIES, LENGTHS, 0.2, **scales, **offset)
        for granularity in ("layer", "head", "token", "channel"):
            found += ops.kv_cache_quantize(x, granularity, False)
            found += ops.kv_cache_quantize(x, granularity, False, storage="int4")
            codes = ops.kv_cache_quantize(x, granularity, storage="fp8_e4m3")[0]
            found.append(codes.view(torch.uint8))
        found.append(ops.hca_compress(gate, gate.flip(0), lengths, 8, overlap=True))
        results.append(found)
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [*CACHES, torch.float16])
def test_a_sequence_does_not_notice_the_others(dtype: torch.dtype) -> None:
    tensors, scales = attention_case(dtype, LENGTHS)
    query = torch.randn(sum(QUERIES), 6, 40)
    together, sums = ops.paged_attention(query, *tensors, QUERIES, LENGTHS, 0.2, **scales)
    start = 0
    for row, (queries, length) in enumerate(zip(QUERIES, LENGTHS, strict=True)):
        part = slice(start, start + queries)
        alone = (query[part], *tensors[:2], tensors[2][row : row + 1], [queries], [length], 0.2)
        output, sum_alone = ops.paged_attention(*alone, **scales)
        assert torch.equal(output, together[part]) and torch.equal(sum_alone, sums[part])
        start += queries


def test_what_is_not_served_goes_to_the_reference() -> None:
    """Lists of entries, and caches whose channels do not lie side by side."""
    tensors, scales = attention_case(torch.int8, [40, 33])
    query = torch.randn(2, 4, 40)
    entries = torch.tensor([[3, 39, -1], [0, 32, 7]], dtype=torch.int32)
    call = (query, *tensors, [1, 1], [40, 33], 0.2)
    for found, expected in zip(
        *both("paged_attention", *call, **scales, entries=entries), strict=True
    ):
        assert torch.equal(found, expected)
    turned = [x.mT.contiguous().mT for x in tensors[:2]]
    assert turned[0].stride(3) != 1
    plain = operator("paged_attention", REFERENCE_NAMESPACE)(*call, **scales)
    found = ops.paged_attention(query, *turned, *call[3:], **scales)
    assert torch.equal(found[0], plain[0])
    slots = torch.tensor([3, 17])
    stores: list[list[Tensor]] = []
    for caches in (turned, tensors[:2]):
        ops.kv_cache_store(query[:, :2], query[:, 2:], *caches, slots, **scales)
        stores.append([*caches, *(x.clone() for x in scales.values())])
    for one, other in zip(*stores, strict=True):
        same(one, other)


def test_what_the_reference_serves_is_told_once_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "_handed_over", Counter())
    tensors, scales = attention_case(torch.int8, [40, 33])
    call = (torch.randn(2, 4, 40), *tensors, [1, 1], [40, 33], 0.2)
    entries = torch.tensor([[3, 39, -1], [0, 32, 7]], dtype=torch.int32)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            ops.paged_attention(*call, **scales, entries=entries)
        ops.paged_attention(*call, **scales)
        wrong = tensors[2] + 1000
        with pytest.raises(UsageError):
            ops.paged_attention(*call[:3], wrong, *call[4:], **scales)
    assert [record.message for record in caplog.records] == [
        "paged_attention: the reference serves, no kernel on cpu does: lists of entries"
    ]
    served = platform.implementations("cpu")
    assert served["paged_attention"] == "native; reference for lists of entries (3 calls)"
    assert served["kv_cache_store"] == "native"

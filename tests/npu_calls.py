"""Calls the NPU's host functions with CPU tensors, kernels on the twin; a process of its own.

    python tests/npu_calls.py LIBRARY

A registration is for good, and the twin needs to know all memory from the start. Every function
``check_*`` runs; the first failure ends the process with its traceback.
"""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import torch

from ascend_kv import ops
from ascend_kv.ops import platform
from ascend_kv.ops.registration import handed_over

torch.ops.load_library(sys.argv[1])

NPU = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
draw = random.Random(0)


def npu(name: str, *args: Any, **kwargs: Any) -> Any:
    """The operator as the dispatcher calls it for tensors of an NPU."""
    return getattr(torch.ops.ascend_kv, name).default.redispatch(NPU, *args, **kwargs)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit by bit but for signs of zero; NaN equals NaN."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found.nan_to_num(7e4), expected.nan_to_num(7e4))


def refuses(field: str, given: str, name: str, *args: Any, **kwargs: Any) -> None:
    """A ValueError that begins with the argument's name and says what was given."""
    try:
        npu(name, *args, **kwargs)
    except ValueError as error:
        said = str(error).splitlines()[0]
        assert said.startswith(f"{field}: got ") and given in said and "; legal: " in said, said
        return
    raise AssertionError(f"{name} takes a wrong {field}")


def kernels_served(*names: str) -> None:
    """No call was handed over to a reference so far."""
    assert not any(handed_over(name, "npu") for name in names)


def kept_reference(name: str, reason: str, before: dict[str, int]) -> None:
    """Exactly this reason was counted since."""
    now = handed_over(name, "npu")
    assert {r: n - before.get(r, 0) for r, n in now.items() if n != before.get(r, 0)} == {
        reason: 1
    }, now


# --- quantize and dequantize


def check_quantize_and_back() -> None:
    kinds = ("layer", "head", "token", "token_head", "channel", "group")
    for kind, symmetric, dtype in itertools.product(kinds, (True, False), FLOATS):
        shape = draw.choice([(2, 3, 5, 64), (1, 2, 130, 40), (1, 1, 900, 128)])
        x = torch.randn(shape).to(dtype)
        if draw.random() < 0.5:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        group = 8 if kind == "group" else 0
        found = npu("kv_cache_quantize", x, kind, symmetric, None, None, group)
        expected = ops.kv_cache_quantize(x, kind, symmetric, group_size=group)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
        codes, scale, zero_point = expected
        zeros = draw.choice([None, zero_point]) if symmetric else zero_point
        back = npu("kv_cache_dequantize", codes, scale, zeros, group, dtype)
        same(back, ops.kv_cache_dequantize(codes, scale, zeros, group, dtype))
    kernels_served("kv_cache_quantize", "kv_cache_dequantize")


def check_given_scales() -> None:
    x = torch.randn(2, 3, 5, 64)
    shapes = ((1, 1, 1, 1), (2, 3, 1, 1), (1, 3, 1, 64), (1, 1, 5, 1), (1, 1, 1, 64))
    for shape, kind in zip(shapes, ("head", "head", "channel", "token", "channel"), strict=True):
        scale, zero_point = torch.rand(shape) * 0.02, torch.randn(shape)
        for zeros in (None, zero_point):
            found = npu("kv_cache_quantize", x, kind, zeros is None, scale, zeros)
            expected = ops.kv_cache_quantize(x, kind, zeros is None, scale, zeros)
            for one, other in zip(found, expected, strict=True):
                same(one, other)
            assert found[1].data_ptr() != scale.data_ptr()
            back = npu("kv_cache_dequantize", found[0], scale, zeros)
            same(back, ops.kv_cache_dequantize(found[0], scale, zeros))
    kernels_served("kv_cache_quantize", "kv_cache_dequantize")


def check_quantize_nothing_and_too_much() -> None:
    for shape, symmetric in itertools.product(((2, 3, 0, 8), (0, 3, 4, 8)), (True, False)):
        found = npu("kv_cache_quantize", torch.empty(shape), "head", symmetric)
        expected = ops.kv_cache_quantize(torch.empty(shape), "head", symmetric)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
        same(npu("kv_cache_dequantize", *found[:2]), torch.empty(shape))
    x = torch.randn(1, 1, 2, 100_000)
    before = handed_over("kv_cache_quantize", "npu")
    same(npu("kv_cache_quantize", x, "channel")[0], ops.kv_cache_quantize(x, "channel")[0])
    kept_reference("kv_cache_quantize", "head_dim too large for the unified buffer", before)
    codes, scale = torch.ones(1, 2, 3, 8, dtype=torch.int8), torch.rand(1, 2, 3, 8)
    before = handed_over("kv_cache_dequantize", "npu")
    same(npu("kv_cache_dequantize", codes, scale), ops.kv_cache_dequantize(codes, scale))
    kept_reference("kv_cache_dequantize", "scales that differ by token and channel", before)


def check_quantize_refuses() -> None:
    x, scale = torch.randn(2, 3, 5, 64), torch.ones(2, 3, 1, 1)
    name = "kv_cache_quantize"
    refuses("x", "[3, 5, 64]", name, x[0], "head")
    refuses("x", "Double", name, x.double(), "head")
    refuses("granularity", "heads", name, x, "heads")
    refuses("group_size", "7", name, x, "group", True, None, None, 7)
    refuses("group_size", "8", name, x, "head", True, None, None, 8)
    refuses("scale", "[2, 3, 1, 64]", name, x, "head", True, torch.ones(2, 3, 1, 64))
    refuses("scale", "Half", name, x, "head", True, scale.half())
    refuses("zero_point", "[2, 3, 1, 1]", name, x, "head", True, scale, scale)
    refuses("zero_point", "None", name, x, "head", False, scale)
    refuses("zero_point", "[2, 3]", name, x, "head", False, scale, scale[..., 0, 0])
    codes = torch.zeros(2, 3, 5, 64, dtype=torch.int8)
    name = "kv_cache_dequantize"
    refuses("codes", "[5, 64]", name, codes[0, 0], scale)
    refuses("codes", "Float", name, x, scale)
    refuses("dtype", "Double", name, codes, scale, None, 0, torch.float64)
    refuses("group_size", "5", name, codes, scale, None, 5)
    refuses("scale", "[2, 2, 1, 1]", name, codes, scale[:, :2])
    refuses("zero_point", "[2, 3, 5, 1]", name, codes, scale, torch.ones(2, 3, 5, 1))
    refuses("scale", "meta", name, codes, scale.to("meta"))


# --- the paged cache


def paged(kind: str, blocks: int, heads: int, size: int, dim: int) -> torch.Tensor | None:
    """Scales of a cache, written by nobody yet."""
    shapes = {
        "token_head": (blocks, heads, size),
        "token": (blocks, 1, size),
        "static": draw.choice([(1, heads, 1, dim), (1, 1, 1, dim), (1, heads, 1, 1), (1, 1, 1, 1)]),
        "group": (blocks, heads, size, 2),
    }
    return torch.rand(shapes[kind]) * 0.05 if kind in shapes else None


class Cache:
    """Both sides of a paged cache; a kind is one of scales, or the name of a float type."""

    def __init__(self, kinds: tuple[str, str], symmetric: tuple[bool, bool], dim: int = 64) -> None:
        self.shape = (6, draw.choice([1, 3]), 16, dim)
        self.arguments: dict[str, Any] = {}
        self.sides = []
        for side, kind, plain in zip(("key", "value"), kinds, symmetric, strict=True):
            scale = paged(kind, *self.shape)
            dtype = torch.int8 if scale is not None else getattr(torch, kind)
            self.sides.append(torch.zeros(self.shape, dtype=dtype))
            self.arguments[f"{side}_scale"] = scale
            if scale is not None and not plain:
                self.arguments[f"{side}_zero_point"] = torch.randn(scale.shape)

    def copy(self) -> Cache:
        other = Cache.__new__(Cache)
        other.shape, other.sides = self.shape, [s.clone() for s in self.sides]
        other.arguments = {k: None if v is None else v.clone() for k, v in self.arguments.items()}
        return other

    def equals(self, other: Cache) -> None:
        for one, two in zip(self.sides, other.sides, strict=True):
            same(one, two)
        for name, value in self.arguments.items():
            if value is not None:
                same(value, other.arguments[name])


KINDS = ("token_head", "token", "static", "float16", "bfloat16", "float32")


def new_tokens(cache: Cache, dtype: torch.dtype, tokens: int = 9) -> list[torch.Tensor]:
    """Keys and values as a projection leaves them: side by side in one tensor, or apart."""
    _, heads, _, dim = cache.shape
    packed = torch.randn(tokens, 2, heads, dim).to(dtype)
    form = draw.randrange(3)
    if form == 0:
        return [packed[:, 0], packed[:, 1]]
    if form == 1:
        return [x.transpose(0, 1).contiguous().transpose(0, 1) for x in packed.unbind(1)]
    return [x.contiguous() for x in packed.unbind(1)]


def slots(tokens: int = 9) -> torch.Tensor:
    chosen = torch.randperm(96)[:tokens]
    chosen[3 % max(tokens, 1) :: 4] = -1
    return chosen.to(draw.choice([torch.int32, torch.int64]))


def check_store_and_load() -> None:
    for kinds in itertools.product(KINDS, KINDS):
        # `dynamic` belongs to both sides.
        if "static" in kinds and not {"token", "token_head"}.isdisjoint(kinds):
            continue
        symmetric = (draw.random() < 0.5, draw.random() < 0.5)
        cache = Cache(kinds, symmetric)
        reference = cache.copy()
        key, value = new_tokens(cache, draw.choice(FLOATS))
        where, dynamic = slots(), "static" not in kinds
        positions: dict[str, Any] = {}
        expected: dict[str, Any] = {}
        if draw.random() < 0.5:
            numbers = torch.arange(9).to(draw.choice([torch.int32, torch.int64]))
            target = torch.zeros(cache.shape[:3], dtype=torch.int32)
            positions = {"key_positions": target, "positions": numbers}
            expected = {"key_positions": target.clone(), "positions": numbers}
        ops.kv_cache_store(
            key, value, *reference.sides, where, dynamic=dynamic, **reference.arguments, **expected
        )
        npu("kv_cache_store", key, value, *cache.sides, where, dynamic=dynamic,
            **cache.arguments, **positions)  # fmt: skip
        cache.equals(reference)
        if positions:
            same(positions["key_positions"], expected["key_positions"])
        load(cache, draw.random() < 0.5)
    kernels_served("kv_cache_store", "kv_cache_load")


def load(cache: Cache, offset: bool) -> None:
    _, heads, _, dim = cache.shape
    lengths = [20, 0, 33]
    tables = torch.tensor([[1, 0, 5], [9, 9, 9], [2, 4, 3]])
    tables = tables.to(draw.choice([torch.int32, torch.int64]))
    arguments = {**cache.arguments, "dtype": draw.choice([None, *FLOATS])}
    if offset:
        arguments["key_offset"] = torch.randn(heads, dim).to(draw.choice(FLOATS))
        arguments["rotary_table"] = torch.rand(40, dim // 2, 2).to(draw.choice(FLOATS))
        if draw.random() < 0.5:
            positions = torch.randint(0, 40, cache.shape[:3], dtype=torch.int32)
            arguments["key_positions"] = positions
    found = npu("kv_cache_load", *cache.sides, tables, lengths, **arguments)
    for one, other in zip(
        found, ops.kv_cache_load(*cache.sides, tables, lengths, **arguments), strict=True
    ):
        same(one, other)


def check_load_many_sequences() -> None:
    """More lengths than one launch carries."""
    cache = Cache(("float16", "float16"), (True, True), 16)
    for side in cache.sides:
        side.normal_()
    lengths = [i % 17 for i in range(300)]
    tables = torch.randint(0, 6, (300, 2))
    found = npu("kv_cache_load", *cache.sides, tables, lengths)
    for one, other in zip(found, ops.kv_cache_load(*cache.sides, tables, lengths), strict=True):
        same(one, other)


def check_paged_nothing() -> None:
    cache = Cache(("token", "float16"), (True, True))
    before = cache.copy()
    key, value = new_tokens(cache, torch.float16, 0)
    npu("kv_cache_store", key, value, *cache.sides, slots(0), **cache.arguments)
    cache.equals(before)
    empty = torch.empty(1, 0, dtype=torch.int32)
    for result in npu("kv_cache_load", *cache.sides, empty, [0], **cache.arguments):
        assert result.shape[2] == 0


def check_paged_reference() -> None:
    """What no kernel serves comes out right, and with its reason."""
    reasons = [
        (("group", "token"), True, "scales by group of channels"),
        (("float16", "token_head"), False, "static scales read at the slots"),
    ]
    for kinds, dynamic, reason in reasons:
        cache = Cache(kinds, (True, True))
        reference = cache.copy()
        key, value = new_tokens(cache, torch.float32)
        where = slots()
        before = handed_over("kv_cache_store", "npu")
        npu("kv_cache_store", key, value, *cache.sides, where, dynamic=dynamic, **cache.arguments)
        kept_reference("kv_cache_store", reason, before)
        ops.kv_cache_store(
            key, value, *reference.sides, where, dynamic=dynamic, **reference.arguments
        )
        cache.equals(reference)
    cache = Cache(("group", "token"), (True, True))
    before = handed_over("kv_cache_load", "npu")
    load(cache, False)
    kept_reference("kv_cache_load", "scales by group of channels", before)
    cache = Cache(("token", "token"), (True, True), 24)
    before = handed_over("kv_cache_load", "npu")
    load(cache, True)
    reason = "key_offset with a head_dim that is not a multiple of 16"
    kept_reference("kv_cache_load", reason, before)
    apart = torch.zeros(6, 2, 3, 16, 64, dtype=torch.float16)
    key = torch.randn(9, 3, 64)
    before = handed_over("kv_cache_store", "npu")
    npu("kv_cache_store", key, key, apart[:, 0], apart[:, 1], torch.arange(9))
    kept_reference("kv_cache_store", "a cache or scales that are not contiguous", before)
    assert torch.equal(apart[0, 1, :, :9], key.transpose(0, 1).half())
    huge = torch.zeros(1, 1, 1, 100_000, dtype=torch.float16)
    before = handed_over("kv_cache_store", "npu")
    npu("kv_cache_store", huge[0] + 1, huge[0] + 2, huge, huge.clone(), torch.tensor([0]))
    kept_reference("kv_cache_store", "a token too large for the unified buffer", before)
    told = platform.implementations("npu")["kv_cache_store"]
    assert told.startswith("native; reference for ") and "by group of channels (1 calls)" in told


def check_store_refuses() -> None:
    name = "kv_cache_store"
    cache = torch.zeros(6, 3, 16, 64, dtype=torch.int8)
    key, where, scale = torch.randn(2, 3, 64), torch.tensor([0, 1]), torch.ones(6, 3, 16)
    static = torch.ones(1, 3, 1, 1)
    good = {"key_scale": scale, "value_scale": scale.clone()}

    def store(field: str, given: str, **changes: Any) -> None:
        given_all = {
            "key": key, "value": key, "key_cache": cache, "value_cache": cache.clone(),
            "slot_mapping": where, **good, **changes,
        }  # fmt: skip
        refuses(field, given, name, **given_all)

    store("key_cache", "[3, 16, 64]", key_cache=cache[0])
    store("value_cache", "[5, 3, 16, 64]", value_cache=cache[:5])
    store("key_cache", "Short", key_cache=cache.short())
    store("key", "[2, 64]", key=key[:, 0])
    store("key", "[2, 2, 64]", key=key[:, :2])
    store("value", "[1, 3, 64]", value=key[:1])
    store("value", "Double", value=key.double())
    store("slot_mapping", "[1]", slot_mapping=where[:1])
    store("slot_mapping", "Float", slot_mapping=where.float())
    store("slot_mapping", "meta", slot_mapping=where.to("meta"))
    store("key_scale", "None", key_scale=None)
    store("key_scale", "[6, 2, 16]", key_scale=scale[:, :2])
    store("key_scale", "Half", key_scale=scale.half())
    store("value_scale", "[6, 3, 16, 7]", value_scale=torch.ones(6, 3, 16, 7))
    store("value_zero_point", "[6, 1, 16]", value_zero_point=scale[:, :1])
    store("value_scale", "a tensor", value_cache=cache.half())
    store("dynamic", "1", key_scale=static)
    store("positions", "None", key_positions=torch.zeros(6, 3, 16, dtype=torch.int32))
    store("key_positions", "None", positions=where)
    paired = {"positions": where, "key_positions": torch.zeros(6, 3, 16, dtype=torch.int32)}
    store("positions", "[1]", **{**paired, "positions": where[:1]})
    store("positions", "Float", **{**paired, "positions": where.float()})
    store("key_positions", "[6, 3, 15]", **{**paired, "key_positions": scale[:, :, :15].int()})
    store("key_positions", "Float", **{**paired, "key_positions": scale})


def check_load_refuses() -> None:
    name = "kv_cache_load"
    cache = torch.zeros(6, 3, 16, 64)
    tables = torch.zeros(2, 3, dtype=torch.int32)
    offset, rotary = torch.zeros(3, 64), torch.zeros(48, 32, 2)

    def load_with(field: str, given: str, **changes: Any) -> None:
        given_all = {
            "key_cache": cache, "value_cache": cache.clone(), "block_tables": tables,
            "kv_lengths": [48, 3], **changes,
        }  # fmt: skip
        refuses(field, given, name, **given_all)

    load_with("block_tables", "[3]", block_tables=tables[0])
    load_with("block_tables", "[2, 3]", kv_lengths=[3])
    load_with("block_tables", "Float", block_tables=tables.float())
    load_with("kv_lengths", "49", kv_lengths=[49, 3])
    load_with("kv_lengths", "-1", kv_lengths=[4, -1])
    load_with("dtype", "Int", dtype=torch.int32)
    load_with("key_offset", "None", rotary_table=rotary)
    load_with("rotary_table", "None", key_offset=offset)
    load_with("key_offset", "[2, 64]", key_offset=offset[:2], rotary_table=rotary)
    load_with("rotary_table", "[47, 32, 2]", key_offset=offset, rotary_table=rotary[:47])
    load_with("rotary_table", "Int", key_offset=offset, rotary_table=rotary.int())
    load_with("key_positions", "Float", key_positions=torch.zeros(6, 3, 16))


# --- compression


def check_compress() -> None:
    shapes = itertools.product((1, 2, 4, 128), (False, True), (64, 72, 512))
    for ratio, overlap, dim in shapes:
        batch = draw.choice([1, 3, 40])
        lengths = [draw.randrange(0, 3 * ratio + 2) for _ in range(batch)]
        lengths[0] = 2 * ratio + 1
        channels = 2 * dim if overlap else dim
        dtype, tokens = draw.choice(FLOATS), sum(lengths)
        kv, gate = torch.randn(2, tokens, channels).to(dtype)
        firsts = [draw.choice([0, 1, 5]) for _ in lengths]
        arguments: dict[str, Any] = {"overlap": overlap, "norm_eps": 1e-3}
        arguments["dtype"] = draw.choice([None, *FLOATS])
        if draw.random() < 0.7:
            arguments["position_bias"] = torch.randn(ratio, channels).to(draw.choice(FLOATS))
        if draw.random() < 0.7:
            arguments["norm_weight"] = torch.randn(dim).to(draw.choice(FLOATS))
        if draw.random() < 0.7:
            arguments["first_windows"] = firsts
            if overlap:
                before = torch.randn(2, batch, ratio, dim).to(dtype)
                arguments["previous_kv"], arguments["previous_gate"] = before
        if draw.random() < 0.7:
            arguments["rotary_dim"] = 8
            arguments["rotary_table"] = torch.rand(9 * ratio, 4, 2).to(draw.choice(FLOATS))
        found = npu("hca_compress", kv, gate, lengths, ratio, **arguments)
        expected = ops.hca_compress(kv, gate, lengths, ratio, **arguments)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        # float32 sums in another order, then one rounding
        exact = ops.hca_compress(
            kv.float(), gate.float(), lengths, ratio,
            **{**arguments, "dtype": torch.float32,
               **{n: arguments[n].float() for n in ("previous_kv", "previous_gate")
                  if n in arguments}},
        )  # fmt: skip
        size = exact.abs().amax(-1, keepdim=True)
        eps = torch.finfo(found.dtype).eps
        assert ((found.float() - exact).abs() <= 1e-5 * size + 0.51 * eps * exact.abs()).all()
    kernels_served("hca_compress")


def check_compress_otherwise() -> None:
    kv = torch.randn(9, 64)
    assert npu("hca_compress", kv[:3], kv[:3], [3], 4).shape == (0, 64)
    assert npu("hca_compress", kv[:0], kv[:0], [], 4).shape == (0, 64)
    rotary = {"rotary_dim": 4, "rotary_table": torch.rand(9, 2, 2)}
    before = handed_over("hca_compress", "npu")
    same(npu("hca_compress", kv, kv, [9], 4, **rotary), ops.hca_compress(kv, kv, [9], 4, **rotary))
    reason = "rotary_dim, or the channels before it, not a multiple of 8"
    kept_reference("hca_compress", reason, before)
    wide = torch.randn(4, 100_000)
    before = handed_over("hca_compress", "npu")
    same(npu("hca_compress", wide, wide, [4], 4), ops.hca_compress(wide, wide, [4], 4))
    kept_reference("hca_compress", "a window too large for the unified buffer", before)


def check_compress_refuses() -> None:
    name, kv = "hca_compress", torch.randn(9, 64)
    previous = torch.randn(1, 4, 32)
    refuses("kv", "[64]", name, kv[0], kv, [9], 4)
    refuses("kv", "[9, 63]", name, kv[:, :63], kv[:, :63], [9], 4, overlap=True)
    refuses("kv", "Int", name, kv.int(), kv.int(), [9], 4)
    refuses("gate", "[8, 64]", name, kv, kv[:8], [9], 4)
    refuses("gate", "Half", name, kv, kv.half(), [9], 4)
    refuses("ratio", "0", name, kv, kv, [9], 0)
    refuses("lengths", "-1", name, kv, kv, [10, -1], 4)
    refuses("lengths", "8", name, kv, kv, [8], 4)
    refuses("position_bias", "[3, 64]", name, kv, kv, [9], 4, position_bias=kv[:3])
    refuses("position_bias", "Int", name, kv, kv, [9], 4, position_bias=kv[:4].int())
    refuses("norm_weight", "[63]", name, kv, kv, [9], 4, norm_weight=kv[0, :63])
    refuses("first_windows", "2", name, kv, kv, [9], 4, first_windows=[0, 0])
    refuses("first_windows", "-1", name, kv, kv, [9], 4, first_windows=[-1])
    refuses("previous_kv", "a tensor", name, kv, kv, [9], 4, previous_kv=previous)
    refuses("previous_kv", "None", name, kv, kv, [9], 4, overlap=True, first_windows=[1])
    refuses("previous_gate", "None", name, kv, kv, [9], 4, overlap=True, previous_kv=previous)
    pair = {"previous_kv": previous, "previous_gate": previous[:, :3]}
    refuses("previous_gate", "[1, 3, 32]", name, kv, kv, [9], 4, overlap=True, **pair)
    pair = {"previous_kv": previous.half(), "previous_gate": previous}
    refuses("previous_kv", "Half", name, kv, kv, [9], 4, overlap=True, **pair)
    table = torch.rand(5, 4, 2)
    refuses("rotary_dim", "7", name, kv, kv, [9], 4, rotary_dim=7, rotary_table=table)
    refuses("rotary_table", "None", name, kv, kv, [9], 4, rotary_dim=8)
    refuses("rotary_table", "a tensor", name, kv, kv, [9], 4, rotary_table=table)
    short = {"rotary_dim": 8, "rotary_table": table[:4]}
    refuses("rotary_table", "[4, 4, 2]", name, kv, kv, [9], 4, **short)
    refuses("dtype", "Int", name, kv, kv, [9], 4, dtype=torch.int32)


def check_decompress() -> None:
    for dtype in FLOATS:
        entries = torch.randn(5, 2, 72).to(dtype)[:, 1]
        same(
            npu("hca_decompress", entries, [13, 3, 8], 4),
            ops.hca_decompress(entries, [13, 3, 8], 4),
        )
    assert npu("hca_decompress", entries[:0], [3], 4).shape == (0, 72)
    before = handed_over("hca_decompress", "npu")
    wide = torch.randn(1, 100_000)
    same(npu("hca_decompress", wide, [2], 2), wide.repeat(2, 1))
    kept_reference("hca_decompress", "an entry too large for the unified buffer", before)
    refuses("entries", "[4, 72]", "hca_decompress", entries[:4], [13, 3, 8], 4)
    refuses("entries", "[72]", "hca_decompress", entries[0], [4], 4)
    refuses("entries", "Int", "hca_decompress", entries.int(), [20], 4)
    refuses("ratio", "0", "hca_decompress", entries, [20], 0)
    refuses("lengths", "-4", "hca_decompress", entries, [-4], 4)


if __name__ == "__main__":
    torch.manual_seed(0)
    served = platform.implementations("npu")
    assert sum(what == "native" for what in served.values()) == 6, served
    for check in [f for n, f in list(globals().items()) if n.startswith("check_")]:
        check()
        print(check.__name__, "passed", flush=True)

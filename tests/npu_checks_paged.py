"""Checks of ``kv_cache_store`` and ``kv_cache_load``; see ``npu_run.py``."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from npu_calls import FLOATS, draw, kept_reference, kernels_served, npu, refuses, same

from ascend_kv import ops
from ascend_kv.ops import platform
from ascend_kv.ops.registration import handed_over


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


FORMS = ("side by side", "key by itself", "heads first", "apart")


def new_tokens(
    cache: Cache, dtype: torch.dtype, tokens: int = 9, form: str = "apart"
) -> list[torch.Tensor]:
    """Keys and values as a projection leaves them: in one tensor, or apart."""
    _, heads, _, dim = cache.shape
    packed = torch.randn(tokens, 2, heads, dim).to(dtype)
    key, value = packed.unbind(1)
    if form == "side by side":
        return [key, value]
    if form == "key by itself":
        return [key.contiguous(), value]
    if form == "heads first":
        return [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (key, value)]
    return [key.contiguous(), value.contiguous()]


def slots(tokens: int = 9) -> torch.Tensor:
    chosen = torch.randperm(96)[:tokens]
    chosen[3 % max(tokens, 1) :: 4] = -1
    return chosen.to(draw.choice([torch.int32, torch.int64]))


def check_store_and_load() -> None:
    for kinds, form in itertools.product(itertools.product(KINDS, KINDS), FORMS):
        # `dynamic` belongs to both sides.
        if "static" in kinds and not {"token", "token_head"}.isdisjoint(kinds):
            continue
        symmetric = (draw.random() < 0.5, draw.random() < 0.5)
        if kinds[0] == kinds[1] and form != "apart":
            symmetric = (symmetric[0], symmetric[0])  # one launch for both
        cache = Cache(kinds, symmetric)
        reference = cache.copy()
        key, value = new_tokens(cache, draw.choice(FLOATS), form=form)
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

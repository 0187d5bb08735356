"""Carrying a plan out: the operator on the NPU, its reference, and a stand-in that is strict."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fused_runs import MIXED, SCALE, Run, draw, int8_cache, reference, tensors_of
from npu_stand_in import Refused, StandIn

from ascend_kv.ops import fused_execute, platform
from ascend_kv.ops.fused_attention import V2_NAMES, plan
from ascend_kv.ops.fused_request import request_of

Tensor = torch.Tensor


def recorded(cache_with: Any, kind: str) -> tuple[str, dict[str, Any]]:
    """A legal call, to be spoilt."""
    if kind == "nz":
        cache = cache_with([200], kv_heads=1, block_size=128, dim=128, granularity="channel")
        query = draw([1], 10, 128, torch.bfloat16)
        return Run(cache, query, [1], cache_layout="NZ", log_sum_exp=False).calls[0]
    if kind == "decode":
        cache = int8_cache(cache_with, [100, 64], "token_head", "token_head")
        return Run(cache, draw([1, 1], 4, 32, torch.float16), [1, 1]).calls[0]
    cache = cache_with([100, 64], dtype=torch.float16, block_size=128, dim=32)
    return Run(cache, draw([9, 9], 4, 32, torch.float16), [9, 9], window=40).calls[0]


Spoil = Callable[[dict[str, Any]], dict[str, Any]]
SPOILT: dict[str, tuple[str, Spoil]] = {
    "float32 query": ("decode", lambda a: {"query": a["query"].float()}),
    "strided keys": ("decode", lambda a: {"key": a["key"].mT.contiguous().mT}),
    "other heads": ("decode", lambda a: {"num_heads": 2}),
    "device lengths": (
        "decode",
        lambda a: {"actual_seq_lengths_kv": torch.tensor(a["actual_seq_lengths_kv"])},
    ),
    "too few lengths": ("decode", lambda a: {"actual_seq_lengths_kv": [100]}),
    "a length beyond the table": ("decode", lambda a: {"actual_seq_lengths_kv": [100, 129]}),
    "an int64 table": ("decode", lambda a: {"block_table": a["block_table"].long()}),
    "half scales": ("decode", lambda a: {"key_antiquant_scale": a["key_antiquant_scale"].half()}),
    "scales of one side": ("decode", lambda a: {"value_antiquant_scale": None}),
    "offsets of one side": (
        "decode",
        lambda a: {"key_antiquant_offset": a["key_antiquant_scale"]},
    ),
    "mode 6": ("decode", lambda a: {"key_antiquant_mode": 6, "value_antiquant_mode": 6}),
    "modes that differ": ("decode", lambda a: {"value_antiquant_mode": 4}),
    "scales of another shape": ("decode", lambda a: {"key_antiquant_mode": 4} | both(a, 4)),
    "gathered scales too short": ("decode", lambda a: both(a, 3, torch.ones(2, 2, 127))),
    "channel scales in float32": ("decode", lambda a: both(a, 0, torch.ones(1, 2, 1, 32))),
    "a sparse mode at one query": ("decode", lambda a: {"sparse_mode": 3}),
    "a mask too short": ("decode", lambda a: {"atten_mask": torch.zeros(2, 1, 1, 127).bool()}),
    "a mask of two dimensions": ("decode", lambda a: {"atten_mask": torch.zeros(2, 128).bool()}),
    "a bias too short": ("decode", lambda a: {"pse_shift": torch.zeros(2, 4, 1, 127).half()}),
    "a bias for all heads": ("decode", lambda a: {"pse_shift": torch.zeros(2, 1, 1, 128).half()}),
    "a bias in float32": ("decode", lambda a: {"pse_shift": torch.zeros(2, 4, 1, 128)}),
    "a BSND query with four dimensions": ("decode", lambda a: {"input_layout": "BSND"}),
    "row correction at one query": ("decode", lambda a: {"inner_precise": 2}),
    "no triangle": ("prefill", lambda a: {"atten_mask": ~a["atten_mask"]}),
    "a small triangle": ("prefill", lambda a: {"atten_mask": a["atten_mask"][:9, :9].contiguous()}),
    "no query lengths": ("prefill", lambda a: {"actual_seq_lengths": None}),
    "a query length beyond": ("prefill", lambda a: {"actual_seq_lengths": [9, 10]}),
    "a negative band": ("prefill", lambda a: {"pre_tokens": -1}),
    "sparse mode 2": ("prefill", lambda a: {"sparse_mode": 2}),
    "NZ in float16": ("nz", lambda a: {"query": a["query"].half()}),
    "NZ with log-sum-exp": ("nz", lambda a: {"return_softmax_lse": True}),
    "NZ in high precision": ("nz", lambda a: {"inner_precise": 0}),
    "NZ with a mask": ("nz", lambda a: {"atten_mask": torch.zeros(1, 1, 1, 256).bool()}),
    "NZ with a bias": ("nz", lambda a: {"pse_shift": torch.zeros(1, 10, 1, 256).bfloat16()}),
    "NZ with other heads": ("nz", lambda a: {"num_key_value_heads": 2}),
    "NZ with query lengths": ("nz", lambda a: {"actual_seq_qlen": [1]}),
    "NZ with a sink": ("nz", lambda a: {"learnable_sink": torch.zeros(10).bfloat16()}),
    "NZ with offsets": (
        "nz",
        lambda a: {f"dequant_offset_{x}": a[f"dequant_scale_{x}"] for x in ("key", "value")},
    ),
}


def both(arguments: dict[str, Any], mode: int, scale: Tensor | None = None) -> dict[str, Any]:
    sides = ("key", "value")
    changes: dict[str, Any] = {f"{side}_antiquant_mode": mode for side in sides}
    if scale is not None:
        changes |= {f"{side}_antiquant_scale": scale for side in sides}
    return changes


@pytest.mark.parametrize("spoilt", SPOILT)
def test_the_stand_in_refuses(cache_with: Any, spoilt: str) -> None:
    kind, spoil = SPOILT[spoilt]
    name, arguments = recorded(cache_with, kind)

    def call(arguments: dict[str, Any]) -> None:
        inputs = [arguments[x] for x in ("query", "key", "value")]
        others = {k: v for k, v in arguments.items() if k not in ("query", "key", "value")}
        getattr(StandIn(), name)(*inputs, **others)

    call(arguments)
    with pytest.raises(Refused):
        call({**arguments, **spoil(arguments)})


def test_lists_of_entries_are_for_the_reference(cache_with: Any) -> None:
    cache = int8_cache(cache_with, [100, 64], "token_head", "token_head")
    query = draw([1, 1], 4, 32, torch.float16)
    entries = torch.tensor([[99, 3, -1], [0, 63, 5]], dtype=torch.int32)
    arguments = (query, *cache.tensors, cache.tables, [1, 1], cache.kv_lengths, SCALE)
    library = StandIn()
    output, _ = fused_execute.attend(library, *arguments, **cache.scales, entries=entries)
    wanted, _ = reference(cache, query, [1, 1], entries=entries)
    assert not library.calls
    assert torch.equal(output, wanted.half())


def test_nz_is_for_the_second_function(cache_with: Any) -> None:
    _, arguments = recorded(cache_with, "nz")
    back = {new: old for old, new in V2_NAMES.items()}
    told = {back.get(k, k): v for k, v in arguments.items()}
    inputs = [told.pop(x) for x in ("query", "key", "value")]
    with pytest.raises(Refused, match="NZ"):
        StandIn().npu_fused_infer_attention_score(*inputs, **told)


def attend(library: Any, cache: Any, query: Tensor, queries: list[int], **options: Any) -> Any:
    arguments = (query, *cache.tensors, cache.tables, queries, cache.kv_lengths, SCALE)
    return fused_execute.attend(library, *arguments, **cache.scales, **options)


def test_what_the_device_cannot_do_the_reference_does(
    cache_with: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_execute, "routes_taken", {})
    queries, lengths = MIXED
    cache = int8_cache(cache_with, lengths, "token_head", "token_head")
    query = draw(queries, 4, 32, torch.float32)
    library = StandIn()
    options = {"window": 50, "causal": False, "sinks": torch.zeros(4)}
    wanted = reference(cache, query, queries, **options)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for given, expected in zip(
                attend(library, cache, query, queries, **options), wanted, strict=True
            ):
                assert torch.equal(given, expected)
    assert library.calls == []
    (record,) = caplog.records
    assert "reference" in record.message and "float32" in record.message
    (route,) = fused_execute.routes_taken.values()
    assert route.calls == 2 and route.reason in record.message


def test_the_whole_of_it(cache_with: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_execute, "routes_taken", {})
    queries, lengths = MIXED
    cache = int8_cache(cache_with, lengths, "token_head", "token_head")
    query = draw(queries, 4, 32, torch.float16)
    sinks = torch.randn(4)
    run = Run(cache, query, queries, sinks=sinks, window=60)
    output, lse = attend(StandIn(), cache, query, queries, sinks=sinks, window=60, score_bias=None)
    assert torch.equal(output, run.output) and torch.equal(lse, run.lse)
    taken = fused_execute.routes_taken
    assert (
        taken.keys()
        == run.plan.routes.keys()
        == {
            "decode: paged",
            "prefill: loaded (prefill cache)",
        }
    )
    assert [route.calls for route in taken.values()] == [1, 1]
    assert "torch.int8" in taken["prefill: loaded (prefill cache)"].reason
    assert not taken["decode: paged"].reason


def blank(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
    """Results of the right shape, so that fake tensors can go all the way."""
    assert others["input_layout"] == "BNSD"
    return torch.empty_like(query), query.new_empty((*query.shape[:3], 1), dtype=torch.float32)


@pytest.mark.parametrize("quantized", [True, False])
def test_nothing_waits_for_the_device(cache_with: Any, quantized: bool) -> None:
    """Fake tensors have no values: whoever looks at one on the host fails."""
    queries, lengths = MIXED
    dtype = torch.int8 if quantized else torch.float16
    cache = cache_with(lengths, dtype=dtype, block_size=128, dim=32, symmetric=False)
    query = draw(queries, 4, 32, torch.float16)
    extras = {"sinks": torch.zeros(4), "score_bias": torch.zeros(sum(queries), 4, 200)}
    library = SimpleNamespace(npu_fused_infer_attention_score=blank)
    with torch._subclasses.FakeTensorMode() as mode:
        tensors = {k: mode.from_tensor(x) for k, x in tensors_of(cache, query, **extras).items()}
        request = request_of(tensors, queries, lengths, SCALE, window=30)
        output, lse = fused_execute.execute(plan(request), tensors, library)
        assert output.shape == query.shape and lse.shape == query.shape[:2]


ON_THE_NPU = """
import logging, sys, types
logging.basicConfig(format="%(message)s", stream=sys.stdout)
sys.path.insert(0, "tests")
import torch
from npu_stand_in import StandIn

from ascend_kv import ops
from ascend_kv.ops import platform
from ascend_kv.ops.registration import has_kernel

assert "torch_npu" not in sys.modules and not platform.register_npu_operators()
assert not has_kernel("paged_attention", "npu")
sys.modules["torch_npu"] = types.ModuleType("torch_npu")
assert not platform.register_npu_operators(), "a torch_npu without the functions"
stand_in = sys.modules["torch_npu"] = StandIn()
assert platform.register_npu_operators()
assert has_kernel("paged_attention", "npu")
assert platform.register_npu_operators(), "once is enough"
assert platform.implementations("npu")["paged_attention"] == "CANN's fused attention"
assert "stand-in" in platform.describe_attention("npu")

# There is no such device here, so the dispatcher is told to take it.
keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
operator = torch.ops.ascend_kv.paged_attention.default
cache = torch.randn(3, 2, 128, 16).half()
tables = torch.tensor([[1, 0]], dtype=torch.int32)
query = torch.randn(1, 4, 16).half()
call = (query, cache, cache, tables, [1], [130], 0.25)
output, lse = operator.redispatch(keys, *call, window=100, sinks=torch.zeros(4))
assert len(stand_in.calls) == 1, stand_in.calls
wanted, wanted_lse = ops.paged_attention(*call, window=100, sinks=torch.zeros(4))
assert len(stand_in.calls) == 1, "the CPU is not the device"
assert (output - wanted).abs().max() < 2e-3 and (lse - wanted_lse).abs().max() < 1e-5
call = (query.float(), *call[1:])
output, lse = operator.redispatch(keys, *call)
assert len(stand_in.calls) == 1, "the device takes no float32"
reference = torch.ops.ascend_kv_reference.paged_attention.default
assert torch.equal(output, reference(*call)[0])
assert {words: x.calls for words, x in platform.attention_routes().items()} == {
    "decode: paged": 1, "decode: reference (query type)": 1
}
assert platform.implementations("npu")["paged_attention"] == (
    "CANN's fused attention; decode: paged (1 calls), decode: reference (query type) (1 calls)"
)
"""
SWITCHED_OFF = """
import sys
sys.path.insert(0, "tests")
from npu_stand_in import StandIn

sys.modules["torch_npu"] = StandIn()
from ascend_kv.ops import platform

assert not platform.register_npu_operators()
assert platform.implementations("npu")["paged_attention"] == "reference"
assert platform.describe_attention("npu") == "not used: ASCEND_KV_OPERATORS=reference"
"""


def in_a_process_of_its_own(script: str, wanted: str) -> str:
    """What it says; a registration is for good."""
    environment = {**os.environ, "ASCEND_KV_OPERATORS": wanted}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_registered_for_the_npu() -> None:
    said = in_a_process_of_its_own(ON_THE_NPU, "auto")
    assert said.count("fused attention serves paged_attention") == 1
    assert "tested against a stand-in of torch_npu only" in said


def test_references_by_name_switch_the_fused_attention_off() -> None:
    in_a_process_of_its_own(SWITCHED_OFF, "reference")


def test_loading_torch_npu_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not loaded with torch, but when somebody asks for the device."""
    calls = []
    monkeypatch.setitem(sys.modules, "torch_npu", StandIn())
    monkeypatch.setattr(platform, "register_npu_operators", lambda: calls.append(True))
    platform._torch_npu()
    assert calls == [True]

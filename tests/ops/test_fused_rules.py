"""Every rule of the NPU's fused attention, from its legal side and from its illegal side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fused_runs import names

from ascend_kv.ops import fused_rules
from ascend_kv.ops.fused_attention import Plan, plan, slow_reasons
from ascend_kv.ops.fused_request import Part, Request, split

BASE = Request(
    query_dtype=torch.float16,
    cache_dtype=torch.int8,
    num_heads=8,
    kv_heads=2,
    head_dim=64,
    num_blocks=100,
    block_size=128,
    query_lengths=(1,),
    kv_lengths=(300,),
    softmax_scale=0.125,
    key="token_head",
    value="token_head",
)
PREFILL = {"query_lengths": (9,)}
UNQUANTIZED = {"cache_dtype": torch.float16, "key": "none", "value": "none"}
NZ = {
    "query_dtype": torch.bfloat16,
    "num_heads": 64,
    "kv_heads": 8,
    "head_dim": 128,
    "key": "channel",
    "value": "channel",
    "cache_layout": "NZ",
    "log_sum_exp": False,
}
Changes = dict[str, Any]
# Rule -> what both requests have, what is legal, what is not.
CASES: dict[str, tuple[Changes, list[Changes], list[Changes]]] = {
    "query type": (
        {"cache_dtype": torch.int8},
        [{"query_dtype": torch.bfloat16}],
        [{"query_dtype": torch.float32}],
    ),
    "positions": ({}, [{"positions": False}], [{"positions": True}]),
    "entries": ({}, [{"entries": False}], [{"entries": True}]),
    "heads": ({"kv_heads": 64}, [{"num_heads": 256}], [{"num_heads": 320}]),
    "group": ({"kv_heads": 1}, [{"num_heads": 64}], [{"num_heads": 65}]),
    "head_dim": (
        UNQUANTIZED,
        [{"head_dim": 512}, {"head_dim": 80}],
        [{"head_dim": 528}, {"head_dim": 72}],
    ),
    "batch": (
        {"num_blocks": 2},
        [{"query_lengths": (1,) * 65536, "kv_lengths": (1,) * 65536}],
        [{"query_lengths": (1,) * 65537, "kv_lengths": (1,) * 65537}],
    ),
    "decode length": ({}, [{"kv_lengths": (262_144,)}], [{"kv_lengths": (262_145,)}]),
    "prefill length": (
        {**PREFILL, **UNQUANTIZED, "kv_heads": 1, "head_dim": 16},
        [{"kv_lengths": (20_971_520,)}],
        [{"kv_lengths": (20_971_521,)}],
    ),
    "loaded elements": (
        PREFILL,
        [{"kv_lengths": (16_777_215,)}],
        [{"kv_lengths": (16_777_216,)}],
    ),
    "cache type": (
        UNQUANTIZED,
        [{"cache_dtype": torch.float16}],
        [
            {"cache_dtype": torch.bfloat16},
            {"cache_dtype": torch.float32},
            {"cache_dtype": torch.uint8},
            {"value_dtype": torch.int8},
        ],
    ),
    "cache elements": ({}, [{"num_blocks": 131_071}], [{"num_blocks": 131_072}]),
    "cache row": (
        {"cache_layout": "BSND", "head_dim": 256},
        [{"num_heads": 255, "kv_heads": 255}],
        [{"num_heads": 256, "kv_heads": 256}],
    ),
    "int8 head_dim": ({}, [{"head_dim": 96}], [{"head_dim": 80}]),
    "scales": (
        {},
        [{"key": "token"}, {"key": "head", "value": "layer"}, {"key": "layer", "value": "token"}],
        [
            {"key": "channel"},
            {"value": "head"},
            {"key": "group"},
            {"value": "group"},
            {"key": "block"},
        ],
    ),
    "mode 0/1 query": (
        {"key": "channel", "value": "token"},
        [{"query_dtype": torch.float16}],
        [{"query_dtype": torch.bfloat16}],
    ),
    "decode block_size": (
        {},
        [{"block_size": 32}, {"block_size": 512}, {**UNQUANTIZED, "block_size": 16}],
        [{"block_size": 48}, {"block_size": 544}, {**UNQUANTIZED, "block_size": 24}],
    ),
    "table capacity": (
        {"block_size": 96},
        [{"kv_lengths": (262_080,)}],
        [{"kv_lengths": (262_081,)}],
    ),
    "prefill block_size": (
        {**PREFILL, **UNQUANTIZED},
        [{"block_size": 128}, {"block_size": 512}],
        [{"block_size": 64}, {"block_size": 192}, {"block_size": 640}],
    ),
    "prefill cache": (PREFILL, [UNQUANTIZED], [{}, {"cache_layout": "BSND"}]),
    "NZ types": (
        NZ,
        [{}],
        [
            {"query_dtype": torch.float16},
            {**UNQUANTIZED, "cache_dtype": torch.bfloat16},
        ],
    ),
    "NZ head_dim": (NZ, [{}], [{"head_dim": 64}]),
    "NZ block_size": (NZ, [{"block_size": 512}], [{"block_size": 256}]),
    "NZ heads": (
        NZ,
        [
            {"num_heads": 10, "kv_heads": 1},
            {"num_heads": 80},
            {"num_heads": 128, "kv_heads": 16},
        ],
        [{"num_heads": 28, "kv_heads": 4}, {"num_heads": 32}],  # Qwen2.5-7B is not among them
    ),
    "NZ scales": (
        NZ,
        [{"key": "token", "value": "token"}, {"key": "head", "value": "layer"}],
        [{"key": "token_head", "value": "token_head"}, {"value": "token"}],
    ),
    "NZ offsets": (
        {**NZ, "key": "token", "value": "token"},
        [{}, {"key": "layer", "value": "layer", "key_zero_point": True}],
        [{"key_zero_point": True}, {"value_zero_point": True}],
    ),
    "NZ score bias": (NZ, [{}], [{"score_bias": True}]),
    "NZ log-sum-exp": (NZ, [{}], [{"log_sum_exp": True}, {"sinks": True}]),
    "NZ window": (NZ, [{}], [{"window": 100}]),
    "NZ queries": (
        NZ,
        [{"query_lengths": (16, 16), "kv_lengths": (30, 40)}, {"query_lengths": (2,)}],
        [
            {"query_lengths": (17,)},
            {"query_lengths": (3, 2), "kv_lengths": (30, 40)},
            {"query_lengths": (2,), "causal": False},
        ],
    ),
}


@pytest.mark.parametrize("rule", CASES)
def test_each_rule_from_both_sides(rule: str) -> None:
    base, legal, illegal = CASES[rule]
    (group,) = [
        group for group, rules in fused_rules.RULES.items() if rule in [one.name for one in rules]
    ]
    for changes in legal:
        chosen = plan(replace(BASE, **{**base, **changes}))
        assert not chosen.fallbacks, changes
        (call,) = chosen.calls
        # the rule for loaded keys is about a call that is loaded already
        assert call.route == ("loaded" if rule == "loaded elements" else "paged"), call.fallbacks
    for changes in illegal:
        chosen = plan(replace(BASE, **{**base, **changes}))
        if fused_rules.instead_of(group) == "reference":
            assert rule in names(chosen.fallbacks) and not chosen.calls
        else:
            (call,) = chosen.calls
            assert call.route == "loaded" and rule in names(call.fallbacks)


def test_every_rule_is_tested_and_stands_in_the_table() -> None:
    table = [
        (rule.name, group, rule.legal, fused_rules.instead_of(group), rule.source)
        for group, rules in fused_rules.RULES.items()
        for rule in rules
    ]
    assert [row[0] for row in table] == list(dict.fromkeys(row[0] for row in table))
    assert set(CASES) == {row[0] for row in table}
    lines = (fused_rules.__doc__ or "").splitlines()
    rows = [tuple(x.strip() for x in line.strip("|").split("|")) for line in lines if "|" in line]
    assert rows[2:] == table


def test_a_fallback_says_what_was_given() -> None:
    chosen = plan(replace(BASE, query_dtype=torch.float32, positions=True))
    assert names(chosen.fallbacks) == ["query type", "positions"]
    assert list(chosen.routes) == ["decode: reference (query type, positions)"]
    ((told, other),) = [[str(why) for why in whys] for whys in chosen.routes.values()]
    assert "positions" in other
    assert "torch.float32" in told and "float16 or bfloat16" in told and "reference" in told
    chosen = plan(replace(BASE, block_size=48))
    assert list(chosen.routes) == ["decode: loaded (decode block_size)"]
    ((reason,),) = chosen.routes.values()
    assert "got 48" in str(reason)


FAST = {"query_dtype": torch.bfloat16, "head_dim": 128, "key": "channel", "value": "channel"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"key": "head", "value": "head"}, None),
        ({"cache_dtype": torch.bfloat16, "key": "none", "value": "none"}, None),
        ({"key": "token_head", "value": "token_head"}, "mode 0 or 2"),
        ({"cache_layout": "BSND"}, "BNSD"),
        ({"head_dim": 64}, "head_dim 128"),
        ({"num_heads": 34}, "16 query heads"),
        ({"query_dtype": torch.float16}, "bfloat16"),
        ({"kv_lengths": (2048,) * 64}, "above 128"),
    ],
)
def test_what_keeps_a_decode_off_the_fast_path(changes: Changes, reason: str | None) -> None:
    base = {"num_heads": 32, "query_lengths": (1,) * 64, "kv_lengths": (2049,) * 64}
    request = replace(BASE, **{**base, **FAST, **changes})
    (call,) = plan(request).calls
    assert call.slow == slow_reasons(request, split(request)[0])
    assert len(call.slow) == (reason is not None) and all(reason in x for x in call.slow)
    assert call.arguments["inner_precise"] == (request.query_dtype is torch.bfloat16)


def test_loaded_decodes_are_slow() -> None:
    (call,) = plan(replace(BASE, block_size=48)).calls
    assert call.slow == ("a paged cache",)


def test_a_plan_is_made_once_for_all_layers() -> None:
    assert plan(replace(BASE)) is plan(replace(BASE, window=0))
    assert isinstance(plan(BASE), Plan)


def test_parts_know_their_sizes() -> None:
    request = replace(BASE, query_lengths=(1, 3, 1), kv_lengths=(300, 20, 129), window=40)
    decode, prefill = split(request)
    assert decode == Part("decode", 128, (0, 2), ((0, 1), (4, 1)), (2, 0), (44, 129), (4, 89))
    assert (decode.longest, decode.width, decode.queries) == (129, 2, 1)
    assert prefill.rows == (1,) and prefill.spans == ((1, 3),) and prefill.queries == 3

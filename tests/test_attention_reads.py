"""Which caches an NPU copies in every step: the planner's rules against the operator's own."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import product

import pytest

from ascend_kv import cli
from ascend_kv.errors import UsageError
from ascend_kv.evaluate.lint_attention import decode_fallbacks
from ascend_kv.geometry import LayerFormat, ModelGeometry, layer_format
from ascend_kv.plan.attention_reads import why_copied


def geometry(head_dim: int = 128) -> ModelGeometry:
    return ModelGeometry("llama", 2, 8, 2, head_dim, 1024, 100, 10**6, "float16", (None, None))


def formats() -> list[LayerFormat]:
    """Keys and values of every kind that a 910B stores."""
    sides = ["float16", "bfloat16", "int8/group32"]
    sides += [f"int8/{by}{zero}" for by in ("token", "token_head") for zero in ("", "/asymmetric")]
    sides += [f"int8/{by}/static" for by in ("layer", "head", "channel", "token", "token_head")]
    found = []
    for key, value in product(sides, sides):
        with suppress(UsageError):  # static scales on one side only
            found.append(layer_format({"k": key, "v": value}))
    assert len(found) > 80
    return found


@pytest.mark.parametrize("head_dim", [64, 128, 80, 48])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_planner_says_what_the_operator_would(dtype: str, head_dim: int) -> None:
    model, copied = geometry(head_dim), 0
    for spec, block_size, tokens in product(
        formats(), (16, 32, 128, 512, 528, 1024), (1000, 262_144, 262_145)
    ):
        found = decode_fallbacks(model, spec, dtype, block_size, tokens)
        expected = any(fallback.instead == "loaded" for fallback in found)
        if any(fallback.instead == "reference" for fallback in found):
            continue  # too long for the device's attention in any way
        reason = why_copied(model, spec, dtype, block_size, tokens)
        assert (reason is not None) == expected, (str(spec), block_size, tokens, found, reason)
        copied += expected
    assert copied > 100


def test_a_plan_counts_the_copy(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "qwen2.5-7b", "--device", "910B1", "--prompt", "7000", "--output", "1000"]
    arguments += ["--formats", "int8,int8/group32"]
    assert cli.main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    as_it_lies, copied = plan["policies"]
    assert as_it_lies["copied_every_step"] is None
    assert "no antiquant mode" in copied["copied_every_step"]
    for end in ("low", "best", "high"):
        times = [policy["speed"][end]["tpot_seconds"] for policy in (as_it_lies, copied)]
        # each sequence's keys and values in 16 bit, written and read: 7,500 tokens of 57,344 B
        least = 2 * 64 * 7500 * 57_344 / 1.6e12
        assert times[1] - times[0] > 0.99 * least, end
    parts = {part["name"]: part for part in plan["memory"]}
    assert parts["copied cache"]["bytes"] == 64 * 7500 * 2 * 4 * 128 * 2
    assert cli.main([*arguments, "--explain"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "copied out of the cache, dequantized" in text
    assert "Copying the cache writes and reads 55.050 GB more" in text


def test_a_cache_of_the_other_half_type_is_a_model_run_in_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for formats in ("float16", "bfloat16,int8", "auto"):
        arguments = ["plan", "qwen2.5-7b", "--device", "910B1", "--formats", formats, "--json"]
        assert cli.main(arguments) == 0
        plan = json.loads(capsys.readouterr().out)
        assert all(policy["copied_every_step"] is None for policy in plan["policies"])

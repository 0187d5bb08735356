"""Configuration: every mistake is refused by field, value and legal values."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from refusals import refused

from ascend_kv.config import CacheConfig, SchedulerConfig
from ascend_kv.devices import get_device
from ascend_kv.errors import UsageError
from ascend_kv.geometry import ModelGeometry, format_spec
from ascend_kv.resolved_cache import plan_blocks, resolve_block_size, resolve_formats

GEOMETRY = ModelGeometry("llama", 4, 6, 2, 8, 48, 100, 256, "float16", (None,) * 4)


@pytest.mark.parametrize(
    ("options", "legal", "hint"),
    [
        ({"kv_cache_dtype": "fp6"}, "auto, float32, float16", ""),
        ({"kv_cache_dtype": "in8"}, "int8", "int8"),
        ({"kv_cache_dtype": 8}, "int8", ""),
        ({"granularity": "tokens"}, "layer, head, token, token_head, channel", "token"),
        ({"granularity": "layer", "kv_cache_dtype": "int8"}, "token, token_head", "beforehand"),
        ({"granularity": "head", "kv_cache_dtype": "int8"}, "group with", "kv_cache_scales"),
        ({"granularity": "channel", "kv_cache_dtype": "int8"}, "token_head", "scale_type static"),
        ({"scale_type": "calibrated"}, "dynamic, static", ""),
        ({"scale_type": "dynamic", "kv_cache_scales": "s.safetensors"}, "static with", ""),
        ({"group_size": 8, "kv_cache_dtype": "int8"}, "none with granularity token_head", ""),
        (
            {"group_size": None, "granularity": "group", "kv_cache_dtype": "int8"},
            "a divisor of head_dim",
            "",
        ),
        ({"group_size": 1, "granularity": "group", "kv_cache_dtype": "int8"}, "at least 2", ""),
        ({"group_size": True, "granularity": "group", "kv_cache_dtype": "int8"}, "a divisor", ""),
        ({"group_size": "8", "granularity": "group", "kv_cache_dtype": "int8"}, "a divisor", ""),
        (
            {
                "scale_type": "static",
                "granularity": "group",
                "group_size": 4,
                "kv_cache_dtype": "int8",
            },
            "dynamic with granularity group",
            "channels",
        ),
        (
            {"granularity": "token", "kv_cache_dtype": "int8_per_token_head"},
            "token_head with int8_per_token_head",
            "",
        ),
        ({"symmetric": "yes"}, "True, False", ""),
        ({"symmetric": 1}, "True, False", ""),
        ({"kv_cache_dtype_skip_layers": ("0",)}, "a list of layer numbers", ""),
        ({"kv_cache_dtype_skip_layers": 3}, "a list of layer numbers", ""),
        ({"kv_cache_dtype_skip_layers": None}, "a list of layer numbers", ""),
        ({"kv_cache_dtype_skip_layers": ""}, "a list of layer numbers", ""),
        ({"kv_cache_scales": [1], "scale_type": "static"}, "or a mapping", ""),
        ({"block_size": 0}, "at least 1", ""),
        ({"block_size": 16.0}, "a whole number", ""),
        ({"kv_allocator": "page"}, "paged, contiguous", "paged"),
        ({"kv_cache_memory_bytes": -5}, "at least 1", ""),
        ({"prefill_reads": "fresh"}, "cache", "chunks"),
        ({"prefill_reads": "both"}, "cache", ""),
    ],
)
def test_cache_options_that_are_refused(options: dict[str, Any], legal: str, hint: str) -> None:
    error = refused(UsageError, CacheConfig, **options)
    name = next(iter(options))
    assert error.field == name
    assert error.given == options[name]
    assert legal in error.legal
    assert hint in error.hint


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "16", True, None])
def test_scheduler_options_that_are_refused(name: str, value: Any) -> None:
    error = refused(UsageError, SchedulerConfig, **{"max_model_len": 8, name: value})
    assert (error.field, error.given) == (name, value)
    assert error.legal == "a whole number of at least 1"


def test_formats_of_the_layers() -> None:
    half, full, int8 = format_spec("float16"), format_spec("float32"), format_spec("int8")
    assert resolve_formats(GEOMETRY, CacheConfig(), "float16") == (half,) * 4
    assert resolve_formats(GEOMETRY, CacheConfig("auto"), "float32") == (full,) * 4
    assert resolve_formats(GEOMETRY, CacheConfig("fp16"), "float32") == (half,) * 4
    skip = CacheConfig("int8", kv_cache_dtype_skip_layers=(0, -1))
    assert resolve_formats(GEOMETRY, skip, "float16") == (half, int8, int8, half)
    token = CacheConfig("int8", granularity="token", symmetric=False)
    assert resolve_formats(GEOMETRY, token, "float16") == (format_spec("int8", "token", False),) * 4
    # Without quantization there are no scales, so their granularity is of no account.
    plain = CacheConfig("float16", granularity="channel")
    assert resolve_formats(GEOMETRY, plain, "float16") == (half,) * 4


@pytest.mark.parametrize("size", [3, 8, 16])
def test_groups_that_do_not_divide_a_head(size: int) -> None:
    config = CacheConfig("int8", granularity="group", group_size=size)
    error = refused(UsageError, resolve_formats, GEOMETRY, config, "float16")  # head_dim 8
    assert (error.field, error.given, error.legal) == ("group_size", size, "2, 4")
    prime = dataclasses.replace(GEOMETRY, head_dim=7)
    assert (
        refused(UsageError, resolve_formats, prime, config, "float16").legal == "none in this model"
    )
    # a model's own type has no groups, whatever is said of them
    plain = CacheConfig("float16", granularity="group", group_size=size)
    assert resolve_formats(GEOMETRY, plain, "float16") == (format_spec("float16"),) * 4


def test_static_scales_take_their_bytes_out_of_the_budget() -> None:
    # channel: 2 sides x 2 heads x 8 channels x 4 bytes; token_head: a scale for each position
    for granularity, static_bytes in (("channel", 128), ("token_head", 2 * 2 * 11 * 4)):
        config = CacheConfig("int8", granularity=granularity, scale_type="static")
        formats = resolve_formats(GEOMETRY, config, "float16")
        assert GEOMETRY.static_bytes(formats, 11) == 4 * static_bytes
        block_bytes = GEOMETRY.block_bytes(formats, 5)
        budget = 3 * block_bytes + 4 * static_bytes
        assert plan_blocks(GEOMETRY, formats, 5, budget, 11) == 3
        assert plan_blocks(GEOMETRY, formats, 5, budget + block_bytes - 1, 11) == 3
        error = refused(UsageError, plan_blocks, GEOMETRY, formats, 5, budget - 1, 11)
        assert error.legal.startswith(f"{budget} ")
        assert f"static scales {4 * static_bytes} bytes" in error.hint


@pytest.mark.parametrize("layer", [4, -5, 99])
def test_layers_that_the_model_has_not_got(layer: int) -> None:
    config = CacheConfig("int8", kv_cache_dtype_skip_layers=[1, layer])  # type: ignore[arg-type]
    error = refused(UsageError, resolve_formats, GEOMETRY, config, "float16")
    assert (error.field, error.given) == ("kv_cache_dtype_skip_layers", layer)
    assert "-4 to 3" in error.legal


def test_an_unknown_model_dtype() -> None:
    assert refused(UsageError, resolve_formats, GEOMETRY, CacheConfig(), "float8").given == "float8"


def test_the_device_has_its_say_on_blocks() -> None:
    mixed = (format_spec("float16"), format_spec("int8"))
    assert resolve_block_size(CacheConfig(), get_device("cpu"), mixed) == 16
    assert resolve_block_size(CacheConfig(), get_device("910B3"), mixed) == 128
    assert resolve_block_size(CacheConfig(block_size=3), get_device("cpu"), mixed) == 3
    # 48 is legal for float16 there, but not for the layers in int8.
    error = refused(
        UsageError, resolve_block_size, CacheConfig(block_size=48), get_device("910B3"), mixed
    )
    assert (error.field, error.given) == ("block_size", 48)
    assert "multiples of 32" in error.legal
    floats = (format_spec("float32"),)
    assert refused(
        UsageError, resolve_block_size, CacheConfig(), get_device("910B3"), floats
    ).field == ("kv_cache_dtype")


def test_blocks_of_a_budget() -> None:
    formats = [format_spec("float16")] * 4
    block_bytes = 5 * 4 * 2 * 2 * 8 * 2
    assert plan_blocks(GEOMETRY, formats, 5, 10 * block_bytes, 11) == 10
    assert plan_blocks(GEOMETRY, formats, 5, 11 * block_bytes - 1, 11) == 10
    assert plan_blocks(GEOMETRY, formats, 5, 3 * block_bytes, 11) == 3
    for budget in (3 * block_bytes - 1, 1, 0, -1):
        error = refused(UsageError, plan_blocks, GEOMETRY, formats, 5, budget, 11)
        assert (error.field, error.given) == ("kv_cache_memory_bytes", budget)
        assert error.legal == f"{3 * block_bytes} (3.75 KiB) or more"
        assert "max_model_len = 11" in error.hint

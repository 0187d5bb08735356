"""Layers, heads and bytes: the arithmetic of two published models, and configs that are refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from ascend_kv.errors import UnsupportedModelError, UsageError
from ascend_kv.geometry import FORMAT_NAMES, ModelGeometry, format_spec, geometry_from_config

# From the models' public config.json files.
QWEN2_5_7B = {
    "model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "hidden_size": 3584, "vocab_size": 152064,
    "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "sliding_window": 131072, "max_window_layers": 28,
}  # fmt: skip
LLAMA_3_70B = {
    "model_type": "llama", "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "hidden_size": 8192, "vocab_size": 128256,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_qwen2_5_7b_costs_what_grouped_query_attention_costs() -> None:
    geometry = geometry_from_config(QWEN2_5_7B)
    half = [format_spec("float16")] * 28
    assert geometry == ModelGeometry(
        "qwen2", 28, 28, 4, 128, 3584, 152064, 32768, "bfloat16", (None,) * 28
    )
    assert geometry.group_size == 7
    assert geometry.token_bytes(half) == 57_344
    assert geometry.token_bytes(half) * 8192 == 0.4375 * 2**30
    assert geometry.block_bytes(half, 16) == 917_504


def test_the_ungrouped_formula_counts_every_query_head() -> None:
    geometry = geometry_from_config(QWEN2_5_7B)
    assert geometry.ungrouped_token_bytes() == 2 * 28 * 3584 * 2 == 401_408
    assert geometry.ungrouped_token_bytes(element_bytes=1) == 200_704


def test_a_70b_model_takes_10_gib_at_32k() -> None:
    geometry = geometry_from_config(LLAMA_3_70B)
    assert geometry.token_bytes([format_spec("bfloat16")] * 80) * 32768 == 10 * 2**30


@pytest.mark.parametrize(
    ("name", "granularity", "symmetric", "expected"),
    [
        ("float32", "token_head", True, 5 * 64 * 4),
        ("float16", "token", False, 5 * 64 * 2),
        ("bfloat16", "layer", True, 5 * 64 * 2),
        ("int8", "token_head", True, 5 * 64 + 5 * 4),
        ("int8", "token_head", False, 5 * 64 + 5 * 4 + 5 * 4),
        ("int8", "token", True, 5 * 64 + 4),
        ("int8", "token", False, 5 * 64 + 4 + 4),
        ("int8", "channel", False, 5 * 64),  # scales of the layer, none for a token
        ("int8", "group", True, 5 * 64 + 5 * 4 * 4),  # 64 / 16 groups
        ("int8", "group", False, 5 * 64 + 2 * 5 * 4 * 4),
    ],
)
def test_bytes_of_one_token_of_one_layer(
    name: str, granularity: str, symmetric: bool, expected: int
) -> None:
    group_size = 16 if granularity == "group" else None
    spec = format_spec(name, granularity, symmetric, group_size=group_size)
    assert spec.vectors_bytes(kv_heads=5, head_dim=64) == expected
    assert spec.token_bytes(kv_heads=5, head_dim=64) == 2 * expected


@pytest.mark.parametrize(
    ("granularity", "scales"),
    [("layer", 1), ("head", 5), ("channel", 5 * 64), ("token", 100), ("token_head", 5 * 100)],
)
def test_static_scales_cost_bytes_once(granularity: str, scales: int) -> None:
    dynamic, static = (
        format_spec("int8", granularity, scale_type=kind) for kind in ("dynamic", "static")
    )
    assert static.vectors_bytes(5, 64) == dynamic.vectors_bytes(5, 64)
    assert (dynamic.static_bytes(5, 64, 100), static.static_bytes(5, 64, 100)) == (0, 8 * scales)
    asymmetric = format_spec("int8", granularity, False, "static")
    assert asymmetric.static_bytes(5, 64, 100) == 16 * scales
    assert format_spec("float16", granularity, scale_type="static").static_bytes(5, 64, 100) == 0


def test_formats_in_words() -> None:
    words = {
        str(format_spec("half", "token")): "float16",
        str(format_spec("int8")): "int8/token_head",
        str(format_spec("int8", "token", False)): "int8/token/asymmetric",
        str(format_spec("int8", "group", group_size=32)): "int8/group32",
        str(format_spec("int8", "head", False, "static")): "int8/head/static/asymmetric",
    }
    assert list(words) == list(words.values())


def test_layers_of_different_formats_add_up() -> None:
    geometry = geometry_from_config(QWEN2_5_7B)
    formats = [format_spec("float16")] * 4 + [format_spec("int8")] * 24
    assert geometry.token_bytes(formats) == 4 * 2 * 4 * 128 * 2 + 24 * 2 * (4 * 128 + 4 * 4)


def test_format_names_and_their_synonyms() -> None:
    assert format_spec("half") is format_spec("fp16") is format_spec("float16")
    assert format_spec("bf16").name == "bfloat16"
    assert format_spec("fp32").value_bits == 32
    assert not format_spec("float16", "token").quantized
    assert format_spec("int8_per_token_head") == format_spec("int8", "token_head")
    assert format_spec("int8", "token") != format_spec("int8")
    assert [format_spec(name).name for name in FORMAT_NAMES][3:9] == [
        *("int8", "fp8_e4m3", "fp8_e5m2", "int4", "int8", "int4")
    ]


@pytest.mark.parametrize(
    ("arguments", "field", "legal"),
    [
        (("int3",), "kv_cache_dtype", "bfloat16"),
        (("int8", "row"), "granularity", "token_head"),
        (("float16", "row"), "granularity", "channel"),
        (("int8_per_token_head", "token"), "granularity", "token_head with int8_per_token_head"),
    ],
)
def test_unknown_formats_are_refused(arguments: tuple[str, ...], field: str, legal: str) -> None:
    with pytest.raises(UsageError) as caught:
        format_spec(*arguments)
    assert caught.value.field == field
    assert caught.value.given == arguments[-1]
    assert legal in caught.value.legal


def test_an_explicit_head_dim_wins() -> None:
    # As in models whose heads together are narrower or wider than the residual stream.
    geometry = geometry_from_config({**QWEN2_5_7B, "head_dim": 96})
    assert (geometry.head_dim, geometry.hidden_size) == (96, 3584)
    assert geometry.ungrouped_token_bytes() == 2 * 28 * 28 * 96 * 2
    assert geometry_from_config({**QWEN2_5_7B, "head_dim": None}).head_dim == 128


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_dtype_under_its_old_and_its_new_name(given: dict[str, str], expected: str) -> None:
    config = {key: value for key, value in LLAMA_3_70B.items() if key != "torch_dtype"}
    assert geometry_from_config({**config, **given}).dtype == expected


def test_rope_parameters_and_quantization_config_are_no_obstacle() -> None:
    extra = {
        "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5},
        "quantization_config": {"quant_method": "fp8"},
    }
    assert geometry_from_config({**LLAMA_3_70B, **extra}) == geometry_from_config(LLAMA_3_70B)


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"model_type": "mamba"}, "model_type", "llama, qwen2"),
        ({"model_type": None}, "model_type", "llama, qwen2"),
        ({"num_hidden_layers": None}, "num_hidden_layers", "missing"),
        ({"num_attention_heads": None}, "num_attention_heads", "missing"),
        ({"num_key_value_heads": None}, "num_key_value_heads", "a KV head of its own"),
        ({"hidden_size": None}, "hidden_size", "missing"),
        ({"vocab_size": None}, "vocab_size", "missing"),
        ({"max_position_embeddings": None}, "max_position_embeddings", "missing"),
        ({"num_hidden_layers": "28"}, "num_hidden_layers", "whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "from 1 to 10000"),
        ({"num_hidden_layers": 10**10}, "num_hidden_layers", "from 1 to 10000"),
        ({"num_hidden_layers": True}, "num_hidden_layers", "whole number"),
        ({"num_key_value_heads": 5}, "num_key_value_heads", "divisor of num_attention_heads = 28"),
        ({"num_attention_heads": 24}, "hidden_size", "multiple of num_attention_heads = 24"),
        ({"head_dim": -1}, "head_dim", "from 1 to"),
        ({"rope_scaling": 5}, "rope_scaling", "a mapping"),
        ({"rope_parameters": [1]}, "rope_parameters", "a mapping"),
        ({"layer_types": 7}, "layer_types", "a list"),
        ({"layer_types": [["full_attention"]]}, "layer_types", "a list of names"),
        ({"dtype": "float64"}, "dtype", "bfloat16"),
    ],
)
def test_what_is_missing_or_at_odds_is_named(change: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        geometry_from_config({**QWEN2_5_7B, **change})
    assert caught.value.field == field
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 9},
        {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 2},
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 9,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ],
)
def test_windows_are_those_of_transformers(given: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "hidden_size": 32, "vocab_size": 64, "max_position_embeddings": 128,
    }  # fmt: skip
    theirs = transformers.Qwen2Config(**sizes, **given)
    ours = geometry_from_config({"model_type": "qwen2", **sizes, **given})
    assert ours.layer_windows == tuple(
        theirs.sliding_window if kind == "sliding_attention" else None
        for kind in theirs.layer_types
    )
    # What transformers writes when it saves a config must read the same.
    assert geometry_from_config(theirs.to_diff_dict()) == ours


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"layer_types": ["chunked_attention"] * 28}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 28}, "layer_types"),  # and no window is in use
        ({"layer_types": ["full_attention"] * 27}, "layer_types"),
        ({"use_sliding_window": True, "max_window_layers": None}, "max_window_layers"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
    ],
)
def test_windows_that_make_no_sense_are_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        geometry_from_config({**QWEN2_5_7B, **change})
    assert caught.value.field == field


def test_a_geometry_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        geometry_from_config(QWEN2_5_7B).num_layers = 1  # type: ignore[misc]


def test_planning_loads_nothing_heavy() -> None:
    code = (
        "import sys, ascend_kv.plan.capacity, ascend_kv.model_files, ascend_kv.registry\n"
        "heavy = {'torch', 'transformers', 'numpy', 'gguf', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

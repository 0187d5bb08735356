"""Windows of the known model types, and what is refused with which reason."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_kv.architectures import KNOWN_MODEL_TYPES, check_servable, layer_windows
from ascend_kv.errors import UnsupportedModelError

LAYERS = 7


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama", "sliding_window": 5}, [None] * 7),
        ({"model_type": "mistral", "sliding_window": 5}, [5] * 7),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 7),
        ({"model_type": "mixtral"}, [None] * 7),
        ({"model_type": "qwen3_moe", "sliding_window": 5}, [None] * 7),
        ({"model_type": "qwen3_moe", "sliding_window": 5, "use_sliding_window": True}, [5] * 7),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 5,
                "use_sliding_window": True,
                "max_window_layers": 4,
            },
            [None] * 4 + [5] * 3,
        ),
        ({"model_type": "qwen3", "sliding_window": 5, "max_window_layers": 4}, [None] * 7),
        ({"model_type": "gemma3_text", "sliding_window": 5}, [5] * 5 + [None, 5]),
        (
            {"model_type": "gemma3_text", "sliding_window": 5, "sliding_window_pattern": 2},
            [5, None] * 3 + [5],
        ),
        (
            {
                "model_type": "gemma3_text",
                "sliding_window": 5,
                "layer_types": ["full_attention"] + ["sliding_attention"] * 6,
            },
            [None] + [5] * 6,
        ),
    ],
)
def test_windows(config: dict[str, Any], expected: list[int | None]) -> None:
    check_servable(config)
    assert list(layer_windows(config, LAYERS)) == expected


@pytest.mark.parametrize(
    ("config", "field", "reason"),
    [
        ({"model_type": "mamba"}, "model_type", "llama"),
        ({}, "model_type", "llama"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "is_encoder_decoder", "cross-attention"),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
            "layer_types",
            "keeps a state",
        ),
        (
            {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type",
            "longest sequence of a batch",
        ),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "longrope"}},
            "rope_type",
            "grows past",
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "dynamic"},
                },
            },
            "rope_type",
            "longest sequence",
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "use_bidirectional_attention",
            "causal",
        ),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping",
            "plain softmax",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(
    config: dict[str, Any], field: str, reason: str
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        check_servable(config)
    assert caught.value.field == field
    assert reason in str(caught.value)


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("model_type", KNOWN_MODEL_TYPES)
def test_rotary_scalings_with_fixed_angles_are_served(model_type: str, rope: str) -> None:
    check_servable({"model_type": model_type, "rope_parameters": {"rope_type": rope}})


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "mistral", "sliding_window": True}, "sliding_window"),
        ({"model_type": "gemma3_text", "sliding_window": "4k"}, "sliding_window"),
        (
            {"model_type": "qwen2", "sliding_window": 5, "use_sliding_window": True},
            "max_window_layers",
        ),
        (
            {"model_type": "qwen3", "sliding_window": 5, "layer_types": ["sliding_attention"] * 7},
            "layer_types",
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 5,
                "use_sliding_window": True,
                "layer_types": ["chunked_attention"] * 7,
            },
            "layer_types",
        ),
    ],
)
def test_windows_that_are_at_odds_are_refused(config: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        layer_windows(config, LAYERS)
    assert caught.value.field == field

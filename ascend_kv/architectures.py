"""What the known model types do about attention windows, and what cannot be served and why.

Each rule says how transformers reads the same config; ``integrations`` checks it against what
the model's attention layers really pass on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ascend_kv.errors import UnsupportedModelError
from ascend_kv.model_config import layer_types_of, rope_of

_SWITCHED = ("qwen2", "qwen3")
"""Windows in the layers that layer_types or max_window_layers names, if use_sliding_window."""
_UNIFORM = ("mistral", "mixtral", "qwen3_moe")
"""sliding_window holds for all layers or for none."""
_PATTERN = ("gemma3_text",)
"""Windows in all layers but every sixth."""

COMPRESSED_MODEL_TYPES = ("deepseek_v4",)
"""A window in every layer; most attend to compressed entries too (``compressed_layers``)."""

KNOWN_MODEL_TYPES = ("llama", *_SWITCHED, *_UNIFORM, *_PATTERN, *COMPRESSED_MODEL_TYPES)

_GEMMA3_PATTERN = 6

_CHANGING_ROPE = {
    "dynamic": "its angles change with the longest sequence of a batch",
    "longrope": "its angles change when a sequence grows past the original length",
}


def check_servable(config: Mapping[str, Any]) -> None:
    """Refuse what a packed batch over a paged cache cannot do, by name and with the reason.

    Args:
        config: a Hugging Face ``config.json``.

    Raises:
        UnsupportedModelError: an unknown model type, an encoder-decoder, linear attention,
            rotary angles that change with length, or attention that is not causal.
    """
    if config.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            "is_encoder_decoder", True, "decoder-only models",
            "An encoder-decoder's cross-attention has a cache of another kind.",
        )  # fmt: skip
    if "linear_attention" in layer_types_of(config):
        raise UnsupportedModelError(
            "layer_types", "linear_attention", "full_attention, sliding_attention",
            "Linear attention keeps a state, not keys and values.",
        )  # fmt: skip
    model_type = config.get("model_type")
    if model_type not in KNOWN_MODEL_TYPES:
        raise UnsupportedModelError("model_type", model_type, KNOWN_MODEL_TYPES)
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention", True, "false: causal attention")
    if config.get("attn_logit_softcapping") is not None:
        raise UnsupportedModelError(
            "attn_logit_softcapping", config["attn_logit_softcapping"], "null: plain softmax"
        )
    for name in _rope_types(config):
        if name in _CHANGING_ROPE:
            raise UnsupportedModelError(
                "rope_type", name, "default, linear, llama3, yarn",
                f"In a packed batch every token's rotation must stay: {_CHANGING_ROPE[name]}.",
            )  # fmt: skip


def layer_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """For each layer the number of latest tokens a query sees, None where it sees all.

    Raises:
        UnsupportedModelError: names the field that is missing or at odds.
    """
    model_type = config["model_type"]
    window = config.get("sliding_window")
    if model_type == "llama" or window is None:
        return (None,) * num_layers
    if model_type in (*_SWITCHED, "qwen3_moe") and not config.get("use_sliding_window"):
        window = None
    elif isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise UnsupportedModelError("sliding_window", window, "a whole number of at least 1")
    if model_type in (*_UNIFORM, *COMPRESSED_MODEL_TYPES):
        return (window,) * num_layers
    layer_types = layer_types_of(config) or _default_layer_types(config, num_layers, window)
    kinds: dict[str, int | None] = {"full_attention": None}
    if window is not None:
        kinds["sliding_attention"] = window
    for kind in layer_types:
        if kind not in kinds:
            hint = "" if window else "Windows need use_sliding_window and sliding_window."
            raise UnsupportedModelError("layer_types", kind, kinds, hint)
    return tuple(kinds[kind] for kind in layer_types)


def _default_layer_types(
    config: Mapping[str, Any], num_layers: int, window: int | None
) -> Sequence[str]:
    """Layer types where the config has none, as older checkpoints."""
    kinds = ("full_attention", "sliding_attention")
    if config["model_type"] in _PATTERN:
        pattern = config.get("sliding_window_pattern") or _GEMMA3_PATTERN
        return [kinds[(layer + 1) % pattern != 0] for layer in range(num_layers)]
    if window is None:
        return ["full_attention"] * num_layers
    first = config.get("max_window_layers")
    if not isinstance(first, int):
        raise UnsupportedModelError(
            "max_window_layers", first, "the number of the first layer with a window"
        )
    return [kinds[layer >= first] for layer in range(num_layers)]


def _rope_types(config: Mapping[str, Any]) -> list[str]:
    """Rotary types of a config, which has one for all layers or one for each layer type."""
    parameters = rope_of(config)
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]
    return [str(kind.get("rope_type", kind.get("type", "default"))) for kind in kinds]

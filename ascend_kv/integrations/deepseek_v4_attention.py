"""DeepSeek-V4's attention in Hugging Face's modules, with a forward of our own.

transformers keeps one state for a whole batch, in the cache that it makes, so packed tokens of
many sequences need another forward over the same weights. It replaces the one of each attention
module of a loaded model; everything around (hyper-connections, experts, norms) stays theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch

from ascend_kv.compressed_layers import CompressedLayers
from ascend_kv.errors import RunError, UnsupportedModelError
from ascend_kv.integrations.attention import STEP_KEYWORD
from ascend_kv.integrations.deepseek_v4_layer import LayerInput, turn_last
from ascend_kv.integrations.deepseek_v4_step import CompressedStep

Tensor = torch.Tensor

_PARTS = (
    *("q_a_proj", "q_a_norm", "q_b_proj", "q_b_norm", "kv_proj", "kv_norm"),
    *("o_a_proj", "o_b_proj", "sinks", "compressor"),
)
_COMPRESSOR_PARTS = ("kv_proj", "gate_proj", "position_bias", "kv_norm", "rotary_emb")


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: Mapping[str, tuple[Tensor, Tensor]],
    position_ids: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The forward of an attention module, over the cache of the step.

    Args:
        self: Hugging Face's ``DeepseekV4Attention``.
        hidden_states: ``[1, T, hidden]``.
        position_embeddings: by "main" and "compress" cosine and sine ``[1, T, R / 2]``.
        position_ids: ``[1, T]``. attention_mask: not looked at: tables keep sequences apart.
        options: whatever else the model passes; ``ascend_kv_step`` is the step.

    Returns:
        ``[1, T, hidden]``, and None in place of the attention weights.
    """
    step: CompressedStep | None = options.get(STEP_KEYWORD)
    if step is None:
        raise RunError(
            "this model was loaded for the compressed cache and runs through ascend_kv's engine "
            "only; call LLM.generate, or load it with transformers for a plain forward"
        )
    rotation = position_embeddings[self.rope_layer_type]
    cosine, sine = rotation[0][0], rotation[1][0]
    hidden = hidden_states[0]
    residual = self.q_a_norm(self.q_a_proj(hidden))
    query = self.q_b_norm(self.q_b_proj(residual).unflatten(1, (-1, self.head_dim)))
    key = self.kv_norm(self.kv_proj(hidden))[:, None]
    given = LayerInput(
        module=self,
        query=turn_last(query, cosine, sine),
        key=turn_last(key, cosine, sine)[:, 0],
        hidden=hidden,
        residual=residual,
        rotation=rotation,
    )
    # A value is its key, turned at its own position; turning back at the query's leaves the
    # distance between the two.
    output = turn_last(step.attend(self.layer_idx, given), cosine, -sine)
    grouped = output.reshape(1, len(output), self.config.o_groups, -1)
    return self.o_b_proj(self.o_a_proj(grouped).flatten(2)), None


def install(hf_model: Any, layers: CompressedLayers) -> None:
    """Give every attention module the forward above, after a look at what it is made of.

    Raises:
        UnsupportedModelError: a module that is not as DeepSeek-V4's of transformers, or at odds
            with the configuration.
    """
    blocks = hf_model.base_model.layers
    if len(blocks) != len(layers.kinds):
        raise UnsupportedModelError("num_hidden_layers", len(blocks), f"{len(layers.kinds)}")
    for number, (block, kind) in enumerate(zip(blocks, layers.kinds, strict=True)):
        _check(block.self_attn, kind, layers, f"layers.{number}.self_attn")
        block.self_attn.forward = MethodType(attention_forward, block.self_attn)


def make_rotary_table(hf_model: Any, max_positions: int) -> Tensor:
    """Cosine and sine of the compressed layers, ``[max_positions, R / 2, 2]`` float32."""
    device = hf_model.device
    positions = torch.arange(max_positions, device=device)[None]
    like = torch.empty(0, dtype=torch.float32, device=device)
    embedding = hf_model.base_model.rotary_emb
    cosine, sine = embedding(like, position_ids=positions, layer_type="compress")
    return torch.stack((cosine[0], sine[0]), -1)


def _check(attention: Any, kind: str, layers: CompressedLayers, name: str) -> None:
    for part in _PARTS:
        _require(attention, part, name)
    if attention.head_dim != layers.head_dim or attention.sliding_window != layers.window_tokens:
        given = (attention.head_dim, attention.sliding_window)
        legal = f"head_dim and window {(layers.head_dim, layers.window_tokens)}, as the config says"
        raise UnsupportedModelError(name, given, legal)
    compressor = attention.compressor
    if kind == "window":
        if compressor is not None:
            raise UnsupportedModelError(f"{name}.compressor", "one", "none in a window's layer")
        return
    if compressor is None:
        raise UnsupportedModelError(f"{name}.compressor", "none", f"one of {kind}")
    modules = [(compressor, f"{name}.compressor")]
    if kind == "csa":
        _require(compressor, "indexer", f"{name}.compressor")
        modules.append((compressor.indexer, f"{name}.compressor.indexer"))
    for module, where in modules:
        for part in _COMPRESSOR_PARTS:
            _require(module, part, where)
        if module.compress_rate != layers.ratio(kind):
            raise UnsupportedModelError(where, module.compress_rate, f"{layers.ratio(kind)}")


def _require(module: Any, part: str, name: str) -> None:
    if not hasattr(module, part):
        legal = f"DeepSeek-V4 of transformers, which has a {part}"
        raise UnsupportedModelError(name, f"a {type(module).__name__} without {part}", legal)

"""Lets a model show that conditioned keys give the scores that its own keys give.

A few tokens run through the model while attention returns zeros, so that what enters a layer does
not depend on the layers before, and the queries and keys of every layer can be compared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from ascend_kv.geometry import ModelGeometry
from ascend_kv.integrations.attention import STEP_KEYWORD
from ascend_kv.integrations.key_offset import KeyOffset
from ascend_kv.integrations.key_weights import find_attention
from ascend_kv.integrations.rotary import watched_rotary

Tensor = torch.Tensor

# Rounding steps of the model's type by which a score may differ, of what it is summed from. Scales
# alone change nothing, or a last bit in float16; a large bias loses that much in the model's own
# sum, cosines and sines.
_STEPS_OF_SCALES = 1
_STEPS_OF_OFFSET = 8


class LayerKeys(NamedTuple):
    """What one layer brought to attention."""

    query: Tensor
    """[T, H, D] after rotation"""
    key: Tensor
    """[T, N, D] after rotation"""
    rotary_dim: int | None
    """leading channels that are rotated; None where no cosine was handed to the layer"""
    norm_head_axis: int | None = None
    """which axis of what its key norm gives has the heads; None without such a norm"""


class _Recorder:
    def __init__(self) -> None:
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int,
    ) -> Tensor:
        self.seen[layer] = query.clone(), key.clone()
        return torch.zeros_like(query)


def trial_positions(geometry: ModelGeometry) -> list[int]:
    """Near and far, so that slow pairs turn too; never as many as KV heads, to tell the two."""
    last = geometry.max_position_tokens - 1
    positions = sorted({0, min(1, last), last // 2, last})
    if len(positions) == geometry.num_kv_heads > 1:
        del positions[1]
    return positions


@torch.inference_mode()
def try_keys(hf_model: Any, geometry: ModelGeometry) -> dict[int, LayerKeys]:
    """Queries and keys of every layer for a few tokens, with the weights as they are now."""
    positions = trial_positions(geometry)
    device = hf_model.device
    recorder = _Recorder()
    head_axes: dict[int, int] = {}

    def note_norm(layer: int, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() == 4:
            head_axes[layer] = 1 if output.shape[1] == geometry.num_kv_heads else 2

    hooks = []
    for layer, (attention, _) in find_attention(hf_model).items():
        if isinstance(getattr(attention, "k_norm", None), nn.Module):
            hooks.append(
                attention.k_norm.register_forward_hook(
                    lambda module, given, output, layer=layer: note_norm(layer, output)
                )
            )
    try:
        with watched_rotary(hf_model) as angles:
            hf_model(
                input_ids=torch.arange(len(positions), device=device)[None] % geometry.vocab_size,
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
                **{STEP_KEYWORD: recorder},
            )
    finally:
        for hook in hooks:
            hook.remove()
    rotary_dims = {layer: 2 * x.shape[1] for layer, x in angles.items()}
    return {
        layer: LayerKeys(query, key, rotary_dims.get(layer), head_axes.get(layer))
        for layer, (query, key) in recorder.seen.items()
    }


@torch.inference_mode()
def same_scores(layer: int, before: LayerKeys, after: LayerKeys, offset: KeyOffset | None) -> bool:
    """Whether the scores of all queries with all keys are the same up to rounding.

    The offset's table has a row for each of the trial's tokens.
    """
    key, steps = after.key, _STEPS_OF_SCALES
    if offset is not None and layer in offset:
        steps = _STEPS_OF_OFFSET
        key = offset.give_back(layer, key, torch.arange(len(key), device=key.device))
    eps = torch.finfo(before.key.dtype).eps
    allowed = steps * eps * _scores(before.query.abs(), before.key.abs()).max()
    error = (_scores(after.query, key) - _scores(before.query, before.key)).abs().max()
    return bool(error <= allowed)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """[N, G, T, T] in float32."""
    tokens, kv_heads, dim = key.shape
    grouped = query.float().view(tokens, kv_heads, -1, dim)
    return torch.einsum("qngd,knd->ngqk", grouped, key.float())

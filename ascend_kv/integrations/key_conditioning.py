"""Key conditioning: what is done to a model's keys at load, so that few bits keep them well.

Two transformations that leave the model's function as it is:

* **Pair scaling.** Each rotary pair of key channels is divided by a power of two and the same
  pair of the queries multiplied by it. q . k stays, to the last bit unless a half type ends; the
  channels of a key become equally large, and share a quantization scale without loss.
* **Key offset.** The key bias is taken out of ``k_proj``, so that keys arrive and are stored
  without it, and attention gives it back (``key_offset``). Where a text has been seen, the mean of
  its keys takes the bias's place (``key_statistics``); that needs no bias, and no other data.

Here is the record of what was done. ``key_planning`` decides, ``key_folding`` does it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ascend_kv.integrations.key_folding import Fold
from ascend_kv.integrations.key_offset import (
    KeyOffset,
    find_rotation,
    holds_rotation,
    make_rotary_table,
)
from ascend_kv.integrations.loading import LoadedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerConditioning:
    """What was done to one layer, and why."""

    layer: int
    bias_share: float
    """‖key bias‖ / ‖what varies‖ in the head where it is largest, from the weights alone; with
    statistics of a text ‖mean key‖ / ‖deviation‖"""
    pair_scaled: bool
    lowest_exponent: int
    highest_exponent: int
    """keys were divided by two to these powers"""
    scaling_reason: str
    offset: bool
    """keys are stored without their bias, or their mean"""
    offset_norm: float
    """‖what stored keys lack‖ in the head where it is largest, scaled as they are"""
    offset_reason: str


@dataclass(frozen=True)
class KeyConditioning:
    """What was done to a model's keys, and what the offset costs; pair scaling costs nothing."""

    layers: tuple[LayerConditioning, ...]
    rounded_weights: int
    """elements that pair scaling had to round (float16 below its normal range)"""
    offset_bytes: int
    table_position_bytes: int
    """the cosine/sine table, per position up to max_model_len, shared by all layers"""
    score_bias_bytes: int
    """where attention wants the bias whole, as on an NPU (native on a CPU it does not): made anew
    in every step, per query token and cached position, over all layers"""
    identity: str
    """differs where stored keys differ; empty where nothing was done"""
    calibrated: bool = False
    """offsets are mean keys of a text, not the model's key bias"""

    @property
    def scaled_layers(self) -> tuple[int, ...]:
        """Layers whose pairs were scaled."""
        return tuple(layer.layer for layer in self.layers if layer.pair_scaled)

    @property
    def offset_layers(self) -> tuple[int, ...]:
        """Layers whose keys are stored without their bias."""
        return tuple(layer.layer for layer in self.layers if layer.offset)

    @property
    def exponent_range(self) -> tuple[int, int]:
        """Keys were divided by powers of two from the first exponent to the second."""
        exponents = [0]
        for layer in self.layers:
            exponents += [layer.lowest_exponent, layer.highest_exponent]
        return min(exponents), max(exponents)

    def __str__(self) -> str:
        scaled, offset = len(self.scaled_layers), self.offset_layers
        if not scaled and not offset:
            return "keys as the model makes them"
        low, high = self.exponent_range
        return (
            f"pair scales 2^{low} to 2^{high} in {scaled} of {len(self.layers)} layers, "
            f"key offset{' (mean key of a text)' * (self.calibrated and bool(offset))} in "
            f"{f'layers {list(offset)}' if offset else 'none'}"
        )


UNCONDITIONED = KeyConditioning((), 0, 0, 0, 0, "")
"""Nothing was done to any layer."""


class ConditionedKeys(NamedTuple):
    """A plan for a model's weights."""

    conditioning: KeyConditioning
    folds: Mapping[int, Fold]
    offsets: Mapping[int, torch.Tensor]
    """by layer ``[N, D]`` float32, what stored keys lack before rotation"""

    def make_offset(self, loaded: LoadedModel, max_positions: int) -> KeyOffset | None:
        """What attention needs to give the offsets back; None if there are none."""
        if not self.offsets:
            return None
        embedding = loaded.hf_model.base_model.rotary_emb
        dim = loaded.geometry.head_dim
        table = make_rotary_table(embedding, dim, range(max_positions))
        rotation = find_rotation(embedding)
        places = [n for n in (0, 1, *(2**bit - 1 for bit in range(2, 40))) if n < max_positions]
        places.append(max_positions - 1)
        if not holds_rotation(table[places], places, rotation):
            logger.warning(
                "the rotary embedding turns keys otherwise than its frequencies say: what the key "
                "offset adds to scores is made whole in every step, which is slower"
            )
            return KeyOffset(self.offsets, table)
        return KeyOffset(self.offsets, table, rotation)

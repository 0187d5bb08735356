"""Decides which layers' keys are conditioned, from the weights and the formats alone.

Every layer is tried on a few tokens before and after (``key_trial``); one whose scores change is
left alone, and the record says so.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ascend_kv.config import KeyOffsetLayers, PairScaling
from ascend_kv.errors import UsageError
from ascend_kv.geometry import FormatSpec, LayerFormat, ModelGeometry
from ascend_kv.integrations.key_conditioning import (
    ConditionedKeys,
    KeyConditioning,
    LayerConditioning,
)
from ascend_kv.integrations.key_folding import Fold, powers_of_two
from ascend_kv.integrations.key_offset import KeyOffset, make_rotary_table
from ascend_kv.integrations.key_statistics import KeyStatistics
from ascend_kv.integrations.key_trial import same_scores, trial_positions, try_keys
from ascend_kv.integrations.key_weights import KeyWeights, layers_of, pair_exponents
from ascend_kv.integrations.loading import LoadedModel
from ascend_kv.resolved_cache import layer_numbers

logger = logging.getLogger(__name__)
Tensor = torch.Tensor

# "auto" takes the offset where the bias is this many times as large as what varies. At 8, of INT8's
# 127 levels 16 or fewer are left to a key. FP8 loses to a constant however it is scaled, and INT4
# has no level to spare. Divergence of the attention weights from those over exact keys, summed over
# the layers of Qwen2.5-Coder-0.5B with scaled pairs (224 tokens): E4M3 5.74 without offset, 0.13
# with it above 3, 0.08 in all layers; INT4 asymmetric and rotated 23.0, 1.7 and 0.93. In windows of
# 2,048 tokens the model's words diverge by a third more with E4M3 above 3 than in all layers, and
# perplexity is the same (recipes/formats.md). E5M2 was not measured, it is taken from E4M3.
OFFSET_SHARE = {"int8": 8.0, "fp8_e4m3": 0.5, "fp8_e5m2": 0.5, "int4": 0.5}
# With scaled pairs a bias costs its own pair only. INT8 stands that unless what varies in the pair
# (three times its size) is left fewer than 2 of 127 levels.
SCALED_INT8_SHARE = 64.0


def condition_keys(
    loaded: LoadedModel,
    formats: Sequence[LayerFormat],
    pair_scaling: PairScaling = "auto",
    key_offset_layers: KeyOffsetLayers | Sequence[int] = "auto",
    statistics: KeyStatistics | None = None,
) -> ConditionedKeys:
    """Plan the conditioning of a model for a cache; its weights are changed when it is used.

    Args:
        loaded: the model; left with its weights as they were loaded.
        formats: one for each layer.
        pair_scaling: "auto": in every layer that is quantized; True: in every layer.
        key_offset_layers: "auto": where the format and the size of the bias call for it; "all":
            every layer that has a key bias; "none"; or the layers.
        statistics: of the keys of a text: their means are the offsets then, not the key bias.

    Raises:
        UsageError: a layer that the model has not got, or asked for and impossible.
    """
    wanted = _wanted_offsets(key_offset_layers, loaded.geometry.num_layers)
    options = (tuple(formats), pair_scaling, wanted, statistics and statistics.identity)
    plans = loaded.folding.plans
    if options not in plans:
        plans[options] = _Planner(loaded, formats, pair_scaling, wanted, statistics).plan()
        logger.info("key conditioning: %s", plans[options].conditioning)
    plan: ConditionedKeys = plans[options]
    return plan


def _wanted_offsets(given: KeyOffsetLayers | Sequence[int], layers: int) -> str | tuple[int, ...]:
    return given if isinstance(given, str) else layer_numbers("key_offset_layers", given, layers)


class _Decision(NamedTuple):
    yes: bool
    reason: str


class _Constant(NamedTuple):
    """What all keys of a layer have in common, as far as is known."""

    vector: Tensor
    """[N, D] float32, before rotation and scaling; [1, D] of zeros where a norm follows"""
    share: float
    """its norm against that of what varies, in the head where it is largest"""
    pair_share: Callable[[int], float]
    """from the rotary dimension: the like of the pair where it is largest, over three"""


class _Draft(NamedTuple):
    """What is meant for one layer."""

    scaling: _Decision
    offset: _Decision
    bias_share: float = 0.0
    fold: Fold | None = None
    lacks: Tensor | None = None
    """[N, D] float32, what its stored keys lack before rotation"""


class _Planner:
    """Decides layer by layer, then lets the model itself confirm it."""

    def __init__(
        self,
        loaded: LoadedModel,
        formats: Sequence[LayerFormat],
        pair_scaling: PairScaling,
        offsets: str | tuple[int, ...],
        statistics: KeyStatistics | None,
    ) -> None:
        self._loaded = loaded
        self._formats = [spec.key for spec in formats]  # values are not conditioned
        self._pair_scaling, self._offsets = pair_scaling, offsets
        self._seen = {} if statistics is None else statistics.layers
        loaded.folding.use(None)
        self._before = try_keys(loaded.hf_model, loaded.geometry)
        self._embedding = getattr(loaded.hf_model.base_model, "rotary_emb", None)

    def plan(self) -> ConditionedKeys:
        layers = layers_of(self._loaded.hf_model, self._loaded.geometry)
        drafts = [self._draft(layer, weights) for layer, weights in layers]
        while True:
            self._refuse_unmet_demands(drafts)
            keys = _collect(drafts, self._loaded.geometry)
            wrong, rounded = self._try(keys)
            if not wrong:
                conditioning = replace(
                    keys.conditioning, rounded_weights=rounded, calibrated=bool(self._seen)
                )
                return keys._replace(conditioning=conditioning)
            no = _Decision(False, "its scores change with it: its keys are made in another way")
            logger.warning("keys of layers %s are not conditioned: %s", wrong, no.reason)
            for layer in wrong:
                drafts[layer] = _Draft(no, no, drafts[layer].bias_share)

    def _draft(self, layer: int, weights: KeyWeights | str) -> _Draft:
        rotary_dim = self._before[layer].rotary_dim
        if isinstance(weights, KeyWeights) and rotary_dim is None:
            weights = "no rotary embedding is handed to its attention"
        if isinstance(weights, str) or rotary_dim is None:
            no = _Decision(False, str(weights))
            return _Draft(no, no)
        constant = self._constant(layer, weights)
        scaling = self._decide_scaling(layer)
        offset = self._decide_offset(layer, weights, constant, rotary_dim, scaling.yes)
        if self._pair_scaling == "auto" and self._formats[layer].hadamard:
            scaling = _scaling_of_rotated(constant, offset.yes)
        exponents = lacks = None
        if scaling.yes:
            exponents = pair_exponents(weights, rotary_dim, with_bias=not offset.yes)
        if offset.yes:
            lacks = constant.vector
            if exponents is not None:
                lacks = lacks * powers_of_two(-exponents, lacks)
        fold = None
        if scaling.yes or offset.yes:
            fold = Fold(weights, exponents, lacks, self._before[layer].norm_head_axis)
        return _Draft(scaling, offset, constant.share, fold, lacks)

    def _constant(self, layer: int, weights: KeyWeights) -> _Constant:
        seen = self._seen.get(layer)
        if seen is None:
            return _Constant(weights.bias, weights.bias_share, weights.pair_bias_share)
        mean = _as_stored(seen.mean, weights)
        observed = weights._replace(own=seen.deviation, bias=mean)
        return _Constant(mean, observed.bias_share, observed.pair_bias_share)

    def _decide_scaling(self, layer: int) -> _Decision:
        if self._pair_scaling is False:
            return _Decision(False, "switched off")
        if self._pair_scaling is True:
            return _Decision(True, "asked for")
        if not self._formats[layer].quantized:
            return _Decision(False, f"{self._formats[layer].name} channels share no scale")
        if self._formats[layer].granularity == "channel":
            return _Decision(False, "every channel has a quantization scale of its own")
        return _Decision(True, "channels share a quantization scale")

    def _decide_offset(
        self,
        layer: int,
        weights: KeyWeights,
        constant: _Constant,
        rotary_dim: int,
        scaled: bool,
    ) -> _Decision:
        if self._offsets == "none":
            return _Decision(False, "switched off")
        if not isinstance(self._offsets, str) and layer not in self._offsets:
            return _Decision(False, "not among key_offset_layers")
        obstacle = self._offset_obstacle(layer, weights, constant, rotary_dim)
        if obstacle:
            return _Decision(False, obstacle)
        if self._offsets != "auto":
            return _Decision(True, "asked for")
        return _auto_offset(self._formats[layer], constant, rotary_dim, scaled)

    def _offset_obstacle(
        self, layer: int, weights: KeyWeights, constant: _Constant, rotary_dim: int
    ) -> str:
        if weights.norm_base is not None and layer not in self._seen:
            return "its keys pass a norm after the bias"
        if weights.norm_base is not None and self._before[layer].norm_head_axis is None:
            return "what its key norm gives has no axis of heads"
        if not constant.vector.any():
            return "no key bias"
        if not hasattr(self._embedding, "inv_freq"):
            return "its rotary embedding is not the same for all layers"
        if rotary_dim != self._loaded.geometry.head_dim:
            return f"only {rotary_dim} of its channels are rotated"
        return ""

    def _refuse_unmet_demands(self, drafts: Sequence[_Draft]) -> None:
        for layer, draft in enumerate(drafts):
            if self._pair_scaling is True and not draft.scaling.yes:
                hint = f"Layer {layer}: {draft.scaling.reason}."
                raise UsageError("pair_scaling", True, "auto or false with this model", hint)
            demanded = not isinstance(self._offsets, str) and layer in self._offsets
            if demanded and not draft.offset.yes:
                hint = f"{draft.offset.reason}."
                raise UsageError("key_offset_layers", layer, "another layer, or auto", hint)

    def _try(self, keys: ConditionedKeys) -> tuple[list[int], int]:
        """Layers whose scores change, and how many weights were rounded."""
        loaded = self._loaded
        offset, folding = self._trial_offset(keys), loaded.folding
        folding.use(keys.folds)
        try:
            after = try_keys(loaded.hf_model, loaded.geometry)
            rounded = folding.rounded_weights
        finally:
            folding.use(None)
        wrong = [
            layer
            for layer in keys.folds
            if not same_scores(layer, self._before[layer], after[layer], offset)
        ]
        return wrong, rounded

    def _trial_offset(self, keys: ConditionedKeys) -> KeyOffset | None:
        if not keys.offsets:
            return None
        geometry = self._loaded.geometry
        positions = trial_positions(geometry)
        table = make_rotary_table(self._embedding, geometry.head_dim, positions)
        return KeyOffset(keys.offsets, table)


def _as_stored(mean: Tensor, weights: KeyWeights) -> Tensor:
    """What keys really lack once the mean is out, for what takes it out has the weights' type."""
    if weights.norm_base is not None:
        return mean.to(weights.attention.k_norm.weight.dtype).float()
    rest = (weights.bias - mean).to(weights.attention.k_proj.weight.dtype)
    return weights.bias - rest.float()


def _auto_offset(spec: FormatSpec, constant: _Constant, rotary_dim: int, scaled: bool) -> _Decision:
    if not spec.quantized:
        return _Decision(False, f"{spec.name} keys are not quantized")
    # where channels have scales of their own, a bias costs its own pair only, as with scaled pairs
    if spec.name == "int8" and (scaled or spec.granularity == "channel"):
        share, least = constant.pair_share(rotary_dim), SCALED_INT8_SHARE
        scales = "scaled pairs" if scaled else "scales of channels"
        what = f"INT8 with {scales}, its largest pair bias against that pair's keys"
    else:
        share, least = constant.share, OFFSET_SHARE[spec.name]
        what = f"{spec.name}, its bias against its keys"
    comparison = "above" if share > least else "at most"
    return _Decision(share > least, f"{what}: {share:.1f}, {comparison} {least:g}")


def _scaling_of_rotated(constant: _Constant, without_bias: bool) -> _Decision:
    # scaling them as well cost quality where no bias was left (recipes/formats.md), and saved much
    # where one was (recipes/eval.md)
    if without_bias or constant.share <= OFFSET_SHARE["int4"]:
        return _Decision(False, "a rotation spreads the channels")
    return _Decision(True, "a rotation spreads the key bias, too, over all channels")


def _collect(drafts: Sequence[_Draft], geometry: ModelGeometry) -> ConditionedKeys:
    folds = {layer: draft.fold for layer, draft in enumerate(drafts) if draft.fold is not None}
    offsets = {layer: draft.lacks for layer, draft in enumerate(drafts) if draft.lacks is not None}
    conditioning = KeyConditioning(
        layers=tuple(_record(layer, draft) for layer, draft in enumerate(drafts)),
        rounded_weights=0,
        offset_bytes=sum(offset.nbytes for offset in offsets.values()),
        table_position_bytes=4 * geometry.head_dim if offsets else 0,
        score_bias_bytes=4 * geometry.num_heads * len(offsets),
        identity=_identity(folds, offsets),
    )
    return ConditionedKeys(conditioning, folds, offsets)


def _record(layer: int, draft: _Draft) -> LayerConditioning:
    exponents = None if draft.fold is None else draft.fold.exponents
    low, high = (0, 0) if exponents is None else (int(x) for x in exponents.aminmax())
    return LayerConditioning(
        layer=layer,
        bias_share=draft.bias_share,
        pair_scaled=draft.scaling.yes,
        lowest_exponent=low,
        highest_exponent=high,
        scaling_reason=draft.scaling.reason,
        offset=draft.offset.yes,
        offset_norm=0.0 if draft.lacks is None else float(draft.lacks.norm(dim=1).max()),
        offset_reason=draft.offset.reason,
    )


def _identity(folds: Mapping[int, Fold], offsets: Mapping[int, Tensor]) -> str:
    if not folds:
        return ""
    digest = hashlib.sha256()
    for layer, fold in folds.items():
        for tensor in (fold.exponents, offsets.get(layer)):
            digest.update(f"{layer} {None if tensor is None else tensor.tolist()}\n".encode())
    return digest.hexdigest()[:16]

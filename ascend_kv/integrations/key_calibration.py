"""Runs a text through a model and notes what its caches may know beforehand.

``observe_keys`` gives the mean and the spread of keys before rotation (``key_statistics``), for
the key offset; ``observe_scales`` gives static scales (``cache.static_scales``), of keys that are
conditioned as they will be stored. The text runs in pieces of ``PIECE_TOKENS``, each by itself and
with the model's own attention over keys as they are: nothing is quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from ascend_kv.errors import UsageError
from ascend_kv.formats import format_named, reduced_dims
from ascend_kv.geometry import FormatSpec, LayerFormat
from ascend_kv.integrations.attention import STEP_KEYWORD
from ascend_kv.integrations.key_conditioning import ConditionedKeys
from ascend_kv.integrations.key_statistics import (
    METADATA,
    KeyStatistics,
    LayerStatistics,
    fingerprint,
    load_statistics,
    statistics_entries,
)
from ascend_kv.integrations.loading import LoadedModel
from ascend_kv.integrations.rotary import turn, watched_rotary

Tensor = torch.Tensor

PIECE_TOKENS = 512
_FEWEST_TOKENS = 2
_SHARED = ("layer", "head", "channel")


def observe_keys(loaded: LoadedModel, token_ids: Sequence[int]) -> dict[str, Any]:
    """Statistics of the keys that a text makes; see ``key_statistics`` for what is in them.

    Args:
        loaded: the model; its weights are as they were loaded meanwhile and afterwards.
        token_ids: of the text. A few thousand do: the mean is of one vector a head.

    Raises:
        UsageError: fewer than two tokens, or a model without rotary keys.
    """
    loaded.folding.use(None)
    seen = _run(loaded, token_ids, _Moments)
    return statistics_entries(
        {layer: moments.statistics() for layer, moments in sorted(seen.items())},
        fingerprint(loaded.hf_model),
        len(token_ids),
    )


def observe_scales(
    loaded: LoadedModel,
    keys: ConditionedKeys,
    formats: Sequence[LayerFormat],
    token_ids: Sequence[int],
) -> dict[str, Any]:
    """Static scales that hold every key and value of a text without clipping.

    Args:
        loaded: the model.
        keys: how its keys are conditioned.
        formats: one for each layer; those without static scales get none.
        token_ids: of the text.

    Returns:
        What ``kv_cache_scales`` takes.

    Raises:
        UsageError: fewer than two tokens, or scales by position.
    """
    for spec in (side for layer in formats for side in (layer.key, layer.value) if side.static):
        if spec.granularity not in _SHARED:
            raise UsageError("granularity", spec.granularity, f"{', '.join(_SHARED)} from a text")
    loaded.folding.use(keys.folds)
    try:
        seen = _run(loaded, token_ids, _Range)
    finally:
        loaded.folding.use(None)
    entries: dict[str, Any] = {METADATA: {"key_conditioning": keys.conditioning.identity}}
    for layer, (each, extremes) in enumerate(zip(formats, _in_order(seen), strict=True)):
        for side, kind in (("key", each.key), ("value", each.value)):
            if kind.static:
                for name, tensor in _static_scales(kind, extremes.of(side)).items():
                    entries[f"layers.{layer}.{side}_{name}"] = tensor
    return entries


def read_key_calibration(
    loaded: LoadedModel, source: str | Mapping[str, Any] | None
) -> KeyStatistics | None:
    """A user's ``key_calibration``, checked against the model's weights; None where none is given.

    Raises:
        UsageError: as ``load_statistics``.
    """
    if source is None:
        return None
    loaded.folding.use(None)
    return load_statistics(source, loaded.geometry, fingerprint(loaded.hf_model))


class _Moments:
    """Sums of one layer's keys, turned back by their positions."""

    def __init__(self) -> None:
        self.tokens = 0
        self.total = self.squares = torch.zeros(1, dtype=torch.float64)

    def add(self, key: Tensor, value: Tensor, angles: Tensor | None) -> None:
        if angles is None:
            legal = "a model that hands rotary embeddings to its attention"
            raise UsageError("model", "keys without a rotary embedding", legal)
        unrotated = turn(key, angles, back=True).to(device="cpu", dtype=torch.float64)
        self.tokens += len(key)
        self.total = self.total + unrotated.sum(0)
        self.squares = self.squares + unrotated.square().sum(0)

    def statistics(self) -> LayerStatistics:
        mean = self.total / self.tokens
        variance = (self.squares / self.tokens - mean.square()).clamp(min=0)
        return LayerStatistics(mean.float(), variance.sqrt().float())


class _Range:
    """Smallest and largest of one layer's keys and values, ``[N, D]``.

    Of keys, for any position: the rotary embedding moves what a pair of channels holds from one to
    the other, so each may come to hold the pair's norm at a position that the text has not.
    """

    def __init__(self) -> None:
        self._sides: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, key: Tensor, value: Tensor, angles: Tensor | None) -> None:
        reach = _pair_norms(key, 0 if angles is None else 2 * angles.shape[1])
        for side, x in (("key", torch.cat((reach, -reach))), ("value", value)):
            low, high = x.float().aminmax(dim=0)
            if side in self._sides:
                low = torch.minimum(low, self._sides[side][0])
                high = torch.maximum(high, self._sides[side][1])
            self._sides[side] = low, high

    def of(self, side: str) -> Tensor:
        """``[1, N, 2, D]``, a smallest and a largest token."""
        return torch.stack(self._sides[side], -2)[None].cpu()


def _in_order(seen: Mapping[int, _Range]) -> list[_Range]:
    return [seen[layer] for layer in sorted(seen)]


def _static_scales(spec: FormatSpec, extremes: Tensor) -> dict[str, Tensor]:
    """Those that the format would choose, had it only these two tokens to hold."""
    assert spec.granularity is not None, "only quantized formats have scales"
    dims = reduced_dims(spec.granularity)
    encoded = format_named(spec.name).encode(extremes, dims, spec.symmetric)
    assert encoded.scale is not None, "only quantized formats have scales"
    # a channel that was always 0 reads back 0 with any scale, and a scale must be above 0
    tensors = {"scale": torch.where(encoded.scale > 0, encoded.scale, 1.0)}
    if encoded.zero_point is not None:
        tensors["zero_point"] = encoded.zero_point
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _pair_norms(key: Tensor, rotary_dim: int) -> Tensor:
    """In place of each channel of keys ``[T, N, D]`` the norm of its rotary pair."""
    turned, rest = key.float().split([rotary_dim, key.shape[-1] - rotary_dim], -1)
    norms = torch.hypot(*turned.chunk(2, -1))
    return torch.cat((norms, norms, rest.abs()), -1)


class _Observer:
    """The model's attention over one piece of text, with a look at every layer's keys."""

    def __init__(self, kind: Any, angles: Mapping[int, Tensor]) -> None:
        self._kind, self._angles = kind, angles
        self.seen: dict[int, Any] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int,
    ) -> Tensor:
        if layer not in self.seen:
            self.seen[layer] = self._kind()
        self.seen[layer].add(key, value, self._angles.get(layer))
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        positions = torch.arange(len(query), device=query.device)
        distance = positions[:, None] - positions
        mask = (distance >= 0) & ((distance < window) if window else (distance >= 0))
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        output = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling
        )
        return output[0].transpose(0, 1)


@torch.inference_mode()
def _run(loaded: LoadedModel, token_ids: Sequence[int], kind: Any) -> dict[int, Any]:
    """By layer, what a ``kind`` of each has been shown."""
    if len(token_ids) < _FEWEST_TOKENS:
        legal = f"{_FEWEST_TOKENS} or more, better a few thousand"
        raise UsageError("calibration text", f"{len(token_ids)} tokens", legal)
    model = loaded.hf_model
    size = min(PIECE_TOKENS, loaded.geometry.max_position_tokens)
    with watched_rotary(model) as angles:
        observer = _Observer(kind, angles)
        for start in range(0, len(token_ids), size):
            piece = torch.tensor([list(token_ids[start : start + size])], device=model.device)
            positions = torch.arange(piece.shape[1], device=model.device)[None]
            model(
                input_ids=piece,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=1,
                **{STEP_KEYWORD: observer},
            )
    return observer.seen

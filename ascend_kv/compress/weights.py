"""Weights of a compressor: gates, position biases and norms, from a file or a mapping.

They come from a safetensors file or a mapping of the same names; all may be absent. For each
side, ``key`` and ``value``, and each level i = 0, 1, ...::

    {side}.levels.{i}.gate           [C, D]   logits of the gate: x @ gate.T; absent: 0
    {side}.levels.{i}.position_bias  [r, C]   added to the logits of a window's j-th; absent: 0
    {side}.norm                      [E]      weight of the RMSNorm of the entries; absent: no norm

D channels come into a level and E leave it; r is the level's ratio. HCA has C = D = E. CSA has
E channels in each of two series, C = 2E; its tokens bring one vector for both, D = E, or two,
D = 2E.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ascend_kv.errors import UsageError
from ascend_kv.formats import FLOAT_DTYPES

Tensor = torch.Tensor
Source = str | os.PathLike[str] | Mapping[str, Tensor] | None

SIDES = ("key", "value")
_ENTRY = re.compile(r"(?:key|value)\.(?:norm|levels\.(\d+)\.(?:gate|position_bias))")


class LevelWeights(NamedTuple):
    """What weighs the slots of one level of one side; both None: all weigh the same."""

    gate: Tensor | None
    position_bias: Tensor | None


class SideWeights(NamedTuple):
    """Weights of the keys, or of the values, of all levels."""

    levels: tuple[LevelWeights, ...]
    norm: Tensor | None

    def check(self, side: str, ratios: Sequence[int], channels: int, series: int, dim: int) -> None:
        """Refuse weights that do not fit ``channels`` coming in and entries of ``dim``.

        Raises:
            UsageError: names the entry, its shape and the legal one.
        """
        width = series * dim
        for number, (level, ratio) in enumerate(zip(self.levels, ratios, strict=True)):
            coming = channels if number == 0 else dim
            shapes = {"gate": (width, coming), "position_bias": (ratio, width)}
            for name, shape in shapes.items():
                _check(f"{side}.levels.{number}.{name}", getattr(level, name), shape)
        _check(f"{side}.norm", self.norm, (dim,))


def read_weights(source: Source, num_levels: int) -> tuple[SideWeights, SideWeights]:
    """Weights of keys and of values; see the module for names.

    Raises:
        UsageError: no such file, an unknown name or level, or a tensor of another type.
    """
    entries = _read(source)
    for name, tensor in entries.items():
        match = _ENTRY.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            legal = "key.levels.0.gate, key.levels.0.position_bias, key.norm, and value. alike"
            raise UsageError("weights", name, legal)
        if match[1] is not None and int(match[1]) >= num_levels:
            raise UsageError("weights", name, f"levels 0 to {num_levels - 1}")
        if not isinstance(tensor, Tensor) or tensor.dtype not in FLOAT_DTYPES:
            kind = getattr(tensor, "dtype", type(tensor).__name__)
            raise UsageError(f"weights: {name}", kind, FLOAT_DTYPES)
    key, value = (_side(entries, side, num_levels) for side in SIDES)
    return key, value


def _read(source: Source) -> Mapping[str, Tensor]:
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return source
    try:
        return load_file(source)
    except (OSError, SafetensorError, TypeError) as error:
        legal = "a safetensors file, or a mapping from names to tensors"
        raise UsageError("weights", str(source), legal, f"{error}.") from None


def _side(entries: Mapping[str, Tensor], side: str, num_levels: int) -> SideWeights:
    def find(name: str) -> Tensor | None:
        tensor = entries.get(f"{side}.{name}")
        return None if tensor is None else tensor.detach().to(torch.float32)

    levels = tuple(
        LevelWeights(find(f"levels.{i}.gate"), find(f"levels.{i}.position_bias"))
        for i in range(num_levels)
    )
    return SideWeights(levels, find("norm"))


def _check(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is not None and tensor.shape != shape:
        raise UsageError(f"weights: {name}", tuple(tensor.shape), f"{shape}")

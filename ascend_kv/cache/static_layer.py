"""One layer's static scales at work: a token's scales, and a count of what lies beyond them.

INT8 has codes from -127 (asymmetric -128) to 127, FP8 numbers up to 448 (E5M2: 57344). A value
whose code would be another is stored as the last one: it is clipped. Scales made from other text,
or from keys that were conditioned otherwise, clip much, and nothing else would show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ascend_kv.formats import format_named
from ascend_kv.geometry import FormatSpec, LayerFormat

Tensor = torch.Tensor


class ClippedShare(NamedTuple):
    """Shares, 0 to 1, of the elements stored so far that were clipped."""

    key: float
    value: float


class StaticScales:
    """Static scales and zero points of one layer, and the count of clipped elements."""

    def __init__(
        self,
        layer: LayerFormat,
        tensors: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
    ) -> None:
        """Take ``tensors`` by name ("key_scale", ...) to ``device``.

        They are in the sides' ``FormatSpec.scale_shape``; a side that is not quantized has none.
        """
        self.tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        sides: dict[str, FormatSpec] = {"key": layer.key, "value": layer.value}
        self._sides = {side: spec for side, spec in sides.items() if spec.static}
        self._clipped = {side: torch.zeros((), dtype=torch.int64, device=device) for side in sides}
        self._stored = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all scales and zero points."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def clipped_share(self) -> ClippedShare:
        """What was clipped so far; reads it from the device."""
        counts = self._clipped.values()
        return ClippedShare(*(int(count) / max(1, self._stored) for count in counts))

    def by_position(self, name: str) -> bool:
        """Whether the scales (or zero points) of that name are a table by position."""
        spec = self._sides.get(name.partition("_")[0])
        return spec is not None and spec.scales_by_token

    def at(self, name: str, positions: Tensor) -> Tensor | None:
        """The tensor of that name for tokens at ``positions`` [T]: ``[T or 1, N or 1, D or 1]``."""
        tensor = self.tensors.get(name)
        if tensor is None or not self.by_position(name):
            return None if tensor is None else tensor.squeeze(2)
        return tensor[0, :, positions].transpose(0, 1)

    def count(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Count the elements of ``[T, N, D]`` that will be clipped; does not wait for a device."""
        self._stored += key.numel()
        for side, x in (("key", key), ("value", value)):
            spec = self._sides.get(side)
            if spec is None:
                continue
            scale, zero_point = (
                self.at(f"{side}_{name}", positions) for name in ("scale", "zero_point")
            )
            assert scale is not None, "load_static_scales gives every side its scale"
            self._clipped[side] += format_named(spec.name).clips(x, scale, zero_point).sum()

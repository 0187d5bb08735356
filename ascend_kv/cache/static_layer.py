"""One layer's static scales at work: a token's scales, and a count of what lies beyond them.

INT8 has codes from -127 (asymmetric -128) to 127. A value whose code would be another is stored
as the last one: it is clipped. Scales made from other text, or from keys that were conditioned
otherwise, clip much, and nothing else would show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ascend_kv.formats.int8 import SYMMETRIC_LIMIT
from ascend_kv.geometry import FormatSpec

Tensor = torch.Tensor


class ClippedShare(NamedTuple):
    """Shares, 0 to 1, of the elements stored so far that were clipped."""

    key: float
    value: float


class StaticScales:
    """Static scales and zero points of one layer, and the count of clipped elements."""

    def __init__(
        self, spec: FormatSpec, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu"
    ) -> None:
        """Take ``tensors`` by name ("key_scale", ...), in ``spec.scale_shape``, to ``device``."""
        self.tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        self.by_position = spec.scales_by_token
        self._clipped = {side: torch.zeros((), dtype=torch.int64, device=device) for side in _SIDES}
        self._stored = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all scales and zero points."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def clipped_share(self) -> ClippedShare:
        """What was clipped so far; reads it from the device."""
        return ClippedShare(*(int(self._clipped[side]) / max(1, self._stored) for side in _SIDES))

    def at(self, name: str, positions: Tensor) -> Tensor | None:
        """The tensor of that name for tokens at ``positions`` [T]: ``[T or 1, N or 1, D or 1]``."""
        tensor = self.tensors.get(name)
        if tensor is None or not self.by_position:
            return None if tensor is None else tensor.squeeze(2)
        return tensor[0, :, positions].transpose(0, 1)

    def count(self, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Count the elements of ``[T, N, D]`` that will be clipped; does not wait for a device."""
        self._stored += key.numel()
        for side, x in zip(_SIDES, (key, value), strict=True):
            scale, zero_point = (
                self.at(f"{side}_{name}", positions) for name in ("scale", "zero_point")
            )
            assert scale is not None, "load_static_scales gives every side its scale"
            lowest = -SYMMETRIC_LIMIT
            steps = x.to(torch.float32)
            if zero_point is not None:
                steps, lowest = steps - zero_point, lowest - 1
            steps = (steps / scale).round_()
            inside = (steps >= lowest) & (steps <= SYMMETRIC_LIMIT)  # no NaN is
            self._clipped[side] += steps.numel() - inside.sum()


_SIDES = ("key", "value")

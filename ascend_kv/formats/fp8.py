"""FP8 with float32 scales: one byte a value, E4M3 or E5M2, one scale a group, no zero points.

The bytes are those of the OCP 8-bit Floating Point Specification (revision 1.0, 2023), of torch's
``float8_e4m3fn`` and ``float8_e5m2``: a sign bit, then exponent and mantissa::

              exponent     mantissa   largest    smallest normal   smallest    NaN
    E4M3      4, bias 7    3 bits     448        2^-6              2^-9        0x7f, 0xff
    E5M2      5, bias 15   2 bits     57344      2^-14             2^-16       0x7d..0x7f, ...

Bytes of one vector of D values: D + 4 with granularity ``token_head``, else as INT8's
(``formats.int8``): granularities and scales are the same. With static scales of a layer or of its
heads a vector takes D bytes and no more::

    scale = absmax / 448 (E4M3) or absmax / 57344 (E5M2)    float32, true division
    code  = x / scale, clamped to the largest code, then rounded to the nearest, half to even
    value = code * scale

A relative format: the error of one value is below 2^-4 (E4M3) or 2^-3 (E5M2) of the value
itself, and 2^-10 or 2^-17 of the scale where it is small; a few float32 roundings come on top. So a
scale need not be fitted closely, and a large constant in a key costs what it costs however its
channels are scaled: that is what the key offset is for.

Edges are those of INT8. With scales of their own: a zero group has scale 0 and codes 0; NaN or
infinity poisons its group (scale NaN, codes 0: all of it reads back NaN). With given scales what
lies beyond the largest code saturates at it, never NaN or infinity; a scale that is 0 or NaN gives
codes 0. The codes for NaN and infinity are not written; one that is found reads back as it is.

Clamping comes before the conversion, which need not saturate: torch's makes infinity of what is
beyond E5M2.
"""

from __future__ import annotations

import torch

from ascend_kv.errors import UsageError
from ascend_kv.formats.base import (
    Encoded,
    VectorFormat,
    kept_shape,
    nan_unless_finite,
    scaled_values,
    steps_of,
)


class Fp8Format(VectorFormat):
    """One of the two FP8 types; see the module for bytes and edge cases."""

    zero_points = False

    def __init__(self, name: str, dtype: torch.dtype, largest: float, next_larger: float) -> None:
        """Describe the type.

        Args:
            name: of the format.
            dtype: torch's storage type.
            largest: the largest code.
            next_larger: what the next one would be: halfway to it values begin to be clipped.
        """
        self.name, self.dtype, self.largest = name, dtype, largest
        self._last = (largest + next_larger) / 2

    def encode(self, x: torch.Tensor, dims: tuple[int, ...], symmetric: bool = True) -> Encoded:
        """Encode ``x`` with one scale for each group over ``dims`` (kept as size 1)."""
        self._refuse_zero_points(symmetric)
        x = x.to(torch.float32)
        if x.numel() == 0:  # an empty group has no largest value: its scale is 0
            return Encoded(x.to(self.dtype), x.new_zeros(kept_shape(x, dims)))
        absmax = x.abs().amax(dims, keepdim=True)
        scale = absmax / self.largest
        scale += nan_unless_finite(absmax)
        return self.encode_static(x, scale)

    def encode_static(
        self, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None
    ) -> Encoded:
        """Encode ``x`` with given scales; what lies outside their range saturates."""
        self._refuse_zero_points(zero_point is None)
        steps = steps_of(x.to(torch.float32), scale)
        return Encoded(steps.clamp_(-self.largest, self.largest).to(self.dtype), scale)

    def decode(self, encoded: Encoded, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Codes times scale in float32, then converted to ``dtype``."""
        return scaled_values(encoded, self.codes_as_floats(encoded.codes), dtype)

    def clips(
        self, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Which values the largest code is not the nearest for; NaN counts as one."""
        return ~((x.to(torch.float32) / scale).abs() <= self._last)

    def _refuse_zero_points(self, symmetric: bool) -> None:
        if not symmetric:
            raise UsageError("symmetric", False, f"True with {self.name}, which has no zero points")


FP8_E4M3 = Fp8Format("fp8_e4m3", torch.float8_e4m3fn, 448.0, 480.0)
FP8_E5M2 = Fp8Format("fp8_e5m2", torch.float8_e5m2, 57344.0, 65536.0)

"""INT4 with half scales: two codes a byte, one float16 scale (and zero point) a group.

Bytes of one vector of D values, D even (one token of one KV head, granularity ``token_head``)::

    symmetric    D / 2 bytes of codes   2 bytes scale, float16                       D / 2 + 2
    asymmetric   D / 2 bytes of codes   2 bytes scale   2 bytes zero point, float16  D / 2 + 4

Byte i holds channel 2i in its low and channel 2i + 1 in its high four bits, in two's complement
(the order of CANN's int4b_t), and is kept as torch's uint8. With granularity ``token`` the N heads
of a token share the 2 (4) bytes; by groups of g channels, g even, every group has its own.

Scales and zero points are rounded to half first, and codes are made for what is stored::

    symmetric    scale = half(absmax / 7)              code = clamp(rint(x / scale), -7, 7)
                 value = code * scale                                      -8 is not used
    asymmetric   scale = half(max / 15 - min / 15)     zero_point = half(min + 8 * scale)
                 code  = clamp(rint((x - zero_point) / scale), -8, 7)
                 value = code * scale + zero_point

all in float32, half to even. The error of one value is at most half a step (scale / 2) and what
halves cost: symmetric 2^-11 of the largest value, asymmetric 2^-10 of it; where a scale or zero
point is below half's normal numbers (6.1e-5), 15 * 2^-25.

==========================  ==================================================================
zero group                  scale 0, codes 0, reads back 0 (also where absmax / 7 is below
                            2^-25, the smallest half rounded down)
constant group              symmetric: codes +-7; asymmetric: scale 0, codes 0, reads back the
                            constant as half rounds it
beyond half range           a scale or zero point above 65,504 has no half: its group is
                            poisoned, never clipped
NaN or infinity             poisons its group: scale (and zero point) NaN, codes 0, so that
                            the whole group reads back NaN; never a number
==========================  ==================================================================

There are no static scales: every token makes its own.
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

SYMMETRIC_LIMIT = 7
ASYMMETRIC_STEPS = 15


class Int4Format(VectorFormat):
    """Symmetric or asymmetric INT4; see the module for bytes and edge cases."""

    name = "int4"
    dtype = torch.uint8
    scale_dtype = torch.float16
    codes_per_element = 2
    static = False

    def encode(self, x: torch.Tensor, dims: tuple[int, ...], symmetric: bool = True) -> Encoded:
        """Encode ``x`` with one scale for each group over ``dims`` (kept as size 1).

        Raises:
            UsageError: an odd number of channels.
        """
        x = x.to(torch.float32)
        if x.numel() == 0:  # an empty group has no largest value: its scale is 0
            scale = x.new_zeros(kept_shape(x, dims), dtype=self.scale_dtype)
            return Encoded(pack(x), scale, None if symmetric else scale.clone())
        if symmetric:
            scale = (x.abs().amax(dims, keepdim=True) / SYMMETRIC_LIMIT).to(self.scale_dtype)
            scale += nan_unless_finite(scale)
            return Encoded(_codes(x, scale, -SYMMETRIC_LIMIT), scale)
        low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
        scale = (high / ASYMMETRIC_STEPS - low / ASYMMETRIC_STEPS).to(self.scale_dtype)
        zero_point = (low + 8 * scale.to(torch.float32)).to(self.scale_dtype)
        poison = nan_unless_finite(zero_point)
        scale += poison
        zero_point += poison
        return Encoded(_codes(x - zero_point, scale, -SYMMETRIC_LIMIT - 1), scale, zero_point)

    def encode_static(
        self, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None
    ) -> Encoded:
        """Refused: the scales of INT4 are a token's own."""
        raise UsageError("scale", tuple(scale.shape), "None: int4 has dynamic scales only")

    def decode(self, encoded: Encoded, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Codes times scale, plus the zero point, in float32, then converted to ``dtype``."""
        return scaled_values(encoded, self.codes_as_floats(encoded.codes), dtype)

    def codes_as_floats(self, codes: torch.Tensor) -> torch.Tensor:
        """Two channels from each byte: ``[..., D / 2]`` to ``[..., D]``."""
        # shifting left and back, arithmetically, extends the sign
        low = (codes << 4).view(torch.int8) >> 4
        high = codes.view(torch.int8) >> 4
        return torch.stack((low, high), -1).flatten(-2).to(torch.float32)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Whole numbers from -8 to 7, in any type: ``[..., D]`` to uint8 ``[..., D / 2]``.

    Raises:
        UsageError: D is odd.
    """
    if codes.shape[-1] % 2:
        raise UsageError("head_dim", codes.shape[-1], "even with int4: two codes share a byte")
    low, high = codes.to(torch.int8).view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return (low & 15) | (high << 4)


def _codes(x: torch.Tensor, scale: torch.Tensor, low: int) -> torch.Tensor:
    steps = steps_of(x, scale.to(torch.float32))
    return pack(steps.round_().clamp_(low, SYMMETRIC_LIMIT))

"""INT8 with float32 scales: one signed byte a value, one scale (and zero point) a group.

Bytes of one vector of D values (one token of one KV head, granularity ``token_head``)::

    symmetric    D bytes of codes, two's complement   4 bytes scale, float32          D + 4
    asymmetric   D bytes of codes   4 bytes scale, float32   4 bytes zero point, float32  D + 8

With granularity ``token`` the N heads of a token share the 4 (8) bytes. By groups of g
channels every group has its own: D + 4 * D / g (D + 8 * D / g) bytes. Codes and scales lie in
separate tensors; all are little endian on every device that we know.

Symmetric, after absmax quantization (Dettmers et al., LLM.int8(), 2022, section 2)::

    scale = absmax / 127                      float32, true division
    code  = clamp(rint(x / scale), -127, 127) half to even; -128 is not used
    value = code * scale

Asymmetric::

    scale      = max / 255 - min / 255        so that max - min cannot overflow
    zero_point = min + 128 * scale            float32, in units of the values
    code       = clamp(rint((x - zero_point) / scale), -128, 127)
    value      = code * scale + zero_point

What happens at the edges, with scales of their own (dynamic):

==========================  ==================================================================
zero group                  scale 0, codes 0, reads back 0
constant group              symmetric: codes +-127, within one rounding; asymmetric: scale 0,
                            codes 0, zero point = the constant: reads back exactly
denormal values             computed as they are: the scale may be denormal or round to 0, and
                            then the codes are 0. A device that flushes denormals has scale 0
                            and reads 0 where absmax is below 1.5e-36, which is then the error
values beyond half range    no limit of their own, everything is float32; reading back as
                            float16 overflows to infinity, as torch converts
the end of float32          symmetric: 3.4e38 may round to infinity when read back;
                            asymmetric with max - min > 1.99 * 3.4e38: poisoned, see below
NaN or infinity             poisons its group: scale (and zero point) NaN, codes 0, so that
                            the whole group reads back NaN; never a number
==========================  ==================================================================

With given scales (static) a value outside the range saturates at the last code, which is what
clipping means; a scale that is 0 or NaN gives codes 0. A NaN or an infinity has no code and the
scale is not the group's own to poison, so the callers refuse it (``require_finite``). That looks
at the values, so it is done on a CPU only; elsewhere their code is 0.

The error of one value is at most scale / 2, plus a few float32 roundings of the largest value.
"""

from __future__ import annotations

import torch

from ascend_kv.formats.base import (
    Encoded,
    VectorFormat,
    kept_shape,
    nan_unless_finite,
    scaled_values,
    steps_of,
)

SYMMETRIC_LIMIT = 127
ASYMMETRIC_STEPS = 255


class Int8Format(VectorFormat):
    """Symmetric or asymmetric INT8; see the module for bytes and edge cases."""

    name = "int8"
    dtype = torch.int8

    def encode(self, x: torch.Tensor, dims: tuple[int, ...], symmetric: bool = True) -> Encoded:
        """Encode ``x`` with one scale for each group over ``dims`` (kept as size 1)."""
        x = x.to(torch.float32)
        if x.numel() == 0:  # an empty group has no largest value: its scale is 0
            kept = kept_shape(x, dims)
            nothing = None if symmetric else x.new_zeros(kept)
            return Encoded(x.to(torch.int8), x.new_zeros(kept), nothing)
        if symmetric:
            absmax = x.abs().amax(dims, keepdim=True)
            scale = absmax / SYMMETRIC_LIMIT
            scale += nan_unless_finite(absmax)
            return Encoded(_codes(x, scale, -SYMMETRIC_LIMIT), scale)
        low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
        scale = high / ASYMMETRIC_STEPS - low / ASYMMETRIC_STEPS
        zero_point = low + 128 * scale
        poison = nan_unless_finite(zero_point)
        scale += poison
        zero_point += poison
        return Encoded(_codes(x - zero_point, scale, -128), scale, zero_point)

    def encode_static(
        self, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None
    ) -> Encoded:
        """Encode ``x`` with given scales; what lies outside their range saturates."""
        x = x.to(torch.float32)
        if zero_point is None:
            return Encoded(_codes(x, scale, -SYMMETRIC_LIMIT), scale)
        return Encoded(_codes(x - zero_point, scale, -128), scale, zero_point)

    def decode(self, encoded: Encoded, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Codes times scale, plus the zero point, in float32, then converted to ``dtype``."""
        return scaled_values(encoded, self.codes_as_floats(encoded.codes), dtype)

    def clips(
        self, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Which values have a code beyond -127 (asymmetric: -128) to 127; NaN counts as one."""
        lowest = -SYMMETRIC_LIMIT
        x = x.to(torch.float32)
        if zero_point is not None:
            x, lowest = x - zero_point, lowest - 1
        steps = (x / scale).round_()
        return ~((steps >= lowest) & (steps <= SYMMETRIC_LIMIT))


def _codes(x: torch.Tensor, scale: torch.Tensor, low: int) -> torch.Tensor:
    return steps_of(x, scale).round_().clamp_(low, SYMMETRIC_LIMIT).to(torch.int8)

"""Keys and values kept as float32, float16 or bfloat16.

Bytes of one vector of D values: 4 * D in float32, 2 * D in float16 and bfloat16, in IEEE 754
(bfloat16: its upper half) and the machine's order. There are no scales.

Converting rounds to the nearest, half to even, as torch converts. A value beyond float16's
65,504 becomes infinity: the overflow stays visible and is never clamped to a number. NaN and
infinity stay what they are; denormals are kept.
"""

from __future__ import annotations

import torch

from ascend_kv.errors import UsageError
from ascend_kv.formats.base import FLOAT_DTYPES, Encoded, VectorFormat


class UnquantizedFormat(VectorFormat):
    """The values themselves, converted to ``dtype``."""

    quantized = False

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in FLOAT_DTYPES:
            raise UsageError("dtype", dtype, FLOAT_DTYPES)
        self.dtype = dtype
        self.name = str(dtype).removeprefix("torch.")

    def encode(self, x: torch.Tensor, dims: tuple[int, ...], symmetric: bool = True) -> Encoded:
        """``x`` converted; there is no scale, so ``dims`` and ``symmetric`` do not matter."""
        return Encoded(x.to(self.dtype))

    def encode_static(
        self, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None
    ) -> Encoded:
        """Refused: an unquantized format has no scale to be given."""
        raise UsageError("scale", tuple(scale.shape), f"None, the format is {self.dtype}")

    def decode(self, encoded: Encoded, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The stored values as ``dtype``."""
        return encoded.codes.to(dtype)

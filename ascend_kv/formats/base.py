"""What every storage format shares: the granularities and the contract of encoding.

A *group* is the set of values that share one scale. A granularity names the dimensions of
``[batch, heads, tokens, dim]`` that a group runs over; the scale keeps them as 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from ascend_kv.errors import UsageError

# granularity -> dimensions of [B, N, T, D] that share one scale
REDUCED_DIMS: dict[str, tuple[int, ...]] = {
    "layer": (1, 2, 3),
    "head": (2, 3),
    "token": (1, 3),
    "token_head": (3,),
    "channel": (2,),
}

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Encoded(NamedTuple):
    """Stored values and what is needed to read them back.

    Attributes:
        codes: the stored values, in the shape of what was encoded; where two share an element
            the last dimension is half as long.
        scale: in the format's ``scale_dtype``, None where the format has none.
        zero_point: as ``scale``, in units of the values, None where the format has none.
    """

    codes: torch.Tensor
    scale: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None


class VectorFormat(ABC):
    """How keys and values become stored bytes and come back.

    A format holds no state. ``encode`` and ``decode`` mutate nothing and never synchronise a
    device; both compute in float32.

    Attributes:
        name: as ``geometry.format_spec`` takes it.
        dtype: the storage type of the codes; it tells formats apart.
        quantized: whether scales go with the codes.
        scale_dtype: of scales and zero points.
        codes_per_element: channels that share one element of ``dtype``.
        zero_points: whether it can be asymmetric.
        static: whether its scales may be given.
    """

    name: str
    dtype: torch.dtype
    quantized = True
    scale_dtype = torch.float32
    codes_per_element = 1
    zero_points = True
    static = True

    @abstractmethod
    def encode(self, x: torch.Tensor, dims: tuple[int, ...], symmetric: bool = True) -> Encoded:
        """Encode ``x`` with scales of its own, one for each group over ``dims``."""

    @abstractmethod
    def encode_static(
        self, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None
    ) -> Encoded:
        """Encode ``x`` with scales that are given and broadcast to it."""

    @abstractmethod
    def decode(self, encoded: Encoded, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Read ``encoded`` back as ``dtype``."""

    def codes_as_floats(self, codes: torch.Tensor) -> torch.Tensor:
        """What the codes stand for before scales are applied, float32, one a channel."""
        return codes.to(torch.float32)

    def clips(
        self, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Which values ``encode_static`` takes to the last code because theirs lies beyond it."""
        raise NotImplementedError(f"{self.name} has no static scales")

    def head_dim(self, cache: torch.Tensor) -> int:
        """The channels of a vector in a cache ``[..., D]`` or ``[..., D / codes_per_element]``."""
        return cache.shape[-1] * self.codes_per_element


def scaled_values(encoded: Encoded, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes (as float32) times scale, plus the zero point, converted to ``dtype``."""
    if encoded.scale is None:
        raise UsageError("scale", None, "the scales the codes were written with")
    values = codes * encoded.scale
    if encoded.zero_point is not None:
        values = values + encoded.zero_point
    return values.to(dtype)


def steps_of(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x / scale``, and 0 where that is no finite number: 0 / 0, a NaN scale, an infinity."""
    return (x / scale).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def nan_unless_finite(x: torch.Tensor) -> torch.Tensor:
    """0 for a number, NaN for NaN and infinity; cheaper than ``torch.isfinite``."""
    return x - x


def kept_shape(x: torch.Tensor, dims: tuple[int, ...]) -> list[int]:
    """The shape of ``x`` with ``dims`` as 1: that of its scales."""
    return [1 if dim in dims else size for dim, size in enumerate(x.shape)]


def require_finite(name: str, x: torch.Tensor) -> None:
    """Refuse NaN and infinity where a given (static) scale leaves no way to mark them.

    Looks at the values on a CPU only: elsewhere it would synchronise the device.

    Raises:
        UsageError: ``x`` holds a NaN or an infinity.
    """
    if x.device.type == "cpu" and not torch.isfinite(x).all():
        raise UsageError(name, "NaN or infinity", "finite values, where scales are static")


def reduced_dims(granularity: str) -> tuple[int, ...]:
    """The dimensions of ``[B, N, T, D]`` that share one scale.

    Raises:
        UsageError: the granularity is unknown.
    """
    try:
        return REDUCED_DIMS[granularity]
    except KeyError:
        raise UsageError("granularity", granularity, REDUCED_DIMS) from None

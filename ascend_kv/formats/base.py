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
        codes: the stored values, in the shape of what was encoded.
        scale: float32, None where the format has none.
        zero_point: float32 in units of the values, None where the format has none.
    """

    codes: torch.Tensor
    scale: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None


class VectorFormat(ABC):
    """How keys and values become stored bytes and come back.

    A format holds no state. ``encode`` and ``decode`` mutate nothing and never synchronise a
    device; both compute in float32.
    """

    quantized: bool

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


def reduced_dims(granularity: str) -> tuple[int, ...]:
    """The dimensions of ``[B, N, T, D]`` that share one scale.

    Raises:
        UsageError: the granularity is unknown.
    """
    try:
        return REDUCED_DIMS[granularity]
    except KeyError:
        raise UsageError("granularity", granularity, REDUCED_DIMS) from None

"""How one vector of keys or values becomes bytes and comes back, one file a format."""

from __future__ import annotations

import torch

from ascend_kv.errors import UsageError
from ascend_kv.formats.base import (
    FLOAT_DTYPES,
    REDUCED_DIMS,
    Encoded,
    VectorFormat,
    reduced_dims,
    require_finite,
)
from ascend_kv.formats.fp8 import FP8_E4M3, FP8_E5M2, Fp8Format
from ascend_kv.formats.int4 import Int4Format
from ascend_kv.formats.int8 import Int8Format
from ascend_kv.formats.unquantized import UnquantizedFormat

INT8 = Int8Format()
INT4 = Int4Format()
QUANTIZED: tuple[VectorFormat, ...] = (INT8, FP8_E4M3, FP8_E5M2, INT4)
_ALL = (*QUANTIZED, *(UnquantizedFormat(dtype) for dtype in FLOAT_DTYPES))
_BY_DTYPE: dict[torch.dtype, VectorFormat] = {one.dtype: one for one in _ALL}
_BY_NAME: dict[str, VectorFormat] = {one.name: one for one in _ALL}


def format_of(dtype: torch.dtype, name: str = "dtype") -> VectorFormat:
    """The format whose storage type is ``dtype``; ``name`` is the argument an error names.

    Raises:
        UsageError: no format stores that type.
    """
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise UsageError(name, dtype, _BY_DTYPE) from None


def format_named(name: str, field: str = "format") -> VectorFormat:
    """The format of a ``FormatSpec.name``; ``field`` is the argument an error names.

    Raises:
        UsageError: no format has that name.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise UsageError(field, name, _BY_NAME) from None


__all__ = [
    "FLOAT_DTYPES",
    "FP8_E4M3",
    "FP8_E5M2",
    "INT4",
    "INT8",
    "QUANTIZED",
    "REDUCED_DIMS",
    "Encoded",
    "Fp8Format",
    "Int4Format",
    "Int8Format",
    "UnquantizedFormat",
    "VectorFormat",
    "format_named",
    "format_of",
    "reduced_dims",
    "require_finite",
]

"""How one vector of keys or values becomes bytes and comes back, one file a format."""

from __future__ import annotations

import torch

from ascend_kv.errors import UsageError
from ascend_kv.formats.base import FLOAT_DTYPES, REDUCED_DIMS, Encoded, VectorFormat, reduced_dims
from ascend_kv.formats.int8 import Int8Format
from ascend_kv.formats.unquantized import UnquantizedFormat

INT8 = Int8Format()
_BY_DTYPE: dict[torch.dtype, VectorFormat] = {
    torch.int8: INT8,
    **{dtype: UnquantizedFormat(dtype) for dtype in FLOAT_DTYPES},
}


def format_of(dtype: torch.dtype, name: str = "dtype") -> VectorFormat:
    """The format whose storage type is ``dtype``; ``name`` is the argument an error names.

    Raises:
        UsageError: no format stores that type.
    """
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise UsageError(name, dtype, _BY_DTYPE) from None


__all__ = [
    "FLOAT_DTYPES",
    "INT8",
    "REDUCED_DIMS",
    "Encoded",
    "Int8Format",
    "UnquantizedFormat",
    "VectorFormat",
    "format_of",
    "reduced_dims",
]

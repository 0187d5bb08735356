"""The structs that the kernels' tilings fill, field by field as in ``op_kernels/*/*_tiling.h``.

``run_tiling`` compares their size with the compiled one.
"""

from __future__ import annotations

import ctypes


class QuantizeTiling(ctypes.Structure):
    """``KvCacheQuantizeTiling``."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("mode", "element", "symmetric", "is_static")),
        *((name, ctypes.c_int32) for name in ("cores", "passes")),
        *((name, ctypes.c_int64) for name in ("groups", "heads", "tokens", "cols")),
        *((n, ctypes.c_int32) for n in ("stride", "tile_rows", "tile_cols", "tile_heads")),
        *((name, ctypes.c_int64) for name in ("granule", "share", "workspace_bytes", "ub_bytes")),
    ]


class StoreTiling(ctypes.Structure):
    """``KvCacheStoreTiling``."""

    _fields_ = [
        *((n, ctypes.c_int32) for n in ("mode", "element", "cache_element", "symmetric", "nz")),
        *((n, ctypes.c_int32) for n in ("wide_slots", "positions", "sides", "cores", "stride")),
        *((n, ctypes.c_int32) for n in ("tile_tokens", "tile_heads")),
        *((n, ctypes.c_int64) for n in ("tokens", "heads", "dim", "block_size")),
        ("token_stride", ctypes.c_int64 * 2),
        ("ub_bytes", ctypes.c_int64),
    ]


class LoadTiling(ctypes.Structure):
    """``KvCacheLoadTiling``."""

    _fields_ = [
        *((n, ctypes.c_int32) for n in ("mode", "element", "cache_element", "symmetric")),
        *((n, ctypes.c_int32) for n in ("offset", "nz", "wide_tables", "sides", "cores")),
        *(
            (n, ctypes.c_int32)
            for n in ("stride", "tile_tokens", "tile_heads", "tiles_a_block", "alignment")
        ),
        *((n, ctypes.c_int64) for n in ("batch", "heads", "dim", "block_size", "table_width")),
        *((n, ctypes.c_int64) for n in ("length", "zeros", "ub_bytes")),
    ]


class CompressTiling(ctypes.Structure):
    """``HcaCompressTiling``."""

    _fields_ = [
        *((n, ctypes.c_int32) for n in ("element", "out_element", "overlap", "has_bias")),
        *((n, ctypes.c_int32) for n in ("has_norm", "split", "bias_stays", "cores")),
        *((n, ctypes.c_int32) for n in ("finish_cores", "rotary_dim", "chunk", "stride")),
        *((n, ctypes.c_int32) for n in ("row_stride", "tile_rows", "tile_windows", "finish_rows")),
        *((n, ctypes.c_int64) for n in ("windows", "sequences", "dim", "ratio")),
        *((n, ctypes.c_float) for n in ("norm_eps", "norm_factor")),
        *((n, ctypes.c_int64) for n in ("workspace_bytes", "ub_bytes")),
    ]


class DecompressTiling(ctypes.Structure):
    """``HcaDecompressTiling``."""

    _fields_ = [
        *((n, ctypes.c_int32) for n in ("element_bytes", "cores", "stride", "copies", "parts")),
        *((n, ctypes.c_int64) for n in ("entries", "dim", "ratio", "ub_bytes")),
    ]

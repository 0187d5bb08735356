"""``kv_cache_dequantize``: codes and scales → a dense tensor.

``value = code * scale + zero_point`` in float32, rounded once to the result's type; the layout
is that of ``kv_cache_quantize``. A NaN scale reads back as NaN; what exceeds half range becomes
infinity in float16.
"""

from __future__ import annotations

import torch

from ascend_kv.errors import UsageError
from ascend_kv.formats import FLOAT_DTYPES, QUANTIZED, Encoded, VectorFormat, format_of
from ascend_kv.ops.kv_cache_quantize import check_group_size, check_scale
from ascend_kv.ops.registration import register

Tensor = torch.Tensor

SCHEMA = (
    "kv_cache_dequantize(Tensor codes, Tensor scale, Tensor? zero_point=None, int group_size=0, "
    "ScalarType? dtype=None) -> Tensor"
)


def kv_cache_dequantize(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    group_size: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Read quantized keys or values back.

    Args:
        codes: int8, float8_e4m3fn or float8_e5m2 ``[B, N, T, D]``; INT4: uint8
            ``[B, N, T, D / 2]``.
        scale: float32 (INT4: float16), any shape that broadcasts to ``[B, N, T, D]``; with
            ``group_size`` to ``[B, N, T, D / group_size]``.
        zero_point: as ``scale``; None or 0 elements when symmetric.
        group_size: channels of a token that share a scale, 0 if not by group.
        dtype: float32 (also when None), float16 or bfloat16.

    Returns:
        ``[B, N, T, D]`` in ``dtype``.

    Raises:
        UsageError: a shape or type that does not fit.
    """
    if codes.dim() != 4:
        raise UsageError("codes", tuple(codes.shape), "[batch, kv_heads, tokens, head_dim]")
    if codes.dtype not in [kind.dtype for kind in QUANTIZED]:
        raise UsageError("codes", codes.dtype, [kind.dtype for kind in QUANTIZED])
    kind = format_of(codes.dtype)
    shape = _values_shape(codes, kind)
    if dtype is not None and dtype not in FLOAT_DTYPES:
        raise UsageError("dtype", dtype, FLOAT_DTYPES)
    if group_size:
        check_group_size(group_size, shape[3])
    check_scale("scale", scale, [*shape[:3], shape[3] // (group_size or 1)], kind.scale_dtype)
    if zero_point is not None and zero_point.shape != (0,):
        if not kind.zero_points:
            legal = f"None, {kind.name} has no zero points"
            raise UsageError("zero_point", tuple(zero_point.shape), legal)
        check_scale("zero_point", zero_point, scale.shape, kind.scale_dtype)
    return _op(codes, scale, zero_point, group_size, dtype)


def _values_shape(codes: Tensor, kind: VectorFormat) -> list[int]:
    return [*codes.shape[:3], kind.head_dim(codes)]


def _reference(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    group_size: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if zero_point is not None and zero_point.shape == (0,):
        zero_point = None
    kind, rows = format_of(codes.dtype), codes
    if group_size:
        rows = codes.unflatten(3, (-1, group_size // kind.codes_per_element))
        scale = scale.unsqueeze(4)
        zero_point = None if zero_point is None else zero_point.unsqueeze(4)
    values = kind.decode(Encoded(rows, scale, zero_point), dtype or torch.float32)
    return values.reshape(_values_shape(codes, kind)).contiguous()


def _fake(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    group_size: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    shape = _values_shape(codes, format_of(codes.dtype))
    return torch.empty(shape, dtype=dtype or torch.float32, device=codes.device)


_op = register(SCHEMA, _reference, _fake)

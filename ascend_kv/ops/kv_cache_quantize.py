"""``kv_cache_quantize``: a dense tensor → codes and scales.

``[B, N, T, D]`` becomes as many bytes of codes (INT4: half as many, ``[B, N, T, D / 2]``), and one
scale (asymmetric: and one zero point) for each group, in the shape of ``x`` with the dimensions of
a group as 1::

    layer       [B, 1, 1, 1]        head    [B, N, 1, 1]      token   [B, 1, T, 1]
    token_head  [B, N, T, 1]        channel [B, N, 1, D]      group   [B, N, T, D / group_size]

What the bytes mean, and what becomes of zeros, NaN and the like: ``ascend_kv.formats``, ``int8``,
``fp8`` and ``int4`` there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend_kv.errors import UsageError
from ascend_kv.formats import (
    FLOAT_DTYPES,
    QUANTIZED,
    REDUCED_DIMS,
    VectorFormat,
    reduced_dims,
    require_finite,
)
from ascend_kv.ops.registration import register

Tensor = torch.Tensor

SCHEMA = (
    "kv_cache_quantize(Tensor x, str granularity, bool symmetric=True, Tensor? scale=None, "
    'Tensor? zero_point=None, int group_size=0, str storage="int8") '
    "-> (Tensor codes, Tensor scale, Tensor zero_point)"
)

STORAGES = {kind.name: kind for kind in QUANTIZED}


def kv_cache_quantize(
    x: Tensor,
    granularity: str,
    symmetric: bool = True,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    group_size: int = 0,
    storage: str = "int8",
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize keys or values.

    Args:
        x: ``[B, N, T, D]``, float32, float16 or bfloat16, contiguous or not.
        granularity: ``layer``, ``head``, ``token``, ``token_head``, ``channel``, or ``group``
            with ``group_size`` channels of a token sharing a scale.
        symmetric: INT8: codes -127 to 127 around 0, else -128 to 127 with a zero point; INT4: -7
            to 7 or -8 to 7 alike; FP8 is symmetric.
        scale: None: every group gets its own (dynamic). Given: static, float32, broadcastable to
            the shape the granularity has.
        zero_point: static and asymmetric: as ``scale``, in units of the values.
        group_size: for ``group``, a divisor of D, of INT4 an even one; else 0.
        storage: ``int8``, ``fp8_e4m3``, ``fp8_e5m2`` or ``int4``.

    Returns:
        codes: int8, float8_e4m3fn or float8_e5m2, as ``x``; INT4: uint8 ``[B, N, T, D / 2]``.
        scale: float32, INT4: float16; a static scale comes back as it was given.
        zero_point: as ``scale``; 0 elements when symmetric.

    Raises:
        UsageError: an unknown granularity or storage, or one that cannot do what is asked (INT4
            has no static scales), a shape or type that does not fit; on a CPU also NaN or
            infinity where the scale is static (a dynamic scale becomes NaN and marks it).
    """
    groups = _check(x, granularity, group_size)
    _check_storage(storage, x.shape[3], symmetric, scale is not None, group_size)
    if zero_point is not None and (scale is None or symmetric):
        legal = "None where symmetric" if symmetric else "None, or together with scale"
        raise UsageError("zero_point", tuple(zero_point.shape), legal)
    if scale is not None:
        check_scale("scale", scale, groups)
        if zero_point is not None:
            check_scale("zero_point", zero_point, list(scale.shape))
        elif not symmetric:
            raise UsageError("zero_point", None, "a tensor as scale, where asymmetric and static")
    codes, scales, zero_points = _op(
        x, granularity, symmetric, scale, zero_point, group_size, storage
    )
    return codes, scales, zero_points


def _check_storage(
    storage: str, head_dim: int, symmetric: bool, static: bool, group_size: int
) -> None:
    if storage not in STORAGES:
        raise UsageError("storage", storage, STORAGES)
    kind = STORAGES[storage]
    if not symmetric and not kind.zero_points:
        raise UsageError("symmetric", False, f"True with {storage}, which has no zero points")
    if static and not kind.static:
        raise UsageError("scale", "a tensor", f"None with {storage}, whose scales are dynamic")
    if head_dim % kind.codes_per_element:
        raise UsageError("x", f"head_dim {head_dim}", f"an even head_dim with {storage}")
    if group_size % kind.codes_per_element:
        raise UsageError("group_size", group_size, f"an even number with {storage}")


def _check(x: Tensor, granularity: str, group_size: int) -> list[int]:
    shape = x.shape
    if len(shape) != 4:
        raise UsageError("x", tuple(shape), "[batch, kv_heads, tokens, head_dim]")
    if x.dtype not in FLOAT_DTYPES:
        raise UsageError("x", x.dtype, FLOAT_DTYPES)
    if granularity not in REDUCED_DIMS and granularity != "group":
        raise UsageError("granularity", granularity, (*REDUCED_DIMS, "group"))
    if granularity == "group":
        check_group_size(group_size, shape[3])
    elif group_size:
        raise UsageError("group_size", group_size, f"0 with granularity {granularity}")
    return scale_shape(shape, granularity, group_size)


def check_group_size(group_size: int, head_dim: int) -> None:
    """A group is a part of one vector."""
    if group_size <= 0 or head_dim % group_size:
        raise UsageError("group_size", group_size, f"a divisor of head_dim = {head_dim}")


def check_scale(
    name: str, scale: Tensor, groups: Sequence[int], dtype: torch.dtype = torch.float32
) -> None:
    """Refuse a scale that is not of ``dtype`` or does not broadcast to the shape ``groups``."""
    shape = scale.shape
    if len(shape) != 4 or any(a not in (1, b) for a, b in zip(shape, groups, strict=True)):
        raise UsageError(name, tuple(shape), f"{tuple(groups)}, any of them as 1")
    if scale.dtype is not dtype:
        raise UsageError(name, scale.dtype, str(dtype))


def scale_shape(shape: Sequence[int], granularity: str, group_size: int = 0) -> list[int]:
    """Shape of the scales of ``[B, N, T, D]``."""
    if granularity == "group":
        return [*shape[:3], shape[3] // group_size]
    dims = reduced_dims(granularity)
    return [1 if dim in dims else size for dim, size in enumerate(shape)]


def _reference(
    x: Tensor,
    granularity: str,
    symmetric: bool = True,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    group_size: int = 0,
    storage: str = "int8",
) -> tuple[Tensor, Tensor, Tensor]:
    kind, rows = STORAGES[storage], x
    if granularity == "group":
        rows = x.unflatten(3, (-1, group_size))
        scale = None if scale is None else scale.unsqueeze(4)
        zero_point = None if zero_point is None else zero_point.unsqueeze(4)
    if scale is None:
        dims = (4,) if granularity == "group" else reduced_dims(granularity)
        codes, scale, zero_point = kind.encode(rows, dims, symmetric)
    else:
        require_finite("x", x)
        # the results of an operator are its own: a given scale comes back as a copy
        scale, zero_point = scale.clone(), None if zero_point is None else zero_point.clone()
        codes = kind.encode_static(rows, scale, zero_point).codes
    assert scale is not None
    if zero_point is None:
        zero_point = scale.new_empty(0)
    elif granularity == "group":
        zero_point = zero_point.squeeze(4)
    scale = scale.squeeze(4) if granularity == "group" else scale
    codes = codes.reshape(_codes_shape(x, kind)).contiguous()
    return codes, scale.contiguous(), zero_point.contiguous()


def _codes_shape(x: Tensor, kind: VectorFormat) -> list[int]:
    return [*x.shape[:3], x.shape[3] // kind.codes_per_element]


def _fake(
    x: Tensor,
    granularity: str,
    symmetric: bool = True,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    group_size: int = 0,
    storage: str = "int8",
) -> tuple[Tensor, Tensor, Tensor]:
    kind = STORAGES[storage]
    codes = torch.empty(_codes_shape(x, kind), dtype=kind.dtype, device=x.device)
    groups = scale_shape(x.shape, granularity, group_size) if scale is None else scale.shape
    scales = x.new_empty(groups, dtype=kind.scale_dtype)
    return codes, scales, scales.new_empty(0) if symmetric else scales.new_empty(groups)


_op = register(SCHEMA, _reference, _fake)

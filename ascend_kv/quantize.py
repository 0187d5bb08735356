"""``KVCacheQuantize``: keys and values to INT8 and back, the public class over two operators.

::

    from ascend_kv import KVCacheQuantize

    quantizer = KVCacheQuantize(quant_mode="per_head", scale_type="dynamic")
    k_int8, v_int8, k_scale, v_scale = quantizer.quantize(k, v)
    k, v = quantizer.dequantize(k_int8, v_int8, k_scale, v_scale)

Tensors are ``[batch, heads, tokens, dim]``. What the bytes mean, and what becomes of zero rows,
constant rows, denormals, values beyond half range, NaN and infinity, is said and defined in
``ascend_kv.formats.int8``.
"""

from __future__ import annotations

from numbers import Real
from typing import NamedTuple

import torch

from ascend_kv.errors import UsageError
from ascend_kv.formats import REDUCED_DIMS
from ascend_kv.geometry import SCALE_TYPES
from ascend_kv.ops import kv_cache_dequantize, kv_cache_quantize
from ascend_kv.ops.kv_cache_quantize import check_scale, scale_shape

Tensor = torch.Tensor

QUANT_MODES = {f"per_{granularity}": granularity for granularity in REDUCED_DIMS}


class QuantizedKV(NamedTuple):
    """Symmetric: int8 codes in the shape of k and v, float32 scales with reduced dims as 1."""

    k_int8: Tensor
    v_int8: Tensor
    k_scale: Tensor
    v_scale: Tensor


class AsymmetricKV(NamedTuple):
    """As ``QuantizedKV``, with zero points in units of the values, in the scales' shape."""

    k_int8: Tensor
    v_int8: Tensor
    k_scale: Tensor
    v_scale: Tensor
    k_zero_point: Tensor
    v_zero_point: Tensor


class KeysValues(NamedTuple):
    """Keys and values, ``[batch, heads, tokens, dim]``."""

    k: Tensor
    v: Tensor


class KVCacheQuantize:
    """Quantizes keys and values to INT8; holds no state but its settings.

    Args:
        quant_mode: which values share a scale: ``per_layer`` (``[B,1,1,1]``), ``per_head``
            (``[B,H,1,1]``), ``per_token`` (``[B,1,T,1]``), ``per_token_head`` (``[B,H,T,1]``)
            or ``per_channel`` (``[B,H,1,D]``).
        scale_type: ``dynamic``: scales from the values; ``static``: the scales given here, and
            what lies outside their range saturates.
        symmetric: around 0; otherwise with zero points, and ``quantize`` returns six tensors.
        k_scale: static only: a positive number, or a tensor of such that broadcasts to the shape
            of ``quant_mode``, e.g. ``[1,H,1,1]``.
        v_scale: as ``k_scale``.
        k_zero_point: static and asymmetric only, in the shape of ``k_scale``.
        v_zero_point: as ``k_zero_point``.

    Raises:
        UsageError: an unknown mode, or scales that are missing, not wanted or not legal.
    """

    def __init__(
        self,
        quant_mode: str = "per_head",
        scale_type: str = "dynamic",
        symmetric: bool = True,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
        k_zero_point: Tensor | float | None = None,
        v_zero_point: Tensor | float | None = None,
    ) -> None:
        if not isinstance(quant_mode, str) or quant_mode not in QUANT_MODES:
            raise UsageError("quant_mode", quant_mode, QUANT_MODES)
        if scale_type not in SCALE_TYPES:
            raise UsageError("scale_type", scale_type, SCALE_TYPES)
        if not isinstance(symmetric, bool):
            raise UsageError("symmetric", symmetric, (True, False))
        static = scale_type == "static"
        wanted = {"k_scale": static, "v_scale": static}
        wanted |= dict.fromkeys(("k_zero_point", "v_zero_point"), static and not symmetric)
        given = {
            "k_scale": k_scale,
            "v_scale": v_scale,
            "k_zero_point": k_zero_point,
            "v_zero_point": v_zero_point,
        }
        self.quant_mode = quant_mode
        self.scale_type = scale_type
        self.symmetric = symmetric
        kind = f"{scale_type} scales, {'symmetric' if symmetric else 'asymmetric'}"
        self._static = {
            name: _static_tensor(name, value, wanted[name], kind) for name, value in given.items()
        }

    def quantize(self, k: Tensor, v: Tensor) -> QuantizedKV | AsymmetricKV:
        """Quantize keys and values, ``[B, H, T, D]`` in float32, float16 or bfloat16.

        Raises:
            UsageError: shapes or types that do not fit; on a CPU also NaN or infinity where the
                scales are static (with dynamic ones they read back as NaN).
        """
        _check_alike({"k": k, "v": v})
        k_int8, k_scale, k_zero = self._quantize("k", k)
        v_int8, v_scale, v_zero = self._quantize("v", v)
        if self.symmetric:
            return QuantizedKV(k_int8, v_int8, k_scale, v_scale)
        return AsymmetricKV(k_int8, v_int8, k_scale, v_scale, k_zero, v_zero)

    def dequantize(
        self,
        k_int8: Tensor,
        v_int8: Tensor,
        k_scale: Tensor,
        v_scale: Tensor,
        k_zero_point: Tensor | None = None,
        v_zero_point: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> KeysValues:
        """Read back what ``quantize`` returned, as float32, float16 or bfloat16.

        Raises:
            UsageError: shapes or types that do not fit, scales of another ``quant_mode``, zero
                points missing or not wanted.
        """
        _check_alike({"k_int8": k_int8, "v_int8": v_int8})
        for name, zero in (("k_zero_point", k_zero_point), ("v_zero_point", v_zero_point)):
            if self.symmetric != (zero is None):
                legal = "None, symmetric" if self.symmetric else "a tensor, asymmetric"
                raise UsageError(name, _shown(zero), legal)
        return KeysValues(
            self._dequantize("k", k_int8, k_scale, k_zero_point, dtype),
            self._dequantize("v", v_int8, v_scale, v_zero_point, dtype),
        )

    def _dequantize(
        self, side: str, codes: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        given = {f"{side}_scale": scale}
        if zero_point is not None:
            given[f"{side}_zero_point"] = zero_point
        for name, value in given.items():
            _check_tensor(name, value)
            if codes.dim() == 4:
                check_scale(name, value, scale_shape(codes.shape, QUANT_MODES[self.quant_mode]))
        try:
            return kv_cache_dequantize(codes, scale, zero_point, dtype=dtype)
        except UsageError as error:  # the operator calls them codes, scale and zero_point
            names = {"codes": "int8", "scale": "scale", "zero_point": "zero_point"}
            if error.field not in names:
                raise
            name = f"{side}_{names[error.field]}"
            raise UsageError(name, error.given, error.legal, error.hint) from None

    def _quantize(self, side: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale, zero_point = (
            None if static is None else static.to(x.device)
            for static in (self._static[f"{side}_scale"], self._static[f"{side}_zero_point"])
        )
        try:
            granularity = QUANT_MODES[self.quant_mode]
            return kv_cache_quantize(x, granularity, self.symmetric, scale, zero_point)
        except UsageError as error:  # the operator calls them x, scale and zero_point
            name = side if error.field == "x" else f"{side}_{error.field}"
            raise UsageError(name, error.given, error.legal, error.hint) from None


def _static_tensor(
    name: str, value: Tensor | float | None, wanted: bool, kind: str
) -> Tensor | None:
    """A static scale or zero point as a float32 tensor of four dimensions."""
    if (value is not None) != wanted:
        expected = "a number or a tensor" if wanted else "None"
        raise UsageError(name, _shown(value), expected, f"With {kind}")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Tensor | Real):
        raise UsageError(name, value, "a number or a tensor")
    tensor = torch.as_tensor(value, dtype=torch.float32)
    if tensor.dim() not in (0, 4):
        raise UsageError(name, tuple(tensor.shape), "a number or a tensor of 4 dimensions")
    legal = torch.isfinite(tensor)
    if name.endswith("scale"):
        legal &= tensor > 0
    if not legal.all():
        offending = tensor[~legal].flatten()[0].item()
        what = "positive and finite" if name.endswith("scale") else "finite"
        raise UsageError(name, offending, f"{what} numbers in float32")
    return tensor.reshape(1, 1, 1, 1) if tensor.dim() == 0 else tensor


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise UsageError(name, value, "a tensor")


def _check_alike(sides: dict[str, Tensor]) -> None:
    """Refuse keys and values that are no tensors, or not of one shape."""
    for name, value in sides.items():
        _check_tensor(name, value)
    (first, k), (second, v) = sides.items()
    if v.shape != k.shape:
        raise UsageError(second, tuple(v.shape), f"{tuple(k.shape)}, as {first}")


def _shown(value: object) -> object:
    """What an error shows of an argument: of a tensor its shape."""
    return tuple(value.shape) if isinstance(value, Tensor) else value

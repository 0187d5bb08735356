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

from typing import NamedTuple

import torch

from ascend_kv.errors import UsageError
from ascend_kv.formats import REDUCED_DIMS
from ascend_kv.geometry import SCALE_TYPES
from ascend_kv.ops import kv_cache_dequantize, kv_cache_quantize

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
        k_scale: static only: a positive number, or a tensor that broadcasts to the shape of
            ``quant_mode``, e.g. ``[1,H,1,1]``.
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
        if quant_mode not in QUANT_MODES:
            raise UsageError("quant_mode", quant_mode, QUANT_MODES)
        if scale_type not in SCALE_TYPES:
            raise UsageError("scale_type", scale_type, SCALE_TYPES)
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
        if v.shape != k.shape:
            raise UsageError("v", tuple(v.shape), f"{tuple(k.shape)}, as k")
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
            UsageError: shapes or types that do not fit, zero points missing or not wanted.
        """
        for name, zero in (("k_zero_point", k_zero_point), ("v_zero_point", v_zero_point)):
            if self.symmetric != (zero is None):
                legal = "None, symmetric" if self.symmetric else "a tensor, asymmetric"
                raise UsageError(name, None if zero is None else tuple(zero.shape), legal)
        return KeysValues(
            kv_cache_dequantize(k_int8, k_scale, k_zero_point, dtype=dtype),
            kv_cache_dequantize(v_int8, v_scale, v_zero_point, dtype=dtype),
        )

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
        raise UsageError(name, value, "a number or a tensor" if wanted else "None", f"With {kind}")
    if value is None:
        return None
    tensor = torch.as_tensor(value, dtype=torch.float32)
    if tensor.dim() not in (0, 4):
        raise UsageError(name, tuple(tensor.shape), "a number or a tensor of 4 dimensions")
    legal = torch.isfinite(tensor)
    if name.endswith("scale"):
        legal &= tensor >= 0
    if not legal.all():
        offending = tensor[~legal].flatten()[0].item()
        what = "finite numbers" + (", not negative" if name.endswith("scale") else "")
        raise UsageError(name, offending, what)
    return tensor.reshape(1, 1, 1, 1) if tensor.dim() == 0 else tensor

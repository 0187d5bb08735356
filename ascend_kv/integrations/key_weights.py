"""What the weights of an attention layer say about its keys, before any token has been seen.

A key channel is ``W_row . x + b`` with x from the layer's input norm. With a norm weight γ and
activations of root mean square 1, ``r = ‖W_row ⊙ γ‖`` is the size of what varies, ``|b|`` of what
does not. Where keys have a norm of their own (QK-norm), r is that norm's weight and there is no b.

A rotary embedding turns channels (c, c + rotary_dim / 2) as a pair, as Hugging Face's
``rotate_half`` has it; channels from rotary_dim on are left alone. Letters: geometry.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ascend_kv.formats import FLOAT_DTYPES
from ascend_kv.geometry import ModelGeometry

Tensor = torch.Tensor

# Half types overflow: rows are scaled so far that three times their size stays this much below.
_HEADROOM = 64.0
_NO_LIMIT = 1000.0


class CannotConditionError(Exception):
    """A layer whose keys are made in a way that is not understood; the text says which."""


class KeyWeights(NamedTuple):
    """Sizes of one layer's key channels, float32 on the CPU.

    ``[N, D]``, or ``[1, D]`` where all heads share the weights of a norm.
    """

    attention: Any
    """the module, with ``q_proj`` and ``k_proj``, maybe ``q_norm`` and ``k_norm``"""
    own: Tensor
    """r: the size of what varies"""
    bias: Tensor
    """b, zeros where there is none"""
    norm_base: float | None
    """set where keys pass a norm before they are rotated, so that scales belong into its weight:
    it multiplies by its weight plus this, which is 1 in Gemma"""
    lowest: Tensor
    """the smallest exponents that q's rows bear, and k's with the opposite sign"""
    highest: Tensor
    """the largest"""

    @property
    def bias_share(self) -> float:
        """The bias against what varies, ‖b‖ / ‖r‖, in the head where it is largest."""
        share = self.bias.norm(dim=1) / self.own.norm(dim=1)
        return float(share.nan_to_num(0.0).max())

    def pair_bias_share(self, rotary_dim: int) -> float:
        """‖b‖ / 3‖r‖ of the pair where it is largest."""
        share = pair_norms(self.bias, rotary_dim) / (3 * pair_norms(self.own, rotary_dim))
        return float(share.nan_to_num(0.0).max())


def find_attention(hf_model: nn.Module) -> dict[int, tuple[Any, Any]]:
    """By layer: the attention module, and the norm before it or None."""
    found = {}
    for module in hf_model.modules():
        child: Any
        for child in module.children():
            if hasattr(child, "k_proj") and hasattr(child, "layer_idx"):
                found[child.layer_idx] = (child, getattr(module, "input_layernorm", None))
    return found


@torch.no_grad()
def read_key_weights(attention: Any, norm: Any, geometry: ModelGeometry) -> KeyWeights:
    """Read one layer.

    Raises:
        CannotConditionError: projections or norms of another kind than is understood here.
    """
    heads, kv_heads, dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
    base = None
    norms = sorted(
        name
        for name, child in attention.named_children()
        if "norm" in name and not isinstance(child, nn.Identity)
    )
    for name, count in (("q_proj", heads), ("k_proj", kv_heads)):
        _check_projection(name, getattr(attention, name, None), count * dim)
    key, query = attention.k_proj.weight, attention.q_proj.weight
    if norms:
        if norms != ["k_norm", "q_norm"]:
            raise CannotConditionError(f"norms {', '.join(norms)} in its attention")
        base = _norm_base(attention.k_norm, dim)
        if _norm_base(attention.q_norm, dim) != base:
            raise CannotConditionError("q_norm and k_norm are of different kinds")
        key, query = (x.weight[:, None] + base for x in (attention.k_norm, attention.q_norm))
        own = key.float().abs().view(1, dim).cpu()
        bias = torch.zeros_like(own)
        query_size = 3 * query.float().abs().flatten()
    else:
        gamma = 1.0 if norm is None else _norm_weight(norm, key)
        own = _row_sizes(key, gamma).view(kv_heads, dim).cpu()
        given = attention.k_proj.bias
        bias = torch.zeros_like(own)
        if given is not None:  # a copy: the parameter itself will be changed
            bias += given.float().view(kv_heads, dim).cpu()
        query_size = 3 * _row_sizes(query, gamma)
        if attention.q_proj.bias is not None:
            query_size = query_size + attention.q_proj.bias.float().abs()
    key_low, key_high = _limits(key, (bias.abs() + 3 * own).flatten().to(key.device))
    query_low, query_high = (x.view(own.shape[0], -1, dim) for x in _limits(query, query_size))
    lowest = torch.maximum(query_low.amax(1), -key_high.view_as(own))
    highest = torch.minimum(query_high.amin(1), -key_low.view_as(own))
    return KeyWeights(attention, own, bias, base, lowest, highest)


def pair_partners(head_dim: int, rotary_dim: int) -> Tensor:
    """For each channel the other of its pair, or itself beyond ``rotary_dim``."""
    partners = torch.arange(head_dim)
    partners[:rotary_dim] = partners[:rotary_dim].roll(rotary_dim // 2)
    return partners


def pair_norms(x: Tensor, rotary_dim: int) -> Tensor:
    """‖·‖ over the two channels of each pair of ``[..., D]``, the same for both."""
    partners = pair_partners(x.shape[-1], rotary_dim)
    paired = partners != torch.arange(len(partners))
    return torch.hypot(x, x[..., partners] * paired)


def pair_exponents(weights: KeyWeights, rotary_dim: int, with_bias: bool) -> Tensor:
    """Exponents e of powers of two: keys are multiplied by ``2 ** -e``, queries by ``2 ** e``.

    ``2 ** e`` is ‖b‖ + 3‖r‖ of a pair against the layer's median, rounded; without ‖b‖ where keys
    are stored without it. int32, the shape of ``weights.own``, within ``weights.lowest`` and
    ``weights.highest``.
    """
    size = 3 * pair_norms(weights.own, rotary_dim)
    if with_bias:
        size = size + pair_norms(weights.bias, rotary_dim)
    exponents = size.log2().round()
    known = exponents.isfinite()
    if known.any():
        exponents = torch.where(known, exponents - exponents[known].median(), 0.0)
    else:
        exponents = torch.zeros_like(exponents)
    partners = pair_partners(size.shape[-1], rotary_dim)
    lowest = torch.maximum(weights.lowest, weights.lowest[:, partners])
    highest = torch.minimum(weights.highest, weights.highest[:, partners])
    return exponents.clamp(lowest, highest).to(torch.int32)


def _row_sizes(weight: Tensor, gamma: Tensor | float) -> Tensor:
    return (weight.float() * gamma).norm(dim=1)


def _limits(weight: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """The exponents, at most 0 and at least 0, that rows ``[R, C]`` of a weight bear.

    A row may shrink as long as its root mean square stays four times above the smallest normal
    number. Then what its smallest elements lose to the subnormal range is, on the row as a
    whole, an eighth of a rounding step of the type or less. It may grow as long as neither its
    largest element nor what it makes of usual input (``size``) comes near the largest number.
    """
    info = torch.finfo(weight.dtype)
    values = weight.float()
    largest = values.abs().amax(1)
    rms = values.square().mean(1).sqrt()
    lowest = (4 * info.smallest_normal / rms).log2().ceil().clamp(-_NO_LIMIT, 0.0)
    lowest = torch.where(largest == 0, -_NO_LIMIT, lowest)
    highest = (info.max / _HEADROOM / torch.maximum(largest, size)).log2().floor()
    highest = highest.clamp(0.0, _NO_LIMIT)
    return lowest.nan_to_num(0.0).cpu(), highest.nan_to_num(0.0).cpu()


def _alternating(like: Tensor) -> Tensor:
    """1, -1, 1, ...: mean 0 and root mean square 1, which every kind of norm leaves alone."""
    signs = torch.ones(like.shape[-1], dtype=like.dtype, device=like.device)
    signs[1::2] = -1
    return signs


def _norm_weight(norm: Any, like: Tensor) -> Tensor:
    """What a norm multiplies each channel by, whether it keeps that or, as Gemma, one less."""
    signs = _alternating(like)
    centre = norm(torch.zeros_like(signs))
    return (norm(signs) - centre).float().abs()


def _check_projection(name: str, projection: Any, rows: int) -> None:
    if not isinstance(projection, nn.Linear) or projection.weight.dtype not in FLOAT_DTYPES:
        kind = "missing" if projection is None else type(projection).__name__
        raise CannotConditionError(f"{name} is {kind}, not a linear layer of floating point")
    if projection.weight.shape[0] != rows:
        raise CannotConditionError(f"{name} gives {projection.weight.shape[0]} values, not {rows}")


def _norm_base(norm: Any, dim: int) -> float:
    weight = getattr(norm, "weight", None)
    if weight is None or weight.shape != (dim,):
        raise CannotConditionError("its key norm has no weight for each channel of a head")
    signs = _alternating(weight)
    result = norm(signs).float()
    for base in (0.0, 1.0):
        if torch.allclose(result, signs.float() * (weight.float() + base), rtol=0.02):
            return base
    raise CannotConditionError("its key norm does more than multiply by a weight")


def layers_of(
    hf_model: nn.Module, geometry: ModelGeometry
) -> Iterator[tuple[int, KeyWeights | str]]:
    """Every layer's weights, or the reason why they cannot be conditioned."""
    found = find_attention(hf_model)
    for layer in range(geometry.num_layers):
        if layer not in found:
            yield layer, "no attention module with a k_proj of its own"
            continue
        try:
            yield layer, read_key_weights(*found[layer], geometry)
        except CannotConditionError as error:
            yield layer, str(error)

"""Folds pair scales and key offsets into a loaded model's weights, and takes them out again.

Several caches may share one set of weights and want them conditioned differently. So nothing is
lost: rows are multiplied by powers of two, elements that do not come back from that bit for bit
(half types near the end of their range) are noted, and biases and norms are kept as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ascend_kv.integrations.key_weights import KeyWeights

Tensor = torch.Tensor


class Fold(NamedTuple):
    """What is to be done to one layer."""

    weights: KeyWeights
    exponents: Tensor | None
    """[N, D], or [1, D] for a norm's weight; keys times 2 ** -e, queries times 2 ** e"""
    lacks: Tensor | None
    """[N, D] float32, scaled as the keys are: taken out, so that keys arrive without it"""
    head_axis: int | None = None
    """of what a key norm gives, where there is one"""


class WeightFolding:
    """The one place that changes the weights of a loaded model.

    One thread at a time: models that share weights and differ in their conditioning take turns,
    and a turn rewrites q_proj and k_proj.
    """

    def __init__(self, hf_model: nn.Module) -> None:
        """The weights are as they were loaded."""
        self.hf_model = hf_model
        self.plans: dict[Any, Any] = {}
        """plans made for these weights, by what they were made from"""
        self.rounded_weights = 0
        """elements that the present fold has rounded; none in float32 and bfloat16"""
        self._folds: Mapping[int, Fold] | None = None
        self._undo: list[Callable[[], object]] = []

    @torch.no_grad()
    def use(self, folds: Mapping[int, Fold] | None) -> None:
        """Bring the weights into this state; None is as they were loaded. Free if they are."""
        interrupted = self._folds is None and self._undo
        if folds is self._folds and not interrupted:
            return
        self._folds = None
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        self.rounded_weights = 0
        for fold in (folds or {}).values():
            self._apply(fold)
        self._folds = folds

    def _apply(self, fold: Fold) -> None:
        attention = fold.weights.attention
        key, query = attention.k_proj, attention.q_proj
        if fold.exponents is not None:
            if fold.weights.norm_base is not None:
                for norm, exponents in (
                    (attention.k_norm, -fold.exponents[0]),
                    (attention.q_norm, fold.exponents[0]),
                ):
                    self._multiply_norm(norm, fold.weights.norm_base, exponents)
            else:
                kv_heads, dim = fold.exponents.shape
                group = query.weight.shape[0] // (kv_heads * dim)
                for layer, exponents in (
                    (key, -fold.exponents),
                    (query, fold.exponents.repeat_interleave(group, 0)),
                ):
                    self._multiply_rows(layer.weight, exponents.flatten())
                    if layer.bias is not None:
                        self._multiply(layer.bias, exponents.flatten())
        if fold.lacks is not None:
            self._take_out(fold, fold.lacks)

    def _take_out(self, fold: Fold, lacks: Tensor) -> None:
        attention = fold.weights.attention
        key = attention.k_proj
        if fold.weights.norm_base is not None:
            self._subtract_behind(attention.k_norm, lacks.to(key.weight), fold.head_axis)
        elif key.bias is None:
            self._undo.append(lambda: setattr(key, "bias", None))
            key.bias = nn.Parameter(-lacks.flatten().to(key.weight), requires_grad=False)
        else:
            bias = key.bias.float() - lacks.flatten().to(key.bias.device)
            self._replace(key.bias, bias.to(key.bias.dtype))

    def _subtract_behind(self, norm: nn.Module, lacks: Tensor, head_axis: int | None) -> None:
        """Behind a norm no weight holds a constant."""
        if head_axis == 1:
            lacks = lacks[:, None]
        hook = norm.register_forward_hook(lambda module, given, output: output - lacks)
        self._undo.append(hook.remove)

    def _replace(self, parameter: Tensor, value: Tensor) -> None:
        before = parameter.clone()
        self._undo.append(lambda: parameter.copy_(before))
        parameter.copy_(value)

    def _multiply(self, parameter: Tensor, exponents: Tensor) -> None:
        self._replace(parameter, parameter * powers_of_two(exponents, parameter))

    def _multiply_norm(self, norm: Any, base: float, exponents: Tensor) -> None:
        if base == 0:
            self._multiply(norm.weight, exponents)
            return
        # w with base + w scaled is no rounded number of a half type: keep it in float32, in
        # which such norms compute
        before = norm.weight.data
        weight = before.to(torch.float32)
        self._undo.append(lambda: setattr(norm.weight, "data", before))
        norm.weight.data = (base + weight) * powers_of_two(exponents, weight) - base

    def _multiply_rows(self, weight: Tensor, exponents: Tensor) -> None:
        """Row i times ``2 ** exponents[i]``, in place: a copy may be too large to keep."""
        factors = powers_of_two(exponents, weight)[:, None]
        inverse = powers_of_two(-exponents, weight)[:, None]
        changed = weight * factors
        lost = torch.nonzero(changed * inverse != weight, as_tuple=True)
        kept = weight[lost]
        self.rounded_weights += len(kept)

        def restore() -> None:
            weight.mul_(inverse)
            weight[lost] = kept

        self._undo.append(restore)
        weight.copy_(changed)


def powers_of_two(exponents: Tensor, like: Tensor) -> Tensor:
    """``2 ** exponents`` in the type and on the device of ``like``."""
    ones = torch.ones(exponents.shape)
    return torch.ldexp(ones, exponents.cpu()).to(like.dtype).to(like.device)

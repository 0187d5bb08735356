"""``HCACompressor``: windows of many tokens to one entry each, in levels of gated pooling.

::

    from ascend_kv import HCACompressor

    compressor = HCACompressor(compression_ratio=128, num_levels=3)
    k_c, v_c = compressor.compress(k, v)      # [batch, heads, tokens // 128, dim]
    more_k, more_v = compressor.append(k, v)  # tokens that follow; same bits as all at once
    k, v = compressor.decompress(k_c, v_c)    # every token its window's entry: not the tokens

A level pools r entries of the level below (the first one: tokens) to one, each channel on its
own, with the weights softmax_j(gate_j + position_bias_j) over the r of a window; without learned
weights all weigh the same and an entry is the mean of its window, however many levels. After the
last level comes an RMSNorm where one is given, then RoPE for keys, at the window's first token.

Source: DeepSeek-V4 technical report, 2.3.2, equations 20 to 23 ("heavily compressed attention"),
which has one level of 128 with learned weights: ``num_levels=1``, ``k_gate`` = hidden states @
its gate projection, weights ``key.levels.0.position_bias`` and ``key.norm``.
"""

from __future__ import annotations

import math

import torch

from ascend_kv.compress.compressor import Compressor
from ascend_kv.compress.weights import Source
from ascend_kv.errors import UsageError


class HCACompressor(Compressor):
    """Compresses keys and values by pooling windows that do not overlap.

    It holds the state of the sequences it was given last (``append``, ``remainder``); its settings
    never change.

    Args:
        compression_ratio: tokens of an entry.
        num_levels: pooling stages. Their ratios multiply to ``compression_ratio``, as near to
            each other as its prime factors allow and the largest first: 128 is 8 * 4 * 4.
        weights: gates, position biases and norms, learned elsewhere: a safetensors file or a
            mapping (``ascend_kv.compress.weights`` has the names); None: uniform, no norm.
        norm_eps: of the RMSNorm.
        inverse_frequencies: ``[pairs]``, of the keys' RoPE, on their last ``2 * pairs`` channels,
            as ``inv_freq`` of transformers' rotary modules; None: keys are not turned.
        interleaved: RoPE's pairs are neighbours (DeepSeek), or lie half the turned channels
            apart (False: Llama, Qwen).

    Raises:
        UsageError: a ratio that has no such levels, or weights that are not legal.
    """

    def __init__(
        self,
        compression_ratio: int = 128,
        num_levels: int = 3,
        *,
        weights: Source = None,
        norm_eps: float = 1e-6,
        inverse_frequencies: torch.Tensor | None = None,
        interleaved: bool = True,
    ) -> None:
        super().__init__(
            level_ratios(compression_ratio, num_levels),
            series=1,
            two_vectors=False,
            weights=weights,
            norm_eps=norm_eps,
            inverse_frequencies=inverse_frequencies,
            interleaved=interleaved,
        )


def level_ratios(compression_ratio: int, num_levels: int) -> tuple[int, ...]:
    """The ratios of the levels, largest first; see ``HCACompressor``.

    Raises:
        UsageError: no whole numbers of at least 2 and 1, or fewer prime factors than levels.
    """
    for name, value, least in (
        ("compression_ratio", compression_ratio, 2),
        ("num_levels", num_levels, 1),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(name, value, f"a whole number of at least {least}")
    primes = _prime_factors(compression_ratio)
    if num_levels > len(primes):
        legal = f"1 to {len(primes)}, the prime factors of compression_ratio {compression_ratio}"
        raise UsageError("num_levels", num_levels, legal)
    ratios = [1] * num_levels
    for prime in reversed(primes):  # the largest first, each to the smallest level
        ratios[ratios.index(min(ratios))] *= prime
    return tuple(sorted(ratios, reverse=True))


def _prime_factors(number: int) -> list[int]:
    """In ascending order."""
    factors = []
    divisor = 2
    while divisor <= math.isqrt(number):
        if number % divisor:
            divisor += 1
        else:
            factors.append(divisor)
            number //= divisor
    return [*factors, number]

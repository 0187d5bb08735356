"""Keys and values rotated before they are stored, so that their channels become alike.

With H the Hadamard matrix of n channels (entries +-1, H H = n I) the product of a query and a key
stays what it is::

    (2^-b H q) . (2^-a H k) = 2^-(a + b) q . H H k = q . k            a + b = log2 n

so nothing has to be turned back: scores come out as they are. One large channel is spread over
all n, where it costs a quantization step of all a little instead of drowning the others. The
factors are powers of two, a the larger half of log2 n, so that they round nothing and rotated keys
are about as large as keys.

Values are rotated as keys are where the format of values says so. Attention's output is a weighted
sum of values, rotated with them, and goes back as queries go there, for H H = n I:
2^-b H (sum p 2^-a H v) = sum p v. It costs a transform for every stored value and every output,
whatever the context.

n is the largest power of two that divides head_dim D; the D / n runs of n channels are rotated each
by itself. Keys arrive rotated by position already (RoPE): that does not commute with H, so H comes
last. A key offset (``integrations.key_offset``) is taken from queries as they were.

The additions are those of the fast transform (Fino and Algazi, "Unified Matrix Treatment of the
Fast Walsh-Hadamard Transform", 1976), in float32: log2 n roundings of a value, the same however
many tokens come at once.
"""

from __future__ import annotations

import torch

from ascend_kv.cache_formats import rotated_channels

Tensor = torch.Tensor


def rotate(x: Tensor) -> Tensor:
    """Keys or values ``[..., D]`` in any float type as they are stored, in float32."""
    exponent = _exponent(x)
    return _transform(x) * 2.0 ** -(exponent - exponent // 2)


def rotate_back(x: Tensor) -> Tensor:
    """Undoes ``rotate``: ``[..., D]`` in any float type to float32.

    Outputs over rotated values become what they are. Queries become what rotated keys want, for H
    is its own transpose.
    """
    return _transform(x) * 2.0 ** -(_exponent(x) // 2)


def _exponent(x: Tensor) -> int:
    """log2 n."""
    return rotated_channels(x.shape[-1]).bit_length() - 1


def _transform(x: Tensor) -> Tensor:
    """H times every run of n channels."""
    shape, width = x.shape, 1
    x = x.to(torch.float32)
    for _ in range(_exponent(x)):
        first, second = x.unflatten(-1, (-1, 2, width)).unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        width *= 2
    return x.reshape(shape)

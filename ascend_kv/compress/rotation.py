"""Rotary embedding of entries: each at the position of its window's first token."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ascend_kv.errors import UsageError

Tensor = torch.Tensor


class Rotation(NamedTuple):
    """How keys are turned: the last ``2 * len(inverse_frequencies)`` channels, pair by pair.

    Pair i turns by ``position * inverse_frequencies[i]``. It is made of channels (2i, 2i + 1) of
    those where ``interleaved`` (DeepSeek), else of (i, i + half of them) (Llama, Qwen).
    """

    inverse_frequencies: Tensor
    interleaved: bool

    def turn(self, entries: Tensor, positions: Tensor) -> None:
        """Turn float32 ``[..., n, D]`` in place, n entries at ``positions`` [n]."""
        half = len(self.inverse_frequencies)
        frequencies = self.inverse_frequencies.to(entries.device)
        # The angle is rounded to float32 as models do; its cosine in float64, because float32
        # cosines differ in the last bit with the place in a vector, and streaming must not.
        angles = (positions[:, None].to(torch.float32) * frequencies).to(torch.float64)
        cosine, sine = (x.to(torch.float32) for x in (angles.cos(), angles.sin()))
        pairs = entries[..., -2 * half :]
        shape = (half, 2) if self.interleaved else (2, half)
        first, second = pairs.unflatten(-1, shape).unbind(-1 if self.interleaved else -2)
        turned = (first * cosine - second * sine, second * cosine + first * sine)
        first.copy_(turned[0])
        second.copy_(turned[1])


def make_rotation(inverse_frequencies: Tensor | None, interleaved: bool) -> Rotation | None:
    """A rotation, or None where there are no frequencies.

    Raises:
        UsageError: no vector of floats, or ``interleaved`` is neither True nor False.
    """
    if not isinstance(interleaved, bool):
        raise UsageError("interleaved", interleaved, "True, False")
    if inverse_frequencies is None:
        return None
    given = inverse_frequencies
    if not isinstance(given, Tensor) or given.dim() != 1 or not given.is_floating_point():
        shown = tuple(given.shape) if isinstance(given, Tensor) else given
        raise UsageError("inverse_frequencies", shown, "floats [pairs], or None")
    return Rotation(given.detach().to(torch.float32), interleaved)

"""What a model's layers turn their keys by, and turning keys forth and back.

Pairs are channels i and i + half of them, as Hugging Face's dense models have them. Letters:
geometry.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ascend_kv.integrations.key_weights import find_attention

Tensor = torch.Tensor


@contextmanager
def watched_rotary(hf_model: Any) -> Iterator[dict[int, Tensor]]:
    """By layer the angles that a forward inside hands to its attention.

    Yields:
        ``[T, R / 2, 2]`` cosines and sines in the model's type, of the latest forward, R channels
        that are turned; a layer that is handed none is not there.
    """
    angles: dict[int, Tensor] = {}

    def note(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        if (turns := keywords.get("position_embeddings")) is not None:
            half = turns[0].shape[-1] // 2
            angles[module.layer_idx] = torch.stack([x[0, :, :half] for x in turns], -1)

    hooks = [
        attention.register_forward_pre_hook(note, with_kwargs=True)
        for attention, _ in find_attention(hf_model).values()
    ]
    try:
        yield angles
    finally:
        for hook in hooks:
            hook.remove()


def turn(x: Tensor, angles: Tensor, back: bool = False) -> Tensor:
    """``[T, N, D]`` in float32, its first R channels turned by ``angles`` [T, R / 2, 2].

    Back divides by what some rotary embeddings (yarn) multiply both cosine and sine with.
    """
    cosine, sine = angles.to(torch.float32)[:, None].unbind(-1)
    if back:
        square = cosine.square() + sine.square()
        cosine, sine = cosine / square, -sine / square
    turned, rest = x.to(torch.float32).tensor_split([2 * angles.shape[1]], -1)
    first, second = turned.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), -1)

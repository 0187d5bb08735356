"""What a DeepSeek-V4 layer brings to attention, and the small things done with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor


class LayerInput(NamedTuple):
    """What a layer brings to attention."""

    module: Any  # its attention module
    query: Tensor  # [T, H, D] after RoPE
    key: Tensor  # [T, D] after RoPE; the value too
    hidden: Tensor  # [T, hidden]
    residual: Tensor  # [T, q_lora_rank], what queries are projected from
    rotation: tuple[Tensor, Tensor]  # cosine and sine [1, T, R / 2] of the tokens' positions


def turn_last(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """``[T, H, D]`` with its last channels turned, neighbours as pairs; angles ``[T, R / 2]``."""
    width = 2 * cosine.shape[-1]
    first, second = x[..., -width:].to(torch.float32).unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = cosine[:, None].to(torch.float32), sine[:, None].to(torch.float32)
    turned = torch.stack((first * cosine - second * sine, second * cosine + first * sine), -1)
    return torch.cat((x[..., :-width], turned.flatten(-2).to(x.dtype)), -1)


def project(projection: Any, hidden: Tensor) -> Tensor:
    """transformers keeps some projections of a float16 model in float32."""
    projected: Tensor = projection(hidden.to(projection.weight.dtype))
    return projected

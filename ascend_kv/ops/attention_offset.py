"""What scores lack where keys are stored without a part that all of them have in common.

A key at position n that lacks R(n) b, R(n) being the rotary embedding's turn, makes of a query q a
score that lacks ``q . R(n) b``. ``paged_attention`` takes b and the turn's frequencies, so that
nothing as long as the context has to exist. Here are their checks, and what is lacking at some
positions or at all. Letters as in ``attention_operands``.
"""

from __future__ import annotations

import torch

from ascend_kv.errors import UsageError

Tensor = torch.Tensor


def check_offset(
    key_offset: Tensor | None,
    rotary_frequencies: Tensor | None,
    offset_query: Tensor | None,
    score_bias: Tensor | None,
    query: Tensor,
    kv_heads: int,
) -> None:
    """Refuse an offset and frequencies that do not fit the queries, the cache or each other."""
    if key_offset is None or rotary_frequencies is None:
        if key_offset is not None or rotary_frequencies is not None:
            name = "key_offset" if key_offset is None else "rotary_frequencies"
            legal = "a tensor: key_offset and rotary_frequencies come together"
            raise UsageError(name, None, legal)
        if offset_query is not None:
            raise UsageError("offset_query", tuple(offset_query.shape), "None without key_offset")
        return
    if score_bias is not None:
        raise UsageError("score_bias", tuple(score_bias.shape), "None beside key_offset")
    dim = query.shape[2]
    if dim % 2:
        raise UsageError("query", tuple(query.shape), "an even number of channels with key_offset")
    for name, given, shape, dtype in (
        ("key_offset", key_offset, (kv_heads, dim), torch.float32),
        ("rotary_frequencies", rotary_frequencies, (dim // 2,), torch.float64),
    ):
        if given.shape != shape:
            raise UsageError(name, tuple(given.shape), list(shape))
        if given.dtype is not dtype:
            raise UsageError(name, given.dtype, str(dtype))
    if offset_query is not None:
        if offset_query.shape != query.shape:
            raise UsageError("offset_query", tuple(offset_query.shape), f"{list(query.shape)}")
        if not offset_query.dtype.is_floating_point:
            raise UsageError("offset_query", offset_query.dtype, "a float type")


def lacking_at(
    query: Tensor, key_offset: Tensor, rotary_frequencies: Tensor, positions: Tensor
) -> Tensor:
    """What scaled scores lack at ``positions``, angles in float64, the rest in float32.

    Args:
        query: ``[b, Q, H, D]`` float32, scaled.
        key_offset: ``[N, D]``.
        rotary_frequencies: ``[D / 2]``, radians from a position to the next.
        positions: ``[b, N or 1, P]`` int64.

    Returns:
        ``[b, H, Q, P]`` float32.
    """
    b, queries, heads, dim = query.shape
    angles = positions[..., None] * rotary_frequencies.to(positions.device)
    cosine, sine = angles.cos().to(torch.float32), angles.sin().to(torch.float32)
    first, second = key_offset[:, None].chunk(2, -1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
    kv_heads, length = turned.shape[1:3]
    grouped = query.reshape(b, queries, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    scores = grouped.reshape(b, kv_heads, -1, dim) @ turned.transpose(2, 3)
    return scores.view(b, heads, queries, length)


def score_bias_of(
    query: Tensor, key_offset: Tensor, rotary_frequencies: Tensor, length: int
) -> Tensor:
    """The ``score_bias`` ``[T, H, length]`` that stands for an offset; ``query`` is scaled."""
    positions = torch.arange(length, device=query.device)[None, None]
    bias = lacking_at(query[None], key_offset, rotary_frequencies, positions)
    return bias[0].transpose(0, 1)

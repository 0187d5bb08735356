"""The antiquant modes: which one the scales of a cache ask for, and the tensors it wants.

| mode | scales | type | for |
|---|---|---|---|
| 0 | (1, N, 1, D), or (1) | the query's | static scales of channels, or of the layer |
| 2 | (N) | the query's | static scales of heads |
| 4 | (K, S), as they lie | float32 | a token's, symmetric, both sides |
| 5 | (K, N, S), as they lie | float32 | a token and head's, symmetric, both sides |
| 1 | (1, b, W * S), gathered | float32 | a token's, otherwise |
| 3 | (b, N, W * S), gathered | float32 | a token and head's, otherwise, and mixed with a token's |
| key 0, value 1 | as there | as there | static keys, values with a token's scale |

The static scales are rounded to the query's type, since the device wants them so. A static zero
point is not passed at all: keys moved by a constant move all scores of a query alike, and values
moved by a constant move the output; ``fused_execute`` adds both afterwards, exactly, where the
device's offsets would be rounded to the query's type. A token's zero point is an offset of the
device, (code + offset) * scale, in float32.
"""

from __future__ import annotations

from ascend_kv.ops.fused_request import STATIC, Part, Request
from ascend_kv.ops.fused_sources import (
    GatheredScale,
    PagedScale,
    Source,
    StaticScale,
    table_of,
)


def modes(request: Request) -> tuple[int, int] | None:
    """Antiquant mode of keys and values, None where no mode has such a pair of scales."""
    key, value = request.key, request.value
    if {"group", "block"} & {key, value}:
        return None
    if key in STATIC and value in STATIC:
        if request.cache_layout == "NZ" or key == value == "layer" or "channel" in (key, value):
            return 0, 0
        return 2, 2
    if key in STATIC:
        return (0, 1) if value == "token" else None
    if value in STATIC:
        return None
    alike = key == value and not (request.key_zero_point or request.value_zero_point)
    per_head = "token_head" in (key, value)
    if alike and request.paged_scales and request.cache_layout != "NZ":
        return (5, 5) if per_head else (4, 4)
    return (3, 3) if per_head else (1, 1)


def scale_arguments(request: Request, part: Part) -> dict[str, int | Source]:
    """The arguments that tell the device how to read an int8 cache, by the first call's names."""
    pair = modes(request)
    assert pair is not None  # a rule
    arguments: dict[str, int | Source] = {}
    offsets = {
        "key": request.key_zero_point and request.key not in STATIC,
        "value": request.value_zero_point and request.value not in STATIC,
    }
    for side, mode in zip(("key", "value"), pair, strict=True):
        arguments[f"{side}_antiquant_mode"] = mode
        arguments[f"{side}_antiquant_scale"] = _source(request, part, side, mode, False)
        if any(offsets.values()):  # both or none
            arguments[f"{side}_antiquant_offset"] = _source(request, part, side, mode, True)
    return arguments


def _source(request: Request, part: Part, side: str, mode: int, offset: bool) -> Source:
    heads, dim = request.kv_heads, request.head_dim
    nz = request.cache_layout == "NZ"
    if mode == 0 and not nz and request.key == request.value == "layer":
        return StaticScale(side, (1, 1, 1, 1), (1,), request.query_dtype, offset)
    if mode == 0:
        shape = (heads, 1, dim) if nz else (1, heads, 1, dim)
        return StaticScale(side, (1, heads, 1, dim), shape, request.query_dtype, offset)
    if mode == 2:
        return StaticScale(side, (1, heads, 1, 1), (heads,), request.query_dtype, offset)
    if mode in (4, 5):
        return PagedScale(side, shared=mode == 4)
    table = table_of(request, part)
    if mode == 3:
        return GatheredScale(side, table, heads, leading=False, offset=offset)
    return GatheredScale(side, table, None, leading=not nz, offset=offset)

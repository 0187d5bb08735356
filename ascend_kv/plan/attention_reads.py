"""Which caches an NPU's fused attention reads as they lie, and which it makes copy in every step.

The rules are those of ``ops.fused_rules`` that a plan can know of, said without torch; a test
holds the two together. A cache that breaks one is gathered, dequantized and written out in 16 bit
in every step, for every sequence that decodes, before attention reads that.
"""

from __future__ import annotations

from ascend_kv.geometry import FormatSpec, LayerFormat, ModelGeometry

_MOST_TOKENS = 262_144
_LARGEST_BLOCK = 512
_STATIC = ("layer", "head", "channel")


def why_copied(
    geometry: ModelGeometry, spec: LayerFormat, model_dtype: str, block_size: int, tokens: int
) -> str | None:
    """In words, why decodes over such a cache copy it; None where it is read as it lies.

    Args:
        geometry: of the model.
        spec: the format of a layer.
        model_dtype: type of the queries, "float16" or "bfloat16".
        block_size: tokens in a block.
        tokens: of the longest sequence.
    """
    key, value = spec.key, spec.value
    names = {key.name, value.name}
    if len(names) > 1 or names - {"int8", model_dtype}:
        return "keys and values are not both INT8, or both of the model's type"
    if key.quantized:
        if geometry.head_dim % 32:
            return f"a head of {geometry.head_dim} is no multiple of 32"
        if (reason := _why_scales(key, value, model_dtype)) is not None:
            return reason
    if block_size > _LARGEST_BLOCK or block_size % (32 if key.quantized else 16):
        return f"blocks of {block_size} tokens"
    if -(-tokens // block_size) * block_size > _MOST_TOKENS:
        return f"block tables of more than {_MOST_TOKENS:,} tokens"
    return None


def _why_scales(key: FormatSpec, value: FormatSpec, model_dtype: str) -> str | None:
    kinds = (key.granularity, value.granularity)
    if "group" in kinds:
        return "scales of groups of channels have no antiquant mode"
    static = [kind in _STATIC for kind in kinds]
    if all(static) or not any(static):
        return None
    if not static[0] or kinds[1] != "token":
        return f"keys with a scale a {kinds[0]} and values with one a {kinds[1]} have no mode"
    if model_dtype != "float16":
        return "static keys with values scaled by token want a float16 query"
    return None

"""The formats of a KV cache by their names, as users write them.

Quantized formats may have words after their name, each with a slash, in any order::

    int8/token_head   int8/group32/asymmetric   fp8_e4m3/head/static   int4/asymmetric/hadamard

A granularity (``group32``: groups of 32 channels), ``dynamic`` or ``static``, ``symmetric`` or
``asymmetric``, ``hadamard``; what is not said comes from the arguments beside the name. Keys and
values may differ: ``k:int4/hadamard+v:fp8_e4m3``, or a mapping ``{"k": "int8", "v": "int4"}``.

``int4/kivi`` is short for ``k:int4/channel/asymmetric+v:int4/token_head/asymmetric``: each key
channel has one scale for the tokens of a block (Liu et al., "KIVI", 2024, arXiv 2402.02750).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from ascend_kv.cache_formats import (
    BY_TOKEN,
    GRANULARITIES,
    SCALE_TYPES,
    FormatSpec,
    LayerFormat,
    MixedFormat,
)
from ascend_kv.errors import UsageError

_FIELD = "kv_cache_dtype"


class _Quantized(NamedTuple):
    """What a quantized format can and costs."""

    value_bits: int
    scale_bits: int
    zero_points: bool = True
    static: bool = True
    hadamard: bool = False


_QUANTIZED = {
    "int8": _Quantized(8, 32),
    "fp8_e4m3": _Quantized(8, 32, zero_points=False),
    "fp8_e5m2": _Quantized(8, 32, zero_points=False),
    "int4": _Quantized(4, 16, static=False, hadamard=True),
}


FORMATS: Mapping[str, FormatSpec] = {
    "float32": FormatSpec("float32", 32),
    "float16": FormatSpec("float16", 16),
    "bfloat16": FormatSpec("bfloat16", 16),
}
"""The unquantized formats by name; ``format_spec`` makes the quantized ones."""

_SYNONYMS = {
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "fp8_e4m3",
}
_BY_CHANNEL = {"int4/kivi": {"k": "int4/channel/asymmetric", "v": "int4/token_head/asymmetric"}}
"""Pairs of formats that have a name"""
_PER_TOKEN_HEAD = {"int8_per_token_head": "int8", "int4_per_token_head": "int4"}
"""vLLM's names"""
FORMAT_NAMES = (*FORMATS, *_QUANTIZED, *_PER_TOKEN_HEAD, *_SYNONYMS)
"""Every name that ``format_spec`` takes, words apart."""


class _Words(NamedTuple):
    """What a name and the arguments beside it ask for."""

    granularity: str
    symmetric: bool
    scale_type: str
    group_size: int | None
    hadamard: bool = False


def format_spec(
    name: str,
    granularity: str = "token_head",
    symmetric: bool = True,
    scale_type: str = "dynamic",
    group_size: int | None = None,
) -> FormatSpec:
    """The format of that name; all but the name is of no account to unquantized formats.

    Args:
        name: one of ``FORMAT_NAMES``, perhaps with words after it (see the module), which then
            hold instead of the arguments. "fp8" is "fp8_e4m3"; "int8_per_token_head" and
            "int4_per_token_head" are INT8 and INT4 with ``granularity="token_head"`` and no
            other, symmetric unless it is said.
        granularity: which numbers share a scale.
        symmetric: no zero points.
        scale_type: "dynamic": from each token's own numbers; "static": given beforehand.
        group_size: channels that share a scale, with granularity "group" only.

    Raises:
        UsageError: an unknown name, word, granularity or scale type, what a format has not got,
            or a group_size that is missing, not wanted or below 2.
    """
    if granularity not in GRANULARITIES:
        raise UsageError("granularity", granularity, GRANULARITIES)
    if scale_type not in SCALE_TYPES:
        raise UsageError("scale_type", scale_type, SCALE_TYPES)
    base, *words = name.split("/") if isinstance(name, str) else [name]
    base = _SYNONYMS.get(base, base)
    if base in FORMATS:
        if words:
            raise UsageError(_FIELD, name, f"{base}: unquantized formats have no words after them")
        return FORMATS[base]
    if base not in _QUANTIZED and base not in _PER_TOKEN_HEAD:
        raise UsageError(_FIELD, name, FORMAT_NAMES)
    wanted = _read(name, words, _Words(granularity, symmetric, scale_type, group_size))
    if base in _PER_TOKEN_HEAD and wanted.granularity != "token_head":
        raise UsageError("granularity", wanted.granularity, f"token_head with {base}")
    base = _PER_TOKEN_HEAD.get(base, base)
    kind = _QUANTIZED[base]
    _check_kind(base, kind, wanted)
    _check_groups(wanted)
    return FormatSpec(
        name=base,
        value_bits=kind.value_bits,
        granularity=wanted.granularity,
        symmetric=wanted.symmetric,
        scale_bits=kind.scale_bits,
        static=wanted.scale_type == "static",
        group_size=wanted.group_size,
        hadamard=wanted.hadamard,
    )


def _read(name: str, words: list[str], wanted: _Words) -> _Words:
    """``wanted`` with the words of a name."""
    said: set[str] = set()
    for word in words:
        changes: dict[str, Any] = {}
        size = word.removeprefix("group")
        if word in GRANULARITIES:
            changes = {"granularity": word, "group_size": None}
        elif size != word and size.isdecimal():
            changes = {"granularity": "group", "group_size": int(size)}
        elif word in SCALE_TYPES:
            changes = {"scale_type": word}
        elif word in ("symmetric", "asymmetric"):
            changes = {"symmetric": word == "symmetric"}
        elif word == "hadamard":
            changes = {"hadamard": True}
        else:
            legal = (*GRANULARITIES, "group32", *SCALE_TYPES, "symmetric", "asymmetric", "hadamard")
            raise UsageError(f"{_FIELD} {name}", word, legal)
        if said & changes.keys():
            raise UsageError(f"{_FIELD} {name}", "/".join(words), "one word of each kind")
        said |= changes.keys()
        wanted = wanted._replace(**changes)
    return wanted


def _check_kind(name: str, kind: _Quantized, wanted: _Words) -> None:
    """Refuse what the format has not got."""
    if not kind.zero_points and not wanted.symmetric:
        raise UsageError("symmetric", False, f"True with {name}, which has no zero points")
    if not kind.static and wanted.scale_type == "static":
        hint = "Its scales are every token's own; int8 and fp8 have static ones."
        raise UsageError("scale_type", wanted.scale_type, f"dynamic with {name}", hint)
    legal = (*BY_TOKEN, "channel")  # of a block's tokens: LayerFormat.key.scales_by_block
    if not kind.static and wanted.granularity not in legal:
        raise UsageError("granularity", wanted.granularity, f"{', '.join(legal)} with {name}")
    if wanted.hadamard and wanted.granularity == "channel":
        hint = "Scales by channel want a large channel by itself; a rotation spreads it over all."
        raise UsageError(_FIELD, f"{name}/channel/hadamard", "one of the two words", hint)
    if wanted.hadamard and not kind.hadamard:
        raise UsageError(_FIELD, f"{name}/hadamard", f"{name}, or int4/hadamard")


def _check_groups(wanted: _Words) -> None:
    size = wanted.group_size
    if wanted.granularity != "group":
        if size is not None:
            raise UsageError("group_size", size, f"none with granularity {wanted.granularity}")
        return
    if not isinstance(size, int) or isinstance(size, bool) or size < 2:
        raise UsageError("group_size", size, "a divisor of head_dim of at least 2")
    if wanted.scale_type == "static":
        hint = "Static scales of groups are scales of channels that repeat."
        raise UsageError("scale_type", "static", "dynamic with granularity group", hint)


def layer_format(given: str | Mapping[str, Any], **defaults: Any) -> LayerFormat:
    """The format of a layer's keys and values.

    Args:
        given: what ``format_spec`` takes, for both; or ``"k:...+v:..."`` or a mapping from "k" and
            "v" to such names. A rotation that is named for both is of keys alone: it is they that
            have large channels; ``v:`` asks for that of values.
        defaults: the other arguments of ``format_spec``, for whatever is quantized.

    Raises:
        UsageError: as ``format_spec``; also a side that is missing or unknown, scales of which
            only one side's are static.
    """
    sides = _sides(given)
    if sides is None:
        assert isinstance(given, str)
        both = format_spec(given, **defaults)
        _check_value(both, both)
        if not both.hadamard:
            return both
        return MixedFormat(both, dataclasses.replace(both, hadamard=False))
    key, value = (format_spec(sides[side], **defaults) for side in ("k", "v"))
    _check_value(key, value)
    if key.quantized and value.quantized and key.static != value.static:
        hint = "Static scales of keys and values come together, or none."
        raise UsageError(_FIELD, f"k:{key}+v:{value}", "both static or both dynamic", hint)
    alike = key == value and not key.hadamard  # whose name for both is of keys alone
    return key if alike else MixedFormat(key, value)


def _check_value(key: FormatSpec, value: FormatSpec) -> None:
    """Refuse values that cannot be kept, or not beside such keys."""
    if value.scales_by_block:
        hint = "Only keys have channels that are large in every token: int4/kivi."
        legal = f"{', '.join(BY_TOKEN)} with int4 values"
        raise UsageError("granularity", value.granularity, legal, hint)
    if key.scales_by_block and value.value_bits > 16:
        hint = "Beside such keys the block that is not full yet is kept in 16 bits."
        raise UsageError(f"{_FIELD} v", str(value), "a format of 16 bits or fewer", hint)


def _sides(given: str | Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Names by "k" and "v"; None where one name stands for both."""
    if isinstance(given, str) and given in _BY_CHANNEL:
        return _BY_CHANNEL[given]
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif isinstance(given, str) and ":" in given:
        pairs = [part.strip().partition(":")[::2] for part in given.split("+")]
    else:
        return None
    sides, two = dict(pairs), len(pairs) == 2  # the last of one side's names must not win
    if not two or set(sides) != {"k", "v"} or not all(isinstance(x, str) for x in sides.values()):
        shown = given if isinstance(given, str) else dict(given)
        raise UsageError(_FIELD, shown, 'one name, "k:int8+v:int4", or {"k": "int8", "v": "int4"}')
    return sides

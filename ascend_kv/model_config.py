"""Fields of a Hugging Face ``config.json``: what is there, or the error that names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ascend_kv.errors import UnsupportedModelError

MOST = 2**31 - 1
MOST_LAYERS = 10_000


def need_count(config: Mapping[str, Any], field: str, most: int = MOST) -> int:
    """A whole number from 1 to ``most`` that has to be there.

    Raises:
        UnsupportedModelError: it is not, or is something else.
    """
    value = config.get(field)
    if value is None:
        hint = ""
        if field == "num_key_value_heads":
            hint = "Write num_attention_heads if every query head has a KV head of its own."
        raise UnsupportedModelError(field, "missing", "in the config", hint)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UnsupportedModelError(field, value, f"a whole number from 1 to {most}")
    return value


def count_or_zero(config: Mapping[str, Any], field: str) -> int:
    """The same, of a field that may be absent or 0.

    Raises:
        UnsupportedModelError: it is something else.
    """
    return need_count(config, field) if config.get(field) not in (None, 0) else 0


def layer_types_of(config: Mapping[str, Any]) -> Sequence[str]:
    """The entries of ``layer_types``, none if it is absent.

    Raises:
        UnsupportedModelError: it is no list of names.
    """
    given = config.get("layer_types") or ()
    if not isinstance(given, list | tuple) or not all(isinstance(kind, str) for kind in given):
        raise UnsupportedModelError("layer_types", given, "a list of names, one for each layer")
    return given


def rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``rope_parameters``, or ``rope_scaling`` as older checkpoints call it; may be empty.

    Raises:
        UnsupportedModelError: it is no mapping.
    """
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given = config.get(field) or {}
    if not isinstance(given, Mapping):
        raise UnsupportedModelError(field, given, "a mapping, or null")
    return given

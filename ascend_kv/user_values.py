"""Values as users write them: numbers of bytes, and mappings out of YAML that become dataclasses.

Every mistake is refused with the field's name, what was given and what is legal.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, TypeVar

from ascend_kv.errors import UsageError
from ascend_kv.registry import did_you_mean

C = TypeVar("C")

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power


def parse_bytes(value: str | int, field: str = "kv_cache_memory_bytes") -> int:
    """A number of bytes from "1.5GiB" (1024**3), "90MB" (1000**2), "4096" or a whole number.

    Raises:
        UsageError: under the name ``field``; also for anything below one byte.
    """
    legal = "a whole number of bytes, or text such as 90MB or 1.5GiB, of at least 1 byte"
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).strip().lower())
    if isinstance(value, (bool, float)) or not match or match[2] not in _UNITS:
        raise UsageError(field, value, legal)
    number = int(Decimal(match[1]) * _UNITS[match[2]])
    if number < 1:
        raise UsageError(field, value, legal)
    return number


def format_bytes(number: int) -> str:
    """Bytes for people, in the largest binary unit that gives at least 1: "90.00 MiB"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.2f} {unit}"
    return f"{number} B"


def from_mapping(cls: type[C], mapping: Mapping[str, Any], where: str) -> C:
    """A dataclass from what YAML gave: every key must be a field, every value of its type.

    Lists become tuples, nested mappings nested dataclasses, whole numbers floats where a float is
    wanted; fields whose names end in ``_bytes`` take ``parse_bytes``' text.

    Args:
        cls: a dataclass whose fields are int, float, str, bool, ``Literal``, ``tuple[X, ...]``,
            ``Mapping[str, Any]`` (taken as it is), dataclasses, or any of these ``| None``.
        mapping: the values by name.
        where: what the error messages put before the field, such as the file's name.

    Raises:
        UsageError: an unknown key (with those nearest to it), a missing one, or a wrong type.
    """
    return _build(cls, mapping, f"{where}: ")


def _build(cls: type[C], mapping: Any, prefix: str) -> C:
    assert dataclasses.is_dataclass(cls)
    if not isinstance(mapping, Mapping):
        raise UsageError(prefix.rstrip(": ."), mapping, "a mapping from names to values")
    kinds = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in mapping:
        if key not in fields:
            raise UsageError(
                f"{prefix}{key}", mapping[key], fields, did_you_mean(key, tuple(fields))
            )
    for name, field in fields.items():
        defaults = (field.default, field.default_factory)
        if name not in mapping and all(value is dataclasses.MISSING for value in defaults):
            raise UsageError(f"{prefix}{name}", None, _describe(kinds[name]), "It is required.")
    values = {key: _convert(value, kinds[key], f"{prefix}{key}") for key, value in mapping.items()}
    return typing.cast(C, cls(**values))


def _convert(value: Any, kind: Any, field: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(value, kind, field)
    if origin is typing.Literal:
        return one_of(field, value, args)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_convert(item, args[0], f"{field}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast(type, kind), value, f"{field}.")
    if origin is Mapping and isinstance(value, Mapping):
        return value
    if kind is int and field.endswith("_bytes"):
        return parse_bytes(value, field)
    if kind is float and is_int(value) and abs(value) < 2**1023:  # else it is no float
        return float(value)
    if origin is None and type(value) is kind:
        return value
    raise UsageError(field, value, _describe(kind))


def _convert_union(value: Any, kind: Any, field: str) -> Any:
    alternatives = [arg for arg in typing.get_args(kind) if arg is not type(None)]
    if value is None and len(alternatives) < len(typing.get_args(kind)):
        return None
    if len(alternatives) == 1:  # so that a wrong value inside it is named
        return _convert(value, alternatives[0], field)
    for alternative in alternatives:
        try:
            return _convert(value, alternative, field)
        except UsageError:
            continue
    raise UsageError(field, value, _describe(kind))


def _describe(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return ", or ".join("null" if arg is type(None) else _describe(arg) for arg in args)
    if origin is tuple:
        return f"a list, each of it {_describe(args[0])}"
    if origin is typing.Literal:
        return ", ".join(map(str, args))
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names.get(kind, "a mapping from names to values")


def is_int(value: object) -> bool:
    """Whether it is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def at_least_one(field: str, value: object) -> None:
    """Raise ``UsageError`` for what is no whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(field, value, "a whole number of at least 1")


def one_of(field: str, value: Any, legal: tuple[Any, ...]) -> Any:
    """``value``, or ``UsageError`` if it is none of ``legal``, types included: 1 is not True."""
    if not any(type(value) is type(item) and value == item for item in legal):
        raise UsageError(field, value, legal, did_you_mean(value, tuple(map(str, legal))))
    return value

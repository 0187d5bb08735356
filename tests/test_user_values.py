"""Bytes and mappings as users write them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from refusals import refused

from ascend_kv.config import (
    CacheConfig,
    SchedulerConfig,
)
from ascend_kv.errors import UsageError
from ascend_kv.user_values import format_bytes, from_mapping, parse_bytes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("1.5GiB", 3 * 2**29),
        ("90MB", 90_000_000),
        (" 2 kib ", 2048),
        ("1kB", 1000),
        ("0.1TB", 10**11),
        ("1TiB", 2**40),
        ("7B", 7),
        ("1.9999 KiB", 2047),
    ],
)
def test_bytes_in_words(given: str | int, expected: int) -> None:
    assert parse_bytes(given) == expected


@pytest.mark.parametrize(
    "given", ["", "GiB", "1.5 G", "-1MB", "1e9", "0", "0.5B", 0, -1, 1.5, True, None, "1,5GiB"]
)
def test_bytes_that_are_refused(given: Any) -> None:
    error = refused(UsageError, parse_bytes, given, "budget_bytes")
    assert (error.field, error.given) == ("budget_bytes", given)
    assert "90MB or 1.5GiB" in error.legal


def test_bytes_for_people() -> None:
    shown = [format_bytes(number) for number in (1023, 1024, 3 * 2**19, 3 * 2**29, 5 * 2**40)]
    assert shown == ["1023 B", "1.00 KiB", "1.50 MiB", "1.50 GiB", "5.00 TiB"]


@dataclass(frozen=True)
class Inner:
    mean: float
    sigma: float = 0.4


@dataclass(frozen=True)
class Outer:
    steps: int
    name: str = "x"
    kind: Literal["one", "two"] = "one"
    budget_bytes: int | None = None
    layers: tuple[int, ...] = ()
    inner: Inner = Inner(1.0)
    schemes: tuple[Inner, ...] = ()
    on: bool = False
    derived: int = field(default=7, init=False)


def test_a_mapping_becomes_a_dataclass() -> None:
    mapping = {
        "steps": 3, "kind": "two", "budget_bytes": "1KiB", "layers": [0, -1], "on": True,
        "inner": {"mean": 2}, "schemes": [{"mean": 1.5}, {"mean": 2.5, "sigma": 1}],
    }  # fmt: skip
    assert from_mapping(Outer, mapping, "r.yaml") == Outer(
        3, "x", "two", 1024, (0, -1), Inner(2.0), (Inner(1.5), Inner(2.5, 1.0)), True
    )
    assert from_mapping(Outer, {"steps": 1, "budget_bytes": None}, "r.yaml") == Outer(1)


@pytest.mark.parametrize(
    ("change", "where", "legal", "hint"),
    [
        ({"step": 3}, "r.yaml: step", "steps", "Did you mean steps?"),
        ({"derived": 3}, "r.yaml: derived", "steps", ""),
        ({3: 3}, "r.yaml: 3", "steps", ""),
        ({"inner": {"mean": 1, "sigm": 2}}, "r.yaml: inner.sigm", "mean, sigma", "sigma"),
        ({"inner": {}}, "r.yaml: inner.mean", "a number", "required"),
        ({"inner": 3}, "r.yaml: inner", "a mapping", ""),
        ({"schemes": [{"mean": 1}, {"mean": "1"}]}, "r.yaml: schemes[1].mean", "a number", ""),
        ({"schemes": {"mean": 1}}, "r.yaml: schemes", "a list, each of it a mapping", ""),
        ({"steps": "3"}, "r.yaml: steps", "a whole number", ""),
        ({"steps": 3.0}, "r.yaml: steps", "a whole number", ""),
        ({"steps": True}, "r.yaml: steps", "a whole number", ""),
        ({"steps": None}, "r.yaml: steps", "a whole number", ""),
        ({"name": 3}, "r.yaml: name", "text", ""),
        ({"name": None}, "r.yaml: name", "text", ""),
        ({"on": "yes"}, "r.yaml: on", "true or false", ""),
        ({"on": 1}, "r.yaml: on", "true or false", ""),
        ({"kind": "tow"}, "r.yaml: kind", "one, two", "two"),
        ({"layers": 3}, "r.yaml: layers", "a list, each of it a whole number", ""),
        ({"layers": [0, "1"]}, "r.yaml: layers[1]", "a whole number", ""),
        ({"layers": "01"}, "r.yaml: layers", "a list", ""),
        ({"budget_bytes": "much"}, "r.yaml: budget_bytes", "90MB or 1.5GiB", ""),
    ],
)
def test_mappings_that_are_refused(
    change: dict[Any, Any], where: str, legal: str, hint: str
) -> None:
    error = refused(UsageError, from_mapping, Outer, {"steps": 1, **change}, "r.yaml")
    assert error.field == where
    assert legal in error.legal
    assert hint in error.hint


def test_what_is_not_a_mapping_or_lacks_a_required_key() -> None:
    assert refused(UsageError, from_mapping, Outer, ["steps"], "r.yaml").field == "r.yaml"
    error = refused(UsageError, from_mapping, Outer, {}, "r.yaml")
    assert (error.field, error.legal) == ("r.yaml: steps", "a whole number")


def test_the_real_classes_read_yaml_too() -> None:
    config = from_mapping(
        CacheConfig,
        {
            "kv_cache_dtype": "int8",
            "kv_cache_memory_bytes": "90MB",
            "kv_cache_dtype_skip_layers": [0],
        },
        "r.yaml",
    )
    assert config == CacheConfig(
        "int8", kv_cache_memory_bytes=90_000_000, kv_cache_dtype_skip_layers=(0,)
    )
    assert (
        refused(UsageError, from_mapping, SchedulerConfig, {}, "r.yaml").field
        == "r.yaml: max_model_len"
    )

"""Names for things: found again, listed, and the nearest one named when a name is unknown."""

from __future__ import annotations

import pytest

from ascend_kv.errors import UsageError
from ascend_kv.registry import Registry, did_you_mean


def shapes() -> Registry[type]:
    registry: Registry[type] = Registry("shape")
    registry.register("square")(int)
    registry.register("circle")(float)
    return registry


def test_what_is_registered_is_found_and_listed() -> None:
    registry = shapes()

    @registry.register("triangle")
    class Triangle:
        pass

    assert registry.get("triangle") is Triangle
    assert registry.get("square") is int
    assert registry.names() == ("circle", "square", "triangle")


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        shapes().get("sqare")
    assert (caught.value.field, caught.value.legal) == ("shape", "circle, square")
    assert caught.value.hint == "Did you mean square?"


def test_a_name_is_taken_once() -> None:
    with pytest.raises(AssertionError, match="registered twice"):
        shapes().register("square")(str)


def test_hints() -> None:
    assert did_you_mean("blocksize", ("block_size", "window")) == "Did you mean block_size?"
    assert did_you_mean("zzz", ("block_size", "window")) == ""
    assert did_you_mean(3, ("block_size",)) == ""

"""How tests look at what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from ascend_kv.errors import UsageError

E = TypeVar("E", bound=UsageError)


def refused(kind: type[E], call: Callable[..., object], *arguments: Any, **options: Any) -> E:
    """The error of a call that must raise ``kind``."""
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    return caught.value

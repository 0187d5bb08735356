"""How ``npu_checks_*.py`` call the NPU's host functions: with CPU tensors, kernels on the twin."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from ascend_kv.ops.registration import handed_over

NPU = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
draw = random.Random(0)


def npu(name: str, *args: Any, **kwargs: Any) -> Any:
    """The operator as the dispatcher calls it for tensors of an NPU."""
    return getattr(torch.ops.ascend_kv, name).default.redispatch(NPU, *args, **kwargs)


def captured(call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """The call's result, which no kernel has written yet, and what runs its launches."""
    library = ctypes.CDLL(sys.argv[1])
    library.twin_graph_begin()
    try:
        result = call()
    finally:
        library.twin_graph_end()

    def replay() -> None:
        assert library.twin_graph_replay() > 0

    return result, replay


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit by bit but for signs of zero; NaN equals NaN."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found.nan_to_num(7e4), expected.nan_to_num(7e4))


def refuses(field: str, given: str, name: str, *args: Any, **kwargs: Any) -> None:
    """A ValueError that begins with the argument's name and says what was given."""
    try:
        npu(name, *args, **kwargs)
    except ValueError as error:
        said = str(error).splitlines()[0]
        assert said.startswith(f"{field}: got ") and given in said and "; legal: " in said, said
        return
    raise AssertionError(f"{name} takes a wrong {field}")


def kernels_served(*names: str) -> None:
    """No call was handed over to a reference so far."""
    assert not any(handed_over(name, "npu") for name in names)


def kept_reference(name: str, reason: str, before: dict[str, int]) -> None:
    """Exactly this reason was counted since."""
    now = handed_over(name, "npu")
    assert {r: n - before.get(r, 0) for r, n in now.items() if n != before.get(r, 0)} == {
        reason: 1
    }, now

"""Registers an operator with torch: schema, reference and fake function in one call.

The reference is registered under CompositeExplicitAutograd, so it serves every device until a
kernel registers itself for the CPU or for PrivateUse1 (the NPU); the dispatcher then prefers
the kernel. The C++ side only adds implementations (``TORCH_LIBRARY_IMPL``): the schema stands
once, in Python. The operators are for inference: no gradient flows through them.

Under the same name in ``ascend_kv_reference`` the reference stays callable whatever serves the
operator: a kernel hands over what it does not serve, and tests compare. A kernel that does so
calls ``ascend_kv_reference::handed_over``, which tells the reason once and counts it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "ascend_kv"
REFERENCE_NAMESPACE = "ascend_kv_reference"
DISPATCH_KEYS = {"cpu": "CPU", "npu": "PrivateUse1"}

logger = logging.getLogger(__name__)

_library = torch.library.Library(NAMESPACE, "DEF")
_references = torch.library.Library(REFERENCE_NAMESPACE, "DEF")
# (operator, device, reason) -> calls that a kernel handed over to the reference
_handed_over: Counter[tuple[str, str, str]] = Counter()


def register(
    schema: str, reference: Callable[..., Any], fake: Callable[..., Any]
) -> torch._ops.OpOverload:
    """Define ``ascend_kv::<schema>`` and return what the Python wrapper calls."""
    # weights that ask for gradients must not turn the cache into a graph that never ends
    serving = torch.no_grad()(reference)
    for namespace, library in ((NAMESPACE, _library), (REFERENCE_NAMESPACE, _references)):
        name = library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, serving, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    return operator(name)


def operator(name: str, namespace: str = NAMESPACE) -> torch._ops.OpOverload:
    """What a wrapper calls: whatever serves the operator, or its reference."""
    overload: torch._ops.OpOverload = getattr(getattr(torch.ops, namespace), name).default
    return overload


def has_kernel(name: str, device: str) -> bool:
    """Whether a kernel of its own, not the reference, serves an operator on ``cpu`` or ``npu``."""
    key = DISPATCH_KEYS[device]
    has: bool = torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", key)
    return has


def handed_over(name: str, device: str) -> dict[str, int]:
    """Why kernels of an operator handed calls over to the reference, and how often."""
    counted = _handed_over.items()
    return {reason: n for (*key, reason), n in counted if key == [name, device]}


def _note(name: str, device: str, reason: str) -> None:
    if not _handed_over[name, device, reason]:
        logger.warning("%s: the reference serves, no kernel on %s does: %s", name, device, reason)
    _handed_over[name, device, reason] += 1


_references.define("handed_over(str name, str device, str reason) -> ()")
_references.impl("handed_over", _note, "CompositeExplicitAutograd")

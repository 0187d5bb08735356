"""Registers an operator with torch: schema, reference and fake function in one call.

The reference is registered under CompositeExplicitAutograd, so it serves every device until a
kernel registers itself for the CPU or for PrivateUse1 (the NPU); the dispatcher then prefers
the kernel. The C++ side only adds implementations (``TORCH_LIBRARY_IMPL``): the schema stands
once, in Python. The operators are for inference: no gradient flows through them.

A kernel that meets a case it does not serve calls ``ascend_kv_reference::<name>(reason, ...)``,
which runs the reference, tells the reason once and counts it.
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
# Calls that kernels handed to the reference: (operator, reason) -> how often.
_handed_back: Counter[tuple[str, str]] = Counter()


def register(
    schema: str, reference: Callable[..., Any], fake: Callable[..., Any]
) -> torch._ops.OpOverload:
    """Define ``ascend_kv::<schema>`` and return what the Python wrapper calls."""
    name = _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    # weights that ask for gradients must not turn the cache into a graph that never ends
    reference = torch.no_grad()(reference)
    _library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    _register_way_back(schema, name, reference)
    overload: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return overload


def has_kernel(name: str, device: str) -> bool:
    """Whether a kernel of its own, not the reference, serves an operator on ``cpu`` or ``npu``."""
    key = DISPATCH_KEYS[device]
    has: bool = torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", key)
    return has


def handed_back(name: str) -> dict[str, int]:
    """Why kernels of an operator handed calls to the reference, and how often."""
    return {reason: count for (other, reason), count in _handed_back.items() if other == name}


def _register_way_back(schema: str, name: str, reference: Callable[..., Any]) -> None:
    def hand_back(reason: str, *args: Any, **kwargs: Any) -> Any:
        if not _handed_back[name, reason]:
            logger.warning("%s: the reference serves, no kernel does: %s", name, reason)
        _handed_back[name, reason] += 1
        return reference(*args, **kwargs)

    _references.define(schema.replace("(", "(str reason, ", 1))
    _references.impl(name, hand_back, "CompositeExplicitAutograd")

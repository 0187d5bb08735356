"""A plugin for pytest: the sanitized CPU operators serve instead of those that are installed.

``test_native_sanitizers`` starts pytest with it, with ``ASCEND_KV_OPERATORS=reference``, so that
no others are loaded, and with the library's path in ``SANITIZED_OPERATORS``.
"""

from __future__ import annotations

import os

import torch

import ascend_kv.ops  # noqa: F401

torch.ops.load_library(os.environ["SANITIZED_OPERATORS"])

"""The CPU twin from Python: kernels (launch), their tilings, and whole operators."""

from __future__ import annotations

"""Build script; what is said about the package is in ``pyproject.toml``."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))

from build_npu import add_npu_kernels

setup(**add_npu_kernels({}))

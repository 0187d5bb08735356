"""Build script; what is said about the package is in ``pyproject.toml``."""

from __future__ import annotations

from setuptools import setup

setup()

"""Finds and loads the CPU operators compiled from ``op_kernels``, which then serve on a CPU.

``ASCEND_KV_OPERATORS`` says what is wanted, here and on an NPU (``platform``): ``auto`` (compiled
operators where there are any, the default), ``native`` (an error where there are none) or
``reference`` (the Python references).

What a compiled operator does not serve it hands to the reference: lists of entries, a key offset of
keys that have positions of their own, caches whose channels do not lie side by side. The log says
so once, ``platform.implementations`` how often. What is wrong goes there too, so that errors are
the same.

Beside the library lies what it was compiled for. A library that was compiled for a CPU that has
more than this one, against another torch, or in a checkout from other sources than lie there now,
is not loaded: it could end the process.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import torch

from ascend_kv.errors import RunError, UsageError
from ascend_kv.ops import native_sources

logger = logging.getLogger(__name__)

VARIABLE = "ASCEND_KV_OPERATORS"
CHOICES = ("auto", "native", "reference")
LIBRARY = Path(__file__).with_name("_native_cpu.so")
_CPUINFO = Path("/proc/cpuinfo")


def operators_wanted() -> str:
    """One of ``CHOICES``, as the environment says.

    Raises:
        UsageError: it says something else.
    """
    wanted = os.environ.get(VARIABLE) or "auto"
    if wanted not in CHOICES:
        raise UsageError(VARIABLE, wanted, CHOICES)
    return wanted


def load_cpu_operators(library: Path = LIBRARY) -> bool:
    """Load the compiled operators if they are wanted and fit this machine; whether they serve.

    Raises:
        UsageError: the variable holds something else than ``CHOICES``.
        RunError: ``native`` is asked for and cannot be had.
    """
    wanted = operators_wanted()
    if wanted == "reference":
        return False
    problem = find_problem(library)
    if problem is None:
        try:
            torch.ops.load_library(str(library))
            return True
        except OSError as error:
            problem = f"the native CPU operators do not load ({error})"
    advice = "install the package again where torch and a C++ compiler are: pip install -e ."
    if wanted == "native":
        raise RunError(f"{VARIABLE}=native, but {problem}; {advice}")
    logger.warning("%s: the Python references serve, several times slower (%s)", problem, advice)
    return False


def find_problem(library: Path) -> str | None:
    """Why the library cannot be loaded here; None if it can."""
    description = library.with_suffix(".json")
    if not library.exists() or not description.exists():
        return "no native CPU operators were built"
    try:
        made_for = json.loads(description.read_text())
        made_with, features = made_for["torch"], set(made_for["cpu_features"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{description} does not say what the native CPU operators were built for"
    if made_with != torch.__version__:
        return (
            f"the native CPU operators were built with torch {made_with}, "
            f"and this is {torch.__version__}"
        )
    sources = native_sources.digest()
    if sources is not None and made_for.get("sources") != sources:
        return "the native CPU operators were built from other sources than these"
    missing = features - _cpu_features()
    if missing:
        return f"the native CPU operators need {', '.join(sorted(missing))}, which this CPU lacks"
    return None


def whole_number_bits() -> int | None:
    """Bits that compiled attention over codes leaves of a query or a weight; None: float32's.

    Codes are whole numbers, and some CPUs multiply those faster than floats. What codes are
    multiplied with is rounded against the largest of its row: to 24 bits on Intel's matrix unit
    (INT8 of up to 256 channels, from five query heads a KV head on and in prefills), to 16 bits
    with AVX2 (INT8 and INT4 of up to 512 channels); scales by group of channels or by channel of a
    block, and other CPUs, leave float32. A row is a query, times the keys' static scales, or the
    weights of a query for 64 tokens, each times the scale of its value. The sums are exact.

    With 16 bits a dot product with the codes is wrong by up to 1 / 65,534 of the row's largest
    times the sum of the codes' magnitudes. In the root mean square that is at most sqrt(D) / 256 of
    what the rounding of D channels to INT8 does to a score, and 1 / 256 for channels of like size.
    A query that is NaN or infinite, or below 2**-100 and not 0, sends those computed with it the
    way of float32 too.

    Raises:
        RunError: no compiled operators are loaded.
    """
    if not hasattr(torch.ops.ascend_kv_cpu, "whole_number_bits"):
        raise RunError("no compiled operators are loaded, which alone round to whole numbers")
    return int(torch.ops.ascend_kv_cpu.whole_number_bits()) or None


def _cpu_features() -> set[str]:
    try:
        return set(_CPUINFO.read_text().split())
    except OSError:
        return set()

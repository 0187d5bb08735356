"""The C++ sources of the native CPU operators, as one number.

``setup.py`` reads this file by its path and writes the number beside what it builds, so that a
checkout that has moved on does not load operators of other signatures, which would end the
process. Nothing but the standard library is imported here.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "op_kernels"


def digest(root: Path = ROOT) -> str | None:
    """Of names and contents of the sources; None where they do not lie beside the package."""
    files = sorted({*root.glob("*_cpu.cpp"), *root.glob("*/*_cpu.cpp"), *root.glob("*/cpu_*.h")})
    if not files:
        return None
    whole = hashlib.sha256()
    for file in files:
        whole.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return whole.hexdigest()

"""What the compiled operators are made for: the features of an x86 CPU, and CANN's version.

``setup.py`` and ``tools/build_npu.py`` read this file by its path, since they run before the
package is installed; ``ascend-kv doctor`` imports it. So what is built and what is said about the
machine cannot differ. Nothing but the standard library is imported here.
"""

from __future__ import annotations

import re
from pathlib import Path

# The first of these that this CPU has and the compiler knows is compiled for (cpu_vector.h,
# cpu_word_unit.h and cpu_matrix_unit.h of op_kernels); none above ASCEND_KV_CPU_LEVEL, for a
# library that also serves lesser CPUs. The features' names are those of /proc/cpuinfo; flags_of
# makes the compiler's of them. On ARM none is needed.
AVX2 = ("avx2", "fma", "f16c")
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", *AVX2)
CPU_LEVELS: dict[str, tuple[str, ...]] = {
    "amx": (*AVX512, "amx_tile", "amx_int8"),
    "avx512": AVX512,
    "avx2": AVX2,
    "baseline": (),
}

OLDEST_CANN = 9


def flags_of(features: tuple[str, ...]) -> list[str]:
    """The compiler's flags for CPU features."""
    return [f"-m{feature.replace('_', '-')}" for feature in features]


def cann_version(home: Path) -> str | None:
    """The version of the toolkit in ``home``, such as 9.0.0; None where no file tells it.

    The toolkit's own file comes first: a part of it may count its versions otherwise.
    """
    toolkit = sorted(home.glob("*/ascend_toolkit_install.info"))
    files = [*toolkit, home / "version.info", home / "version.cfg"]
    for file in (*files, *sorted(home.glob("*/version.info"))):
        try:
            text = file.read_text(errors="replace")
        except OSError:
            continue
        found = re.search(r"(?im)^\s*\w*version\w*\s*=.*?(\d+\.\d+[\w.]*)", text)
        if found:
            return found[1]
    return None


def is_too_old(version: str | None) -> bool:
    """Whether the kernels want a newer CANN; of an unknown one it is not said."""
    return version is not None and int(version.split(".")[0]) < OLDEST_CANN

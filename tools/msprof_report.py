"""Where the time of a profiled run went: ``ascend-kv profile`` as a script.

    python tools/msprof_report.py PROF_000001_20260101
    python tools/msprof_report.py after --compare before --device 910B3

It takes the arguments of ``ascend-kv profile``; ``--help`` explains them, recipes/profile.md what
they give.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ascend_kv import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, print; returns the exit code."""
    return cli.main(["profile", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())

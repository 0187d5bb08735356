"""``python -m ascend_kv``: the command line, where the script ``ascend-kv`` is not on the path."""

from __future__ import annotations

import sys

from ascend_kv.cli import main

if __name__ == "__main__":
    sys.exit(main())

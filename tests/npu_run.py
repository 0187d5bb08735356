"""Runs the checks of the NPU's host functions with a library of ``npu_host.build_on_twin``.

    python tests/npu_run.py LIBRARY

In a process of its own: a registration is for good, and the twin has to know all memory from the
start. The first failure ends it with its traceback.
"""

from __future__ import annotations

import sys

import torch

from ascend_kv import ops  # noqa: F401  the schemas

torch.ops.load_library(sys.argv[1])

import npu_checks_compress  # noqa: E402
import npu_checks_dense  # noqa: E402
import npu_checks_graph  # noqa: E402
import npu_checks_paged  # noqa: E402

from ascend_kv.ops import platform  # noqa: E402

if __name__ == "__main__":
    torch.manual_seed(0)
    served = platform.implementations("npu")
    assert sum(what == "native" for what in served.values()) == 6, served
    checks = npu_checks_dense, npu_checks_paged, npu_checks_compress, npu_checks_graph
    for module in checks:
        for name, check in list(vars(module).items()):
            if name.startswith("check_"):
                check()
                print(name, "passed", flush=True)

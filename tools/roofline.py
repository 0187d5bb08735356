"""What the kernels' traffic allows at best on a 910B, for the shapes of real models.

Every operator runs, whole and unchanged, on the CPU twin of the Ascend C API, which counts what it
moves and issues. From that and from the device's documented peaks this says, for each workload:

  traffic       bytes moved / bytes that have to move (1.00: not a sector too many)
  balance       the busiest core's time / the mean of all cores
  HBM .. launch microseconds that each limit allows by itself, all launches together
  predicted     launches + the slowest limit of each; bound by: what most of it is
  floor         one launch and the needed bytes at HBM's peak: no kernel can be faster

Counters are simulated and times predicted: nothing runs on an NPU. See
ascend_kv/plan/roofline.py for the model and what it leaves out.

Examples:
  python tools/roofline.py                              # Qwen2.5-7B and DeepSeek-V4 Flash
  python tools/roofline.py --model qwen --quick         # seconds
  python tools/roofline.py --device 910B3 --plot roofline.png
  python tools/roofline.py --json > roofline.json

Exit codes: 0 done, 1 something failed (no C++ compiler), 2 something given was not legal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ascend_kv.errors import RunError, UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, predict, print; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("qwen", "deepseek"), help="default: both")
    parser.add_argument("--device", default="910B1", help="910B1, 910B2 or 910B3 (910B1)")
    parser.add_argument("--quick", action="store_true", help="few batches, a prefill of 1024")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the roofline")
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except (RunError, UsageError) as error:
        print(f"roofline: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"roofline: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace) -> None:
    # Imported here: torch takes seconds to load, and --help needs none of it.
    from ascend_kv.devices import get_device
    from ascend_kv.evaluate import rooflines
    from ascend_kv.evaluate.console import Log, print_table, table_console
    from ascend_kv.evaluate.kernel_workloads import MODELS
    from ascend_kv.evaluate.twin import OPERATORS, build_kernels
    from ascend_kv.plan.roofline import rates_of

    device = get_device(options.device)
    rates_of(device)  # refuse a device without figures before anything is compiled
    sizes = {"batches": (1, 16), "tokens": 1024} if options.quick else {}
    names = [options.model] if options.model else list(MODELS)
    workloads = [workload for name in names for workload in MODELS[name](**sizes)]
    log = Log(table_console(stderr=True))
    with log.bar("compiling for the CPU twin", len(OPERATORS), "kernels") as advance:
        build_kernels(advance)
    with log.bar("on the CPU twin", len(workloads), "workloads") as advance:
        rows = rooflines.simulate(workloads, device, advance)
    if options.json:
        print(json.dumps(rooflines.as_json(rows, device), indent=1))
    else:
        for table in rooflines.tables(rows, device):
            print_table(table, table_console())
    if options.plot:
        rooflines.draw(rows, device, options.plot)
        log.say(f"Plot: {options.plot}")


if __name__ == "__main__":
    sys.exit(main())

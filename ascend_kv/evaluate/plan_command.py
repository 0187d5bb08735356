"""``ascend-kv plan``: plans, and prints what was asked for; loads no torch unless it calibrates."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ascend_kv.evaluate import (
    plan_explained,
    plan_published,
    plan_simulated,
    plan_sweep,
    plan_tables,
)
from ascend_kv.evaluate.console import print_table, table_console
from ascend_kv.evaluate.plan_arguments import whole_numbers
from ascend_kv.evaluate.planning import make_plan


def run_plan(options: argparse.Namespace) -> None:
    """The command; tables on standard output, or JSON.

    Raises:
        UsageError: names the flag of a value that is not legal, or what does not fit.
        RunError: plots cannot be written.
    """
    plan = make_plan(options)
    tables = plan_tables.plan_tables(plan)
    content: dict[str, Any] = plan_tables.as_json(plan)
    if options.simulate is not None or options.trace is not None:
        sizes = whole_numbers(options.block_sizes, "--block-sizes", "numbers with commas")
        runs = plan_simulated.simulate_plan(plan, sizes)
        tables.append(plan_simulated.table(runs, plan))
        content["simulations"] = plan_simulated.as_json(runs)
    if options.sweep is not None:
        points = plan_sweep.sweep(plan)
        content["sweep"] = {
            "points": plan_sweep.as_json(points),
            "plots": plan_sweep.draw(points, plan, options.sweep),
        }
        tables.append(plan_sweep.table(points))
    if options.published:
        tables += plan_published.published_tables()
        content["published"] = plan_published.published_json()
    explained = plan_explained.explain(plan) if options.explain else ""
    if options.json:
        print(json.dumps(content | ({"explained": explained} if explained else {}), indent=1))
        return
    console = table_console()
    for table in tables:
        print_table(table, console)
    if explained:
        console.print(explained, markup=False, highlight=False)

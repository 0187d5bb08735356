"""DeepSeek-V4's caches on this machine: bytes, requests end to end, one long decode step.

Runs a recipe such as recipes/deepseek_v4.yaml, in which every key is explained, on a small random
model of DeepSeek-V4's kinds of layers, on the CPU. recipes/deepseek_v4.md says how to read it.

Examples:
  python tools/deepseek_v4.py recipes/deepseek_v4.yaml
  python tools/deepseek_v4.py recipes/deepseek_v4.yaml --json > deepseek.json

Exit codes: 0 done, 1 something failed, 2 something given was not legal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ascend_kv.errors import RunError, UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe and print its tables; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path, help="a YAML file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    try:
        # Imported here: torch takes seconds to load, and --help needs none of it.
        from ascend_kv.evaluate.console import Log, print_table, table_console
        from ascend_kv.evaluate.deepseek_recipe import load_deepseek_recipe, run_deepseek

        recipe = load_deepseek_recipe(options.recipe)
        result = run_deepseek(recipe, Log(table_console(stderr=True)))
        if options.json:
            print(json.dumps(result.as_json(), indent=1))
            return 0
        for table in result.tables():
            print_table(table, table_console())
    except (RunError, UsageError) as error:
        print(f"deepseek_v4: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

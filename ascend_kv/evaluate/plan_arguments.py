"""The flags of ``ascend-kv plan``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ascend_kv.errors import UsageError

SUMMARY = "say what fits, how many sequences at once, and how fast, before anything runs"

EXAMPLES = """\
What it does:
  From the model's config alone, without reading weights and without torch: the memory of one card
  part by part, blocks, sequences at once, the longest context, where preemption begins, and TTFT,
  TPOT and tokens/s with what bounds them, cache policies side by side. All figures are
  predictions; each has its source (--explain) and, where it is an estimate, its range.

  MODEL is a directory, a config.json, a .gguf file, a hub id, or a model that is built in:
  qwen2.5-0.5b to -72b, qwen3-0.6b to -235b-a22b, llama-3-8b to -3.3-70b, mistral-7b,
  mixtral-8x7b, deepseek-v3.2, deepseek-v4-flash and -pro, and others; a wrong name lists them.

Examples:
  ascend-kv plan qwen2.5-7b --device 910B1
  ascend-kv plan Qwen/Qwen2.5-72B-Instruct --device 910B1 --cards 16 --tensor-parallel 8 --explain
  ascend-kv plan qwen3-32b --device 910B4 --cards 4 --weights w8a8 --formats auto,int8
  ascend-kv plan model.gguf --memory 90MiB --max-model-len 1024 --prompt 100 --output 160
  ascend-kv plan deepseek-v4-flash --device 950DT --cards 16 --max-model-len 131072
  ascend-kv plan qwen2.5-7b --device 910B1 --simulate 4 --requests 1000 --sigma 0.5
  ascend-kv plan qwen2.5-7b --device 910B1 --sweep runs/plan              # tables and plots
  ascend-kv plan qwen2.5-7b --device 910B1 --published                    # what speed rests on
  ascend-kv plan model.gguf --memory 90MiB --max-model-len 1024 --calibrate # measures this machine

Exit codes: 0 done, 1 something failed, 2 something given was not legal or does not fit.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags, in groups."""
    parser.add_argument("model", help="directory, config.json, .gguf, hub id or built-in name")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    parser.add_argument("--explain", action="store_true", help="every formula with its numbers")
    _add_machine(parser.add_argument_group("the machine"))
    _add_cache(parser.add_argument_group("the cache"))
    _add_work(parser.add_argument_group("the work"))
    _add_more(parser.add_argument_group("more"))


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--device", default="cpu", help="cpu, 910B1 to 910B4, 950PR, 950DT (cpu)")
    group.add_argument("--cards", type=int, metavar="N", help="tensor x data parallel (1)")
    group.add_argument("--tensor-parallel", type=int, metavar="N", help="cards of one copy")
    group.add_argument("--data-parallel", type=int, metavar="N", help="copies of the model")
    group.add_argument(
        "--expert-parallel", type=int, metavar="N",
        help="cards that share one set of DeepSeek's experts (all)",
    )  # fmt: skip
    group.add_argument(
        "--weights", default="auto",
        help="auto, float32, float16, bfloat16, w8a8, w4a8, w4a16, fp8, fp8-mxfp4, mxfp8-mxfp4 "
        "(auto: the model's type; of DeepSeek what was published, w8a8 on a 910B)",
    )  # fmt: skip
    group.add_argument(
        "--memory", metavar="BYTES",
        help="a card's KV budget: 90MB, 1.5GiB; else what is left of the card",
    )  # fmt: skip
    group.add_argument(
        "--memory-utilization", type=float, default=0.92, metavar="SHARE",
        help="of what PyTorch can have, 0 to 1 (0.92)",
    )  # fmt: skip


def _add_cache(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--formats", help="cache formats, with commas (float16,int8; of DeepSeek auto,int8)"
    )
    group.add_argument(
        "--indexer-format", metavar="FORMAT", help="of DeepSeek's indexer keys: auto, int8 (auto)"
    )
    group.add_argument("--granularity", default="token_head", help="what shares an INT8 scale")
    group.add_argument("--group-size", type=int, metavar="CHANNELS", help="for granularity group")
    group.add_argument("--asymmetric", action="store_true", help="a zero point with every scale")
    group.add_argument(
        "--skip-layers", default="", metavar="LAYERS",
        help="not quantized, with commas; --skip-layers=-1,0 are the last and the first",
    )  # fmt: skip
    group.add_argument("--scale-type", default="dynamic", help="dynamic or static (dynamic)")
    group.add_argument("--block-size", type=int, metavar="TOKENS", help="default: the device's")


def _add_work(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-model-len", type=int, metavar="TOKENS",
        help="longest sequence (8192, or the model's if that is less)",
    )  # fmt: skip
    group.add_argument("--max-num-seqs", type=int, default=64, help="sequences a step (64)")
    group.add_argument(
        "--max-num-batched-tokens", type=int, default=512, metavar="TOKENS",
        help="tokens a step (512)",
    )  # fmt: skip
    group.add_argument("--prompt", type=int, metavar="TOKENS", help="mean prompt (100)")
    group.add_argument("--output", type=int, metavar="TOKENS", help="mean output (160)")
    group.add_argument(
        "--sigma", type=float,
        help="spread of the lengths: of a log-normal's logarithm; 0: all alike (0)",
    )  # fmt: skip
    group.add_argument("--requests", type=int, metavar="N", help="how many are drawn (1000)")
    group.add_argument("--seed", type=int, help="of the lengths and arrivals (0)")
    group.add_argument(
        "--trace", type=Path, metavar="FILE.jsonl",
        help="requests instead: prompt_tokens, output_tokens and arrival_seconds on each line",
    )  # fmt: skip


def _add_more(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--simulate", nargs="?", const="inf", metavar="RATE",
        help="run the scheduler with a clock: requests a second, inf, or those of --trace",
    )  # fmt: skip
    group.add_argument(
        "--block-sizes", metavar="SIZES",
        help="compared by --simulate (8,16,32,128)",
    )  # fmt: skip
    group.add_argument(
        "--sweep", type=Path, metavar="DIR",
        help="TPOT and tokens/s over batch and context, as a table and plots in DIR",
    )  # fmt: skip
    group.add_argument(
        "--published", action="store_true", help="measurements that the speed model is fitted to"
    )
    group.add_argument(
        "--calibrate", action="store_true", help="measure this machine first; loads the model"
    )
    group.add_argument(
        "--save-calibration", type=Path, metavar="FILE.json", help="what --calibrate found"
    )
    group.add_argument(
        "--calibration", type=Path, metavar="FILE.json", help="of an earlier --calibrate"
    )


DRAWN = {"prompt": 100, "output": 160, "sigma": 0.0, "requests": 1000, "seed": 0}
"""Of requests that are drawn; a trace brings its own."""
BLOCK_SIZES = "8,16,32,128"


def settle(options: argparse.Namespace) -> None:
    """Fill in what was not given, and refuse what would have no effect.

    Raises:
        UsageError: names the flag.
    """
    if options.trace is not None:
        for name in DRAWN:
            if getattr(options, name) is not None:
                legal = "without --trace, which says what the requests are"
                raise UsageError(f"--{name}", getattr(options, name), legal)
        if options.simulate not in (None, "inf"):
            legal = "without a rate: --trace says when requests arrive"
            raise UsageError("--simulate", options.simulate, legal)
    for name, default in DRAWN.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.block_sizes is None:
        options.block_sizes = BLOCK_SIZES
    elif options.simulate is None and options.trace is None:
        legal = "with --simulate or --trace, which compare block sizes"
        raise UsageError("--block-sizes", options.block_sizes, legal)


def whole_numbers(given: str, flag: str, legal: str) -> tuple[int, ...]:
    """Numbers with commas between.

    Raises:
        UsageError: something else.
    """
    try:
        return tuple(int(number) for number in given.split(",")) if given.strip() else ()
    except ValueError:
        raise UsageError(flag, given, legal) from None


_FLAGS = {
    "kv_cache_dtype": "--formats",
    "kv_cache_memory_bytes": "--memory",
    "kv_cache_dtype_skip_layers": "--skip-layers",
    "granularity": "--granularity",
    "scale_type": "--scale-type",
    "group_size": "--group-size",
    "indexer_cache_dtype": "--indexer-format",
    "block_size": "--block-size",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "prompt": "--prompt",
    "device": "--device",
}
"""What the command line calls the fields that an error may name."""


@contextmanager
def named_as_flags() -> Iterator[None]:
    """Errors name what stands on the command line, not the field that it becomes."""
    try:
        yield
    except UsageError as error:
        if error.field not in _FLAGS:
            raise
        raise UsageError(_FLAGS[error.field], error.given, error.legal, error.hint) from None

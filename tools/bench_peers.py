#!/usr/bin/env python3
"""What a token of context costs, here and in the engines that people use, side by side.

The marginal cost of context is (time a token at many tokens of context - at few) / (many - few),
for one sequence that decodes: what kernels of weights take cancels out. Every engine runs in an
environment of its own, all hold their caches at once and take short turns on the same threads;
all read the same GGUF file. One that is not installed is skipped, and said to be.

    python tools/bench_peers.py --install              # all; llama.cpp is compiled, in minutes
    python tools/bench_peers.py --install llama.cpp
    python tools/bench_peers.py
    python tools/bench_peers.py --only ascend_kv llama.cpp --plot peers.png
    python tools/bench_peers.py --context 512 2048 --turns 5 --json

On a machine that does something else too, leave a core to it (--threads): threads that wait for
one another while one is off the processor take many times as long, each engine's in its own way.

Exit codes: 0 done, 1 something failed, 2 something given was not legal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ascend_kv.errors import RunError, UsageError
from ascend_kv.evaluate.default_model import cache_directory, fetch_default_model
from ascend_kv.evaluate.machine import this_machine
from ascend_kv.evaluate.peers import Peer, Plan, compare
from ascend_kv.model_files import load_geometry

TOOLS = Path(__file__).resolve().parent
OURS = "int8"
PEERS = (
    Peer(
        "ascend_kv",
        TOOLS / "peers/run_ascend_kv.py",
        (OURS, "float16", "bfloat16"),
    ),
    Peer(
        "llama.cpp",
        TOOLS / "peers/run_llama_cpp.py",
        ("f16", "q8_0", "q4_0"),
        (("llama-cpp-python==0.3.36",),),
    ),
    Peer(
        "openvino",
        TOOLS / "peers/run_openvino.py",
        ("f16", "u8", "u4"),
        (("openvino-genai==2026.4.1.0", "numpy"),),
    ),
    Peer(
        "transformers",
        TOOLS / "peers/run_transformers.py",
        ("float32", "bfloat16", "quanto int4", "hqq int8", "hqq int4", "fp8"),
        (
            ("torch",),  # first, so that nothing that depends on it chooses the build
            ("transformers", "accelerate", "gguf"),
            ("optimum-quanto==0.2.7", "hqq==0.2.8.post1"),
        ),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, or measure and print; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        if options.install is not None:
            for peer in _named("install", options.install):
                peer.install(options.folder, TOOLS / "constraints.txt")
        else:
            _measure(options)
    except (RunError, UsageError) as error:
        print(f"bench_peers: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"bench_peers: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(peer.name for peer in PEERS)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--install", nargs="*", metavar="ENGINE", help="make their environments, and end (all)"
    )
    parser.add_argument(
        "--folder",
        type=lambda text: Path(text).absolute(),
        default=cache_directory().absolute() / "peers",
        help="where the environments are (%(default)s)",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="ENGINE[:CACHE]", default=[], help=f"of {names}; llama.cpp:f16"
    )
    parser.add_argument("--model", type=Path, metavar="FILE.gguf", help="(SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--context", type=int, nargs=2, default=[1024, 7168], metavar=("FEW", "MANY")
    )
    parser.add_argument("--turns", type=int, default=15, help="2 or more (15)")
    parser.add_argument("--steps", type=int, default=8, help="tokens a turn and context (8)")
    parser.add_argument("--threads", type=int, default=cores, help=f"of every engine ({cores})")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the costs")
    return parser


def _named(field: str, names: Sequence[str]) -> list[Peer]:
    """Those that can be installed, or the named ones among them."""
    known = {peer.name: peer for peer in PEERS if peer.installs}
    for name in names:
        if name not in known:
            raise UsageError(field, name, known)
    return [known[name] for name in names or known]


def _entries(only: Sequence[str]) -> list[tuple[Peer, str]]:
    """Engines and caches to run, in the order of the table."""
    everything = {f"{peer.name}:{kind}": (peer, kind) for peer in PEERS for kind in peer.variants}
    for name in only:
        if name not in everything and name not in (peer.name for peer in PEERS):
            raise UsageError("only", name, [*(peer.name for peer in PEERS), *everything])
    return [
        (peer, cache)
        for name, (peer, cache) in everything.items()
        if not only or name in only or peer.name in only
    ]


def _measure(options: argparse.Namespace) -> None:
    # Imported here: matplotlib takes a second to load, and --help needs none of it.
    from ascend_kv.evaluate import peer_report
    from ascend_kv.evaluate.console import Log, print_table, table_console

    entries = _entries(options.only)
    plan = _plan(options)
    log = Log(table_console(stderr=True))
    load = os.getloadavg()[0]
    outcomes = compare(entries, options.folder, plan, log.say)
    rows = peer_report.as_rows(outcomes, OURS)
    machine = this_machine("cpu", plan.threads)
    if options.json:
        report = {
            "machine": machine._asdict(),
            "load_average_before": load,
            "plan": plan._asdict() | {"model": plan.model.name},
            "remarks": peer_report.COMPARED,
            "rows": rows,
        }
        print(json.dumps(report, indent=1))
    else:
        print(f"{machine.label}; load average before the run: {load:.1f}\n")
        print_table(peer_report.table(rows, plan), table_console())
    if options.plot:
        peer_report.draw(rows, plan, machine.label, options.plot)
        log.say(f"Plot: {options.plot}")


def _plan(options: argparse.Namespace) -> Plan:
    few, many = options.context
    least = {"turns": 2, "steps": 1, "threads": 1}
    for name, number in least.items():
        if getattr(options, name) < number:
            raise UsageError(name, getattr(options, name), f"{number} or more")
    model = (options.model or fetch_default_model()).absolute()
    if model.suffix != ".gguf":
        raise UsageError("model", str(model), "a .gguf file")
    plan = Plan(model, (few, many), options.turns, options.steps, options.threads)
    longest = load_geometry(model).max_position_tokens
    if not 0 < few < many or plan.most_tokens > longest:
        most = longest - plan.most_tokens + many
        raise UsageError("context", f"{few} {many}", f"two numbers of tokens, rising, up to {most}")
    return plan


if __name__ == "__main__":
    sys.exit(main())

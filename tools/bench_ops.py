#!/usr/bin/env python3
"""Operators on a CPU, side by side in one run: native, reference, and PyTorch's dense attention.

For each operator the report names the tighter limit of the machine, bytes that must be moved or
multiplications that must be done, and the fraction of it that is reached. Implementations of one
case take turns, and with them what measures the limits (read and copy bandwidth, the float32 matrix
product), so that whatever else the machine does hits all of them; of what is fast many calls make a
turn. What is reached is a median against medians, and "best" the best call against the limit at its
best; quartiles are the spread.

    python tools/bench_ops.py
    python tools/bench_ops.py --context 1024 32768 --batch 1 --shape 28/4x128 --json
    python tools/bench_ops.py --threads 1 --seconds 0.2 --plot ops.png
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ascend_kv.cache.huge_pages import prefer_huge_pages
from ascend_kv.errors import RunError, UsageError
from ascend_kv.evaluate.machine import this_machine
from ascend_kv.evaluate.operator_plot import draw_operators
from ascend_kv.ops.registration import NAMESPACE, REFERENCE_NAMESPACE, has_kernel, operator
from ascend_kv.user_values import at_least_one
from ascend_kv.whole_files import check_place

BLOCK_SIZE = 16
BANDWIDTH_BYTES = 1 << 28
MATMUL_SIZE = 1024
WITH_OFFSET = "native + offset"
# Above it a case is left out: dense float32 copies would not fit small machines.
MOST_BYTES = 1 << 31
BYTES = {torch.int8: 1, torch.bfloat16: 2, torch.float16: 2, torch.float32: 4}

# What limits are called, and their units for numbers in billions.
LIMITS = {
    "read": ("read", "GB/s"),
    "copy": ("copy", "GB/s (read and written)"),
    "multiply": ("float32 matrix product", "GMAC/s"),
}

Call = Callable[[], Any]


class Shape(NamedTuple):
    """Query heads, KV heads, head_dim; written 28/4x128."""

    heads: int
    kv_heads: int
    dim: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}x{self.dim}"


class Case(NamedTuple):
    """Calls to compare, and what the least of them has to do."""

    name: str
    sizes: dict[str, Any]
    calls: dict[str, Call]
    work: dict[str, int]  # by limit: bytes read, bytes read and written by a copy, multiplications


class Probe(NamedTuple):
    """A call that runs into one limit of the machine."""

    call: Call
    amount: int  # as in ``Case.work``
    rates: list[float]  # amounts a second that were measured


def read_shape(text: str) -> Shape:
    """A shape such as 28/4x128.

    Raises:
        UsageError: something else, or query heads that do not share KV heads evenly.
    """
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)x([1-9]\d*)", text)
    shape = Shape(*map(int, match.groups())) if match else None
    if shape is None or shape.heads % shape.kv_heads:
        legal = "heads/kv_headsxdim, such as 28/4x128, heads a multiple of kv_heads"
        raise UsageError("--shape", text, legal)
    return shape


def take_turns(calls: dict[str, Call], seconds: float) -> dict[str, list[float]]:
    """Seconds of each call, in turns, for ``seconds`` each and at least five times."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    for call in calls.values():  # warm up
        call()
    while any(spent[name] < seconds or len(times[name]) < 5 for name in calls):
        least = min(spent.values())
        for name, call in calls.items():
            if spent[name] > 4 * least and len(times[name]) >= 5:
                continue  # the slow skip turns of the fast
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
            spent[name] += times[name][-1]
    return times


def make_probes() -> dict[str, Probe]:
    """What measures the limits of this machine, all threads together."""
    source = torch.ones(BANDWIDTH_BYTES // 4)
    target, matrix = torch.empty_like(source), torch.randn(MATMUL_SIZE, MATMUL_SIZE)
    return {
        "read": Probe(source.sum, BANDWIDTH_BYTES, []),
        "copy": Probe(lambda: target.copy_(source), 2 * BANDWIDTH_BYTES, []),
        "multiply": Probe(lambda: matrix @ matrix, MATMUL_SIZE**3, []),
    }


def paged_cache(
    shape: Shape, dtype: torch.dtype, batch: int, context: int
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Caches and tables with the blocks in a random order, and INT8 scales."""
    count = -(-context // BLOCK_SIZE)
    size = (batch * count, shape.kv_heads, BLOCK_SIZE, shape.dim)
    tables = torch.randperm(batch * count).view(batch, count).to(torch.int32)
    caches = [prefer_huge_pages(torch.empty(size, dtype=dtype)) for _ in range(2)]
    if dtype is not torch.int8:
        return [*(cache.normal_() for cache in caches), tables], {}
    for cache in caches:
        cache.random_(-127, 128)
    scales = {
        f"{side}_scale": prefer_huge_pages(torch.empty(size[:3])).uniform_(0, 0.02)
        for side in ("key", "value")
    }
    return [*caches, tables], scales


def both(name: str, *arguments: Any, **options: Any) -> dict[str, Call]:
    """The operator as it is served natively, and its reference."""
    spaces = {"native": NAMESPACE, "reference": REFERENCE_NAMESPACE}
    if not has_kernel(name, "cpu"):
        del spaces["native"]
    return {
        label: partial(operator(name, space), *arguments, **options)
        for label, space in spaces.items()
    }


def decodes(shape: Shape, batch: int, context: int) -> Iterator[Case]:
    """One query a sequence, by format of the cache, with PyTorch's dense attention beside them."""
    query = torch.randn(batch, shape.heads, shape.dim)
    numbers = 2 * batch * context * shape.kv_heads * shape.dim
    scale = shape.dim**-0.5
    for dtype in (torch.int8, torch.bfloat16, torch.float32):
        size = numbers * BYTES[dtype]
        if size > MOST_BYTES:
            continue
        caches, scales = paged_cache(shape, dtype, batch, context)
        call = (query, *caches, [1] * batch, [context] * batch, scale)
        calls = both("paged_attention", *call, **scales)
        if dtype is torch.int8:
            bias = torch.randn(batch, shape.heads, context)
            biased = both("paged_attention", *call, **scales, score_bias=bias)
            calls |= {f"{name} + bias": run for name, run in biased.items() if name == "native"}
            calls |= with_offset(shape, call, scales)
        else:
            dense = [
                torch.randn(batch, shape.kv_heads, context, shape.dim).to(dtype) for _ in range(2)
            ]
            asked = query[:, :, None].to(dtype)
            calls["SDPA, dense"] = lambda q=asked, kv=dense: scaled_dot_product_attention(
                q, *kv, enable_gqa=shape.heads != shape.kv_heads
            )
        yield Case(
            "paged_attention decode",
            {"format": _short(dtype), "shape": str(shape), "batch": batch, "context": context},
            calls,
            {
                "read": size + sum(x.nbytes for x in scales.values()),
                "multiply": 2 * batch * context * shape.heads * shape.dim,
            },
        )


def with_offset(
    shape: Shape, call: tuple[Any, ...], scales: dict[str, torch.Tensor]
) -> dict[str, Call]:
    """Native attention over keys that are stored without their offset, turned as Qwen2.5 does."""
    half = shape.dim // 2
    frequencies = 1e6 ** -(torch.arange(half, dtype=torch.float64) / half)
    lacking = {
        "key_offset": torch.randn(shape.kv_heads, shape.dim),
        "rotary_frequencies": frequencies,
    }
    served = both("paged_attention", *call, **scales, **lacking)
    return {WITH_OFFSET: served["native"]} if "native" in served else {}


def prefill(shape: Shape, tokens: int) -> Case:
    """A prompt whose queries attend to the INT8 cache, causally."""
    query = torch.randn(tokens, shape.heads, shape.dim)
    caches, scales = paged_cache(shape, torch.int8, 1, tokens)
    call = (query, *caches, [tokens], [tokens], shape.dim**-0.5)
    calls = both("paged_attention", *call, **scales) | with_offset(shape, call, scales)
    dense = [torch.randn(1, shape.kv_heads, tokens, shape.dim) for _ in range(2)]
    calls["SDPA, dense"] = lambda: scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        *dense,
        is_causal=True,
        enable_gqa=shape.heads != shape.kv_heads,
    )
    return Case(
        "paged_attention prefill",
        {"format": "int8", "shape": str(shape), "batch": 1, "context": tokens},
        calls,
        {"multiply": tokens * (tokens + 1) * shape.heads * shape.dim},
    )


def movers(shape: Shape, tokens: int) -> Iterator[Case]:
    """Operators that read everything once and write everything once."""
    (key_cache, value_cache, tables), scales = paged_cache(shape, torch.int8, 1, tokens)
    key, value = torch.randn(2, tokens, shape.kv_heads, shape.dim)
    slots = (tables.view(-1, 1) * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).view(-1)[:tokens]
    caches = (key_cache, value_cache)
    x = key.transpose(0, 1)[None].contiguous()
    codes, scale, _ = operator("kv_cache_quantize")(x, "token_head")
    gate = torch.randn(tokens, shape.dim)
    vectors = x.numel() // shape.dim
    stored = x.numel() + 4 * vectors
    cases = {
        "kv_cache_store": ((key, value, *caches, slots.long()), scales, 2 * (x.nbytes + stored)),
        "kv_cache_load": ((*caches, tables, [tokens]), scales, 2 * (x.nbytes + stored)),
        "kv_cache_quantize": ((x, "token_head"), {}, x.nbytes + stored),
        "kv_cache_dequantize": ((codes, scale), {}, x.nbytes + stored),
        "hca_compress": ((gate, gate, [tokens], 8), {}, 2 * gate.nbytes + gate.nbytes // 8),
    }
    sizes = {"format": "int8", "shape": str(shape), "batch": 1, "context": tokens}
    for name, (arguments, options, moved) in cases.items():
        # The reference comes first: before a token is stored its keys were just computed, while a
        # probe empties the caches.
        calls = dict(reversed(both(name, *arguments, **options).items()))
        yield Case(name, sizes, calls, {"copy": moved})


def measure(case: Case, probes: dict[str, Probe], seconds: float) -> list[dict[str, Any]]:
    """One row for each implementation; what the probes reach is added to their rates."""
    probing = {f"limit: {name}": probes[name].call for name in case.work}
    times_of = take_turns(case.calls | probing, seconds)
    limits, best_limits = {}, {}
    for name, amount in case.work.items():
        probe, times = probes[name], times_of.pop(f"limit: {name}")
        probe.rates.extend(probe.amount / t for t in times)
        limits[name] = amount / probe.amount * statistics.median(times)
        best_limits[name] = amount / probe.amount * min(times)
    tighter = max(limits, key=lambda name: limits[name])
    rows = []
    for name, times in times_of.items():
        low, median, high = statistics.quantiles(times, n=4)
        rows.append(
            {
                "operator": case.name,
                **case.sizes,
                "implementation": name,
                "runs": len(times),
                "best_seconds": min(times),
                "median_seconds": median,
                "quartile_seconds": [low, high],
                "limit": tighter,
                "limit_seconds": limits[tighter],
                "fraction_of_limit": limits[tighter] / median,
                "best_fraction_of_limit": best_limits[tighter] / min(times),
            }
        )
    return rows


def fit_lines(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines through the times of native INT8 decodes by tokens read, and how far off they are."""
    fits = []
    decoding = [
        row
        for row in rows
        if row["operator"].endswith("decode")
        and (row["format"], row["implementation"]) == ("int8", "native")
    ]
    for shape in dict.fromkeys(row["shape"] for row in decoding):
        points = [
            (row["batch"] * row["context"], row["median_seconds"])
            for row in decoding
            if row["shape"] == shape
        ]
        if len({tokens for tokens, _ in points}) < 3:
            continue
        # Relative errors count: the shortest context is a thousandth of the longest.
        scaled = [[1 / seconds, tokens / seconds] for tokens, seconds in points]
        (start, slope), *_ = np.linalg.lstsq(scaled, np.ones(len(points)), rcond=None)
        worst = max(abs(seconds / (start + slope * tokens) - 1) for tokens, seconds in points)
        fits.append(
            {
                "shape": shape,
                "start_seconds": float(start),
                "seconds_per_token": float(slope),
                "worst_relative_error": float(worst),
                "points": len(points),
            }
        )
    return fits


def offset_costs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What giving a key offset back adds to native attention, as a share of its time."""
    sizes = ("operator", "shape", "batch", "context")
    medians: dict[str, dict[tuple[Any, ...], float]] = {"native": {}, WITH_OFFSET: {}}
    for row in rows:
        if row["format"] == "int8" and row["implementation"] in medians:
            case = tuple(row[size] for size in sizes)
            medians[row["implementation"]][case] = row["median_seconds"]
    return [
        {**dict(zip(sizes, case, strict=True)), "added": seconds / medians["native"][case] - 1}
        for case, seconds in medians[WITH_OFFSET].items()
    ]


def show(report: dict[str, Any]) -> None:
    """The tables, for people."""
    machine = report["machine"]
    print(f"{machine['processor']}, {machine['threads']} threads; measured in this run:")
    print(
        ", ".join(
            f"{LIMITS[name][0]} {of['median'] / 1e9:.1f} (best {of['best'] / 1e9:.1f}) "
            f"{LIMITS[name][1]}"
            for name, of in report["limits"].items()
        ),
        end="\n\n",
    )
    print(
        f"{'operator':<23} {'format':<8} {'shape':<10} {'batch':>5} {'context':>7} "
        f"{'implementation':<15} {'best ms':>9} {'median ms':>10} {'quartiles':>19} "
        f"{'limit':<8} {'reached':>7} {'best':>5}"
    )
    for row in report["operators"]:
        low, high = (1e3 * x for x in row["quartile_seconds"])
        print(
            f"{row['operator']:<23} {row['format']:<8} {row['shape']:<10} {row['batch']:>5} "
            f"{row['context']:>7} {row['implementation']:<15} {1e3 * row['best_seconds']:>9.3f} "
            f"{1e3 * row['median_seconds']:>10.3f} "
            f"{low:>9.3f} {high:>9.3f} {row['limit']:<8} {row['fraction_of_limit']:>7.0%} "
            f"{row['best_fraction_of_limit']:>5.0%}"
        )
    for fit in report["fits"]:
        print(
            f"\nINT8 decode, {fit['shape']}, native: {1e6 * fit['start_seconds']:.0f} us + "
            f"{1e9 * fit['seconds_per_token']:.2f} ns for each token of context and sequence; the "
            f"worst of {fit['points']} points is {fit['worst_relative_error']:.0%} off the line"
        )
    for cost in report["offset_costs"]:
        print(
            f"{cost['operator']} INT8, {cost['shape']}, batch {cost['batch']}, "
            f"{cost['context']} tokens: the key offset adds {cost['added']:.0%}"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, draw; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = ["9/3x64", "28/4x128", "14/2x64", "8/8x128"]
    parser.add_argument("--shape", nargs="+", default=shapes, help="heads/kv_headsxdim")
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, nargs="+", default=[512], help="tokens of a prefill")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each measurement (0.5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw native operators")
    options = parser.parse_args(arguments)
    try:
        for name in ("context", "batch", "prompt"):
            for number in getattr(options, name):
                at_least_one(f"--{name}", number)
        at_least_one("--threads", options.threads)
        if not 0 < options.seconds < 3600:
            raise UsageError("--seconds", options.seconds, "above 0, below 3600")
        shapes_to_run = [read_shape(shape) for shape in options.shape]
        if options.plot:
            check_place(options.plot)
        _measure(options, shapes_to_run)
    except (RunError, UsageError) as error:
        print(f"bench_ops: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _measure(options: argparse.Namespace, shapes: Sequence[Shape]) -> None:
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    probes = make_probes()
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        for batch in options.batch:
            for context in options.context:
                for case in decodes(shape, batch, context):
                    rows += measure(case, probes, options.seconds)
        for tokens in options.prompt:
            for case in (prefill(shape, tokens), *movers(shape, tokens)):
                rows += measure(case, probes, options.seconds)
    machine = this_machine("cpu", torch.get_num_threads())
    report = {
        "machine": machine._asdict(),
        "limits": {
            name: {"median": statistics.median(probe.rates), "best": max(probe.rates)}
            for name, probe in probes.items()
            if probe.rates
        },
        "operators": rows,
        "fits": fit_lines(rows),
        "offset_costs": offset_costs(rows),
    }
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    if options.plot:
        draw_operators(report, machine.label, options.plot)


if __name__ == "__main__":
    sys.exit(main())

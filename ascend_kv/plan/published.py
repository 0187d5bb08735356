"""Published decode measurements on Ascend cards, and what the performance model makes of each.

Figures are quoted with where they were read; nothing here was measured by this package. A row's
roofline is what its weights and cache take at the card's published bandwidth.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ascend_kv.plan.fitting import Held, dense_step, fit, hold_out, predict_seconds
from ascend_kv.plan.hardware import HARDWARE
from ascend_kv.plan.models import find_planned_model
from ascend_kv.plan.performance import COLLECTIVE_SECONDS, Costs
from ascend_kv.plan.published_v4 import v4_studies
from ascend_kv.plan.study import Study
from ascend_kv.plan.weight_formats import WEIGHT_FORMATS

_RECIPES = "hicann/cann-recipes-infer"
_GB = 1e9


def _dense_read(name: str, weights: str, tensor: int = 1) -> tuple[float, int]:
    """Bytes of weights read in a step, and layers."""
    model = find_planned_model(name)
    parameters, form = model.parameters, WEIGHT_FORMATS[weights]
    linear = parameters.linear_bytes(form)
    read = (linear + parameters.output * form.other_bytes) / tensor
    return read, model.geometry.num_layers


ARTICLE_ROWS = (
    ("FP16, batch 8, 12 GB", 8, 72.0, 12 * _GB),
    ("INT8, batch 16, 6 GB", 16, 112.0, 6 * _GB),
    ("INT8 + paged, batch 32, 6 GB", 32, 147.0, 6 * _GB),
)
"""Name, batch, tokens a second, KV bytes."""
ARTICLE_SWAP_ROW = ("INT8 + paged, batch 48, 9 GB, swaps", 48, 138.0, 9 * _GB)


@cache
def article() -> Study:
    """Qwen2.5-7B on one 910B of 64 GB, rows that did not swap."""
    read, layers = _dense_read("qwen2.5-7b", "float16")
    bandwidth = HARDWARE["910B1"].hbm_bytes_per_second or 0.0
    steps = [
        dense_step(name, batch / rate, layers, batch, (read + kv) / bandwidth, batch)
        for name, batch, rate, kv in ARTICLE_ROWS
    ]
    return Study(
        "field article, Qwen2.5-7B, 910B 64 GB",
        "a field article on KV-cache optimisation: batch, tokens/s and KV bytes as it gives them",
        "tokens/s",
        tuple(steps),
        ("layer_seconds", "token_seconds"),
        "The KV bytes a row reads are taken as published, all of them in every step. Format and "
        "batch change together from the first row to the second: the fit lays it all to the batch.",
    )


@cache
def vllm_serving() -> Study:
    """Qwen2.5-7B served by vllm-ascend v0.7.3 on an Atlas A2."""
    read, layers = _dense_read("qwen2.5-7b", "bfloat16")
    hardware = HARDWARE["910B1"]
    bandwidth = hardware.hbm_bytes_per_second or 0.0
    rows = (("1 request/s", 207.097, 35.2788), ("4", 629.863, 47.0655),
            ("16", 1002.13, 73.3124), ("all at once", 1147.22, 64.4224))  # fmt: skip
    steps = []
    for name, rate, tpot in rows:
        seconds = tpot / 1e3
        batch = rate * seconds
        kv = batch * 330 * 57_344
        roofline = (read + kv) / bandwidth
        steps.append(dense_step(f"ShareGPT, {name}", seconds, layers, batch, roofline))
    return Study(
        "vllm-ascend v0.7.3, Qwen2.5-7B, Atlas A2",
        "vllm-ascend, benchmark results of release 0.7.3 (the project's issue 776 has them too)",
        "seconds a token",
        tuple(steps),
        ("layer_seconds", "token_seconds"),
        "Median TPOT while prompts come in between, so that prefill is in it. The batch is not "
        "published: it is output rate x TPOT (Little's law). 330 tokens of context are assumed.",
    )


@cache
def qwen3_graph() -> Study:
    """Qwen3-8B on Atlas A3 dies, batch 1, captured graph."""
    bandwidth = HARDWARE["A3-die"].hbm_bytes_per_second or 0.0
    steps = []
    for weights, tensor, milliseconds in (
        ("bfloat16", 1, 15.48), ("w8a8", 1, 10.46), ("bfloat16", 2, 10.35), ("w8a8", 2, 7.90),
    ):  # fmt: skip
        read, layers = _dense_read("qwen3-8b", weights, tensor)
        extra = 2 * layers * COLLECTIVE_SECONDS if tensor > 1 else 0.0
        name = f"{weights}, {tensor} die{'s' * (tensor > 1)}"
        steps.append(
            dense_step(name, milliseconds / 1e3, layers, 1, read / bandwidth, extra_seconds=extra)
        )
    return Study(
        "cann-recipes-infer, Qwen3-8B, Atlas A3, batch 1",
        f"{_RECIPES} models/qwen/README.md, Benchmark",
        "seconds a step",
        tuple(steps),
        ("layer_seconds", "roofline_factor"),
        "ge_graph mode; batch 1, so that the cost of a token is not told apart from that of a "
        "step. The cost of a collective comes from these rows too: two-die rows are not blind.",
    )


def studies() -> tuple[Study, ...]:
    """All published rows."""
    return (article(), vllm_serving(), qwen3_graph(), *v4_studies())


def third_from_first_two() -> Held:
    """The article's third row, predicted from its first two alone."""
    first, second, third = article().steps
    return hold_out(third, (first, second), article().free)


class SwapRow(NamedTuple):
    """The article's row that swapped, against the model fitted to the three that did not.

    Attributes:
        published: tokens a second.
        without_swap: predicted if all 48 sequences had stayed in memory.
        within_6_gb: predicted if the cache had 6 GB, what row 3 shows, so that 32 sequences ran.
        constant: the mean of the other rows.
        moved_bytes: what a step would have to move over the host link to explain the difference.
    """

    published: float
    without_swap: float
    within_6_gb: float
    constant: float
    moved_bytes: float


def swap_row() -> SwapRow:
    """The row cannot be predicted from the table: the budget behind it is not given."""
    study, (_, batch, rate, kv) = article(), ARTICLE_SWAP_ROW
    values = fit(study.steps, study.free)
    hardware = HARDWARE["910B1"]
    read, layers = _dense_read("qwen2.5-7b", "float16")
    roofline = (read + kv) / (hardware.hbm_bytes_per_second or 0.0)
    whole = dense_step("", batch / rate, layers, batch, roofline)
    seconds = predict_seconds(whole, values)
    capped = study.steps[2]
    return SwapRow(
        published=rate,
        without_swap=batch / seconds,
        within_6_gb=capped.tokens_per_rate / predict_seconds(capped, values),
        constant=sum(step.published() for step in study.steps) / len(study.steps),
        moved_bytes=(whole.seconds - seconds) * hardware.host_bytes_per_second,
    )


def stacks() -> dict[str, tuple[Costs, str]]:
    """Costs for predictions, "low", "best" and "high" in seconds, each with where it is from.

    The published stacks span this range: they are years and an order of magnitude apart, and a
    deployment may lie outside. The middle is the only serving measurement that names an Atlas A2
    and a batch that varies. Matrix rates: 80 % is what an example of the
    Ascend C guide shows, 35 % what cann-recipes-infer's prefill of DeepSeek-R1 comes to (6,522
    tokens a second and card, 37 billion weights a token, INT8), 20 % is assumed.
    """
    return {
        "low": (qwen3_graph().costs(0.8), qwen3_graph().name),
        "best": (vllm_serving().costs(0.35), vllm_serving().name),
        "high": (article().costs(0.2), article().name),
    }

"""``ascend-kv plan --sweep``: predicted TPOT and throughput over batch and context, with plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ascend_kv.errors import RunError
from ascend_kv.evaluate.planning import Plan
from ascend_kv.plan.deployment import Policy
from ascend_kv.plan.performance import Load
from ascend_kv.plan.sparse_deployment import SparsePolicy, layers_of, sequence_bytes
from ascend_kv.plot_style import colour, new_figure, save, style
from ascend_kv.text_table import TextTable

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Point(NamedTuple):
    """One step of ``batch`` sequences with ``context`` tokens each.

    Attributes:
        scheme: the cache's formats.
        batch, context: of the step.
        fits: whether so much fits into the cache.
        low, best, high: seconds, predicted.
        bound: what most of the best estimate is due to.
    """

    scheme: str
    batch: int
    context: int
    fits: bool
    low: float
    best: float
    high: float
    bound: str


def sweep(plan: Plan) -> list[Point]:
    """Powers of two of batch, and of context up to --max-model-len.

    Raises:
        UsageError: no speed can be predicted.
    """
    plan.need_speed("--sweep")
    longest = plan.deployment.serving.max_model_len
    contexts = [longest // 4**power for power in range(4) if longest // 4**power >= 64] or [longest]
    points = []
    for policy in plan.policies:
        for context in sorted(contexts):
            for batch in BATCHES:
                load = Load(batch, batch * context)
                times = {name: clock(load) for name, clock in policy.clocks.items()}
                points.append(
                    Point(
                        policy.name,
                        batch,
                        context,
                        _fits(plan, policy, batch, context),
                        times["low"].seconds,
                        times["best"].seconds,
                        times["high"].seconds,
                        times["best"].bound,
                    )
                )
    return points


def _fits(plan: Plan, policy: Policy | SparsePolicy, batch: int, context: int) -> bool:
    """Whether so many sequences of so many tokens have room, with slots for as many."""
    if isinstance(policy, Policy):
        return batch * -(-context // policy.block_size) <= policy.paged.num_blocks
    layers = layers_of(plan.deployment)
    one = sequence_bytes(layers, policy.formats, policy.block_size, context)
    return batch * sum(one.values()) <= policy.budget.kv_bytes


def table(points: Sequence[Point]) -> TextTable:
    """The points that fit, one row each."""
    return TextTable(
        "Decode steps over batch and context (predicted: low, best, high)",
        ("scheme", "context", "batch", "TPOT, ms", "tokens/s", "bound by"),
        [
            (
                point.scheme,
                f"{point.context:,}",
                str(point.batch),
                " | ".join(f"{1e3 * x:.4g}" for x in (point.low, point.best, point.high)),
                f"{point.batch / point.best:,.1f}",
                point.bound,
            )
            for point in points
            if point.fits
        ],
        ["Left out: what does not fit into the cache."],
    )


def as_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    """All points for scripts."""
    return [point._asdict() for point in points]


def draw(points: Sequence[Point], plan: Plan, directory: Path) -> list[str]:
    """Two plots, throughput and TPOT over batch; returns their paths.

    Raises:
        RunError: they cannot be written.
    """
    paths = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, label in (("throughput", "tokens a second"), ("tpot", "TPOT, ms")):
            title = f"{plan.deployment.model.name} on {plan.deployment.hardware.name}, predicted"
            path = directory / f"plan_{name}.png"
            with style():
                figure, axes = new_figure(title)
                _draw_lines(axes, points, name == "throughput")
                _name_axes(axes, label)
                save(figure, path)
            paths.append(str(path))
    except OSError as error:
        raise RunError(f"{directory}: {error.strerror or error}. Name another --sweep") from error
    return paths


def _name_axes(axes: Any, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("sequences at once; a line ends where the cache is full")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def _draw_lines(axes: Any, points: Sequence[Point], throughput: bool) -> None:
    schemes = list(dict.fromkeys(point.scheme for point in points))
    contexts = sorted({point.context for point in points})
    for point in points[:: len(BATCHES)]:
        line = [
            other
            for other in points
            if (other.scheme, other.context) == (point.scheme, point.context) and other.fits
        ]
        if not line:
            continue
        style = ("-", "--", ":", "-.")[schemes.index(point.scheme) % 4]
        shade = colour(1 + contexts.index(point.context))
        batches = [other.batch for other in line]

        def values(name: str, line: Sequence[Point] = line) -> list[float]:
            seconds = [getattr(other, name) for other in line]
            if throughput:
                return [other.batch / x for other, x in zip(line, seconds, strict=True)]
            return [1e3 * x for x in seconds]

        label = f"{point.scheme}, {point.context:,} tokens"
        axes.plot(batches, values("best"), style, color=shade, marker=".", label=label)
        if style == "-":
            axes.fill_between(batches, values("low"), values("high"), color=shade, alpha=0.06)

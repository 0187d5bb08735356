"""The report's tables as plain text cells, shared by the terminal and the Markdown file.

Every title says whether its figures were measured, predicted or both.
"""

from __future__ import annotations

from ascend_kv.evaluate.results import (
    AttentionRoute,
    BenchResult,
    Perplexity,
    PlantedRow,
    Predicted,
    SchemeResult,
    Sweep,
)
from ascend_kv.text_table import TextTable
from ascend_kv.user_values import format_bytes


def plan_table(names: list[str], plans: list[Predicted]) -> TextTable:
    """What the planner says before anything runs."""
    return TextTable(
        "Plan (predicted from geometry): sequences at once under the budget",
        (
            "scheme",
            "bytes a token",
            "blocks",
            "all at full length",
            "at mean final length",
            "at mean live length",
            "batch limit",
        ),
        [
            (
                name,
                f"{plan.token_bytes:,}",
                f"{plan.num_blocks:,}",
                f"{plan.sequences_full_length:.1f}",
                f"{plan.sequences_mean:.1f}",
                f"{plan.sequences_live:.1f}",
                str(plan.max_num_seqs),
            )
            for name, plan in zip(names, plans, strict=True)
        ],
    )


def scheme_table(result: BenchResult) -> TextTable:
    """The main table."""
    return TextTable(
        f"Throughput under one KV budget of {format_bytes(result.budget.bytes)} (measured)",
        (
            "scheme",
            "cache",
            "batch, mean (peak)",
            "tokens/s",
            "ratio",
            "KV allocated",
            "utilisation",
            "preempted",
            "recomputed tokens",
            "PPL against unquantized",
        ),
        [_scheme_row(scheme, result.perplexity) for scheme in result.schemes],
        [
            "Batch: sequences at once while other requests waited, averaged over time. "
            "Utilisation: share of the held token slots that held a token, averaged over time.",
            _byte_remark(result.schemes),
        ],
    )


def _scheme_row(scheme: SchemeResult, quality: Perplexity | None) -> tuple[str, ...]:
    measured = scheme.measured
    return (
        scheme.name,
        scheme.kv_cache_dtype,
        f"{measured.batch_mean_busy:.1f} ({measured.batch_peak})",
        f"{measured.tokens_per_second:.1f}",
        f"{scheme.ratio_to_first:.2f}x",
        format_bytes(measured.kv_allocated_bytes),
        f"{measured.utilisation:.1%}",
        str(measured.preemptions),
        f"{measured.recomputed_tokens:,}",
        _quality(scheme.kv_cache_dtype, quality),
    )


def _quality(kv_cache_dtype: str, quality: Perplexity | None) -> str:
    for entry in quality.formats if quality else []:
        if entry.kv_cache_dtype == kv_cache_dtype:
            return percent_interval(entry.ratio, entry.ratio_low, entry.ratio_high)
    return "not measured"


def percent_interval(ratio: float, low: float, high: float) -> str:
    """A ratio and its interval as changes in percent: ``+0.03 % [-0.01, +0.07]``."""
    change, least, most = (100 * (value - 1) for value in (ratio, low, high))
    return f"{change:+.3f} % [{least:+.3f}, {most:+.3f}]"


def _byte_remark(schemes: list[SchemeResult]) -> str:
    wrong = [
        f"{scheme.name}: {scheme.measured.kv_allocated_bytes:,} allocated, "
        f"{scheme.measured.kv_geometry_bytes:,} by geometry"
        for scheme in schemes
        if scheme.measured.kv_allocated_bytes != scheme.measured.kv_geometry_bytes
    ]
    if wrong:
        return "ALLOCATED BYTES DIFFER FROM GEOMETRY: " + "; ".join(wrong)
    return "KV bytes allocated equal those of the geometry to the byte in every scheme."


def comparison_table(result: BenchResult) -> TextTable:
    """The plan made beforehand beside what the run reached."""
    return TextTable(
        "Plan and run: sequences at once, KV bytes (predicted | measured)",
        (
            "scheme",
            "predicted at mean final length",
            "predicted at mean live length",
            "batch limit",
            "measured mean",
            "measured peak",
            "predicted KV bytes",
            "measured KV bytes",
        ),
        [
            (
                scheme.name,
                f"{scheme.predicted.sequences_mean:.1f}",
                f"{scheme.predicted.sequences_live:.1f}",
                str(scheme.predicted.max_num_seqs),
                f"{scheme.measured.batch_mean_busy:.1f}",
                str(scheme.measured.batch_peak),
                f"{scheme.predicted.kv_bytes:,}",
                f"{scheme.measured.kv_allocated_bytes:,}",
            )
            for scheme in result.schemes
        ],
    )


def speed_table(result: BenchResult) -> TextTable:
    """Predicted throughput beside measured, and what the machine's own speed did meanwhile."""
    return TextTable(
        "Plan and run: tokens/s (predicted | measured)",
        (
            "scheme",
            "predicted",
            "measured",
            "error",
            "machine's speed since calibration",
            "error at equal speed",
        ),
        [_speed_row(scheme) for scheme in result.schemes],
        [
            "Predicted from steps of the engine that were timed before the schemes ran, and its "
            "scheduler with a clock in place of the model. Error: of the prediction as it is, "
            "whatever the machine did since. Machine's speed (measured): by a fixed matrix product "
            "that knows neither model nor cache, timed between steps, over the same at "
            "calibration. At equal speed: the prediction times that."
        ],
    )


def _speed_row(scheme: SchemeResult) -> tuple[str, ...]:
    predicted, check = scheme.predicted.tokens_per_second, scheme.speed_check
    return (
        scheme.name,
        "-" if predicted is None else f"{predicted:.1f}",
        f"{scheme.measured.tokens_per_second:.1f}",
        f"{check.error:+.0%}",
        f"{check.machine_speed:.2f}x",
        f"{check.error_at_equal_speed:+.0%}",
    )


def factor_table(result: BenchResult) -> TextTable:
    """Each cause on its own."""
    return TextTable(
        "Where the speed comes from (measured, tokens/s over tokens/s)",
        ("factor", "scheme", "over", "ratio"),
        [
            (factor.name, factor.scheme, factor.baseline, f"{factor.ratio:.2f}x")
            for factor in result.factors
        ],
    )


def perplexity_table(quality: Perplexity) -> TextTable:
    """Formats against the unquantized reference."""
    return TextTable(
        f"Perplexity on {quality.windows} windows of {quality.window_tokens} tokens (measured)",
        ("cache", "perplexity", "change, 95 % interval", "keys", "seconds"),
        [
            (
                entry.kv_cache_dtype,
                f"{entry.perplexity:.4f}",
                percent_interval(entry.ratio, entry.ratio_low, entry.ratio_high)
                if number
                else "reference",
                entry.key_conditioning,
                f"{entry.wall_seconds:.1f}",
            )
            for number, entry in enumerate(quality.formats)
        ],
        [
            f"Method: {quality.method}. {quality.scored_tokens:,} tokens scored, "
            f"{quality.clusters} clusters. Keys and values were read back from the cache "
            f"(prefill_reads: {quality.prefill_reads})."
        ],
    )


def planted_table(rows: list[PlantedRow]) -> TextTable:
    """What key conditioning is for."""
    return TextTable(
        "A large key bias, with and without key conditioning (measured on a small random model)",
        ("cache", "perplexity", "change", "error of the logits", "same choice", "keys"),
        [
            (
                row.name,
                f"{row.perplexity:.3f}",
                f"{100 * (row.perplexity_ratio - 1):+.2f} %" if number else "reference",
                f"{row.logit_error:.2%}",
                f"{row.same_choices:.1%}",
                row.key_conditioning,
            )
            for number, row in enumerate(rows)
        ],
        [
            "Not the model above: a Qwen2 of four layers with random weights, in two of which the "
            "key bias is as large against the keys as in Qwen2.5. It writes its own text and every "
            "cache scores it. INT8 loses the small channels beside the bias; pair scaling and the "
            "offset give them back. Both are on where keys are quantized and the model needs them."
        ],
    )


def routes_table(routes: list[AttentionRoute]) -> TextTable:
    """What the NPU's fused attention read, and why where that is not the cache as it lies."""
    return TextTable(
        "What CANN's fused attention read on the NPU (measured: calls counted)",
        ("part of the run", "route", "calls", "reason"),
        [(x.part, x.route, f"{x.calls:,}", x.reason or "-") for x in routes],
        [
            "paged: the cache as it lies. loaded: keys and values were first copied out of the "
            "cache, in every call. reference: the fused attention served nothing of the batch. "
            "A throughput whose decodes were not paged is not that of the cache's format. "
            "Calls of the warm-up are counted."
        ],
    )


def sweep_table(sweep: Sweep) -> TextTable:
    """Decode throughput against batch."""
    return TextTable(
        f"Decode alone, {sweep.kv_cache_dtype} cache, {sweep.context_tokens} tokens of context "
        "each (measured)",
        ("batch", "tokens/s", "ms a step"),
        [
            (str(point.batch), f"{point.tokens_per_second:.1f}", f"{1e3 * point.step_seconds:.1f}")
            for point in sweep.points
        ],
    )

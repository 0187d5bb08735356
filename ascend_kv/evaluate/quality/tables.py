"""An evaluation's tables as plain text cells, for the terminal and the report."""

from __future__ import annotations

from ascend_kv.evaluate.quality.policies import UNQUANTIZED
from ascend_kv.evaluate.quality.results import (
    AnswerRow,
    Cost,
    EvalResult,
    Interval,
    PerplexityRow,
)
from ascend_kv.evaluate.statistics import most_where_none
from ascend_kv.evaluate.tables import percent_interval
from ascend_kv.text_table import TextTable

_TOO_FEW = "too few to say"
_MEANING = {
    "needle": "a number hidden in the text, asked for at its end",
    "copy": "a passage of random tokens that comes again",
    "recall": "numbers of words in a list",
}


def tables(result: EvalResult) -> list[TextTable]:
    """All tables for which there are rows, in the order a reader wants them."""
    found = [perplexity_table(result)] if result.perplexity else []
    if result.generation:
        found.append(generation_table(result))
    names = dict.fromkeys(row.task for row in result.answers)
    found += [answer_table(task, result) for task in names]
    if result.harness:
        found.append(harness_table(result))
    if result.policies:
        found.append(cost_table(result))
    return found


def perplexity_table(result: EvalResult) -> TextTable:
    """The main table: bytes against quality."""
    costs = {row.name: row.cost for row in result.policies}
    first = result.perplexity[0]
    return TextTable(
        f"Perplexity and divergence on {first.windows} windows of text, {first.tokens:,} tokens "
        "scored (measured)",
        (
            "policy",
            "bits",
            "bytes",
            "PPL",
            "change [95 %]",
            "KL, mnat [95 %]",
            "same choice [95 %]",
            "s",
        ),
        [_perplexity_row(row, costs.get(row.policy)) for row in result.perplexity],
        [
            "Bits a value and bytes a token: its keys and values in all layers, scales and zero "
            "points included. Every query read what the cache holds (prefill_reads: cache); what "
            "was read unquantized all the same is in the table of costs. Change: exp of the mean "
            "difference of the loss on the same tokens. KL: KL(unquantized || policy) of the next "
            "token, in thousandths of a nat. Same choice: the likeliest token is the same. "
            "Intervals over "
            f"{first.clusters} clusters of neighbouring tokens.",
            *_unequal(result.perplexity),
        ],
    )


def _perplexity_row(row: PerplexityRow, cost: Cost | None) -> tuple[str, ...]:
    if row.perplexity is None:
        quality = ("none", f"{row.not_finite:,} tokens not a number", "none", "none")
    elif row.policy == UNQUANTIZED:
        quality = (f"{row.perplexity:.4f}", "reference", "0", "100 %")
    else:
        quality = (
            f"{row.perplexity:.4f}",
            _change(row),
            _scaled(row.divergence, 1e3, "{:.3f}"),
            _scaled(row.agreement, 100, "{:.2f}", " %"),
        )
    sizes = ("?", "?") if cost is None else (f"{cost.bits_per_value:.2f}", _bytes(cost))
    return (row.policy, *sizes, *quality, f"{row.seconds:.1f}")


def _change(row: PerplexityRow) -> str:
    change = row.change
    return _TOO_FEW if change is None else percent_interval(change.value, change.low, change.high)


def _scaled(found: Interval | None, factor: float, form: str, unit: str = "") -> str:
    if found is None:
        return _TOO_FEW
    value, low, high = (
        form.format(factor * number) for number in (found.value, found.low, found.high)
    )
    return f"{value}{unit} [{low}, {high}]"


def _unequal(rows: list[PerplexityRow]) -> list[str]:
    """Rows are comparable only over the same windows."""
    fewer = [f"{row.policy}: {row.windows}" for row in rows if row.windows != rows[0].windows]
    return [f"UNFINISHED, not the same windows in every row: {', '.join(fewer)}."] if fewer else []


def generation_table(result: EvalResult) -> TextTable:
    """How long greedy decoding says the same."""
    first = result.generation[0]
    return TextTable(
        f"Greedy continuations of {first.tokens} tokens against the unquantized cache's (measured)",
        ("policy", "prompts", "identical", "tokens before the first difference", "share [95 %]"),
        [
            (
                row.policy,
                str(row.prompts),
                f"{row.identical:.0%}",
                f"{row.agreeing_tokens:.1f}",
                _scaled(row.interval, 100, "{:.1f}", " %"),
            )
            for row in result.generation
        ],
        ["A first difference may be a near tie; what follows it may be as good."],
    )


def answer_table(task: str, result: EvalResult) -> TextTable:
    """One task with known answers."""
    rows = [row for row in result.answers if row.task == task]
    return TextTable(
        f"Task {task}: {_MEANING[task]} (measured)",
        (
            "policy",
            "answers",
            "exact",
            "change [95 %]",
            "differ",
            "tokens right",
            "log p a token",
            "change [95 %]",
        ),
        [_answer_row(row, number == 0) for number, row in enumerate(rows)],
        [
            "Exact: greedy decoding gives the whole answer. Differ: exact with one cache and not "
            "with the other; where none does, the figure in brackets bounds, with 95 % "
            "confidence, the share that may. Intervals and bounds over "
            f"{rows[0].clusters} clusters of answers that share a text. Log p: in nats; it "
            "shows what exact answers of a small model do not."
        ],
    )


def _answer_row(row: AnswerRow, reference: bool) -> tuple[str, ...]:
    logs = "not a number" if row.log_probability is None else f"{row.log_probability:.4f}"
    changes = ("reference", "", "reference")
    if not reference:
        bound = f" (< {most_where_none(row.clusters):.1%})" if not row.differing else ""
        changes = (
            _scaled(row.exact_change, 100, "{:+.1f}", " %"),
            f"{row.differing}{bound}",
            _scaled(row.log_probability_change, 1, "{:+.4f}"),
        )
    return (
        row.policy,
        str(row.questions),
        f"{row.exact:.1%}",
        changes[0],
        changes[1],
        f"{row.token_accuracy:.1%}",
        logs,
        changes[2],
    )


def harness_table(result: EvalResult) -> TextTable:
    """Figures of lm-evaluation-harness."""
    cut = dict.fromkeys(
        f"{row.policy}, {row.task}: {row.cut}." for row in result.harness if row.cut
    )
    return TextTable(
        "Tasks of lm-evaluation-harness (measured, through that library)",
        ("policy", "task", "metric", "value", "standard error"),
        [
            (
                row.policy,
                row.task,
                row.metric,
                f"{row.value:.4f}",
                "none" if row.error is None else f"{row.error:.4f}",
            )
            for row in result.harness
        ],
        [
            "The errors are the library's, of each figure alone: they are not paired.",
            *(f"Longer than lm_eval.max_model_len: {entry}" for entry in cut),
        ],
    )


def cost_table(result: EvalResult) -> TextTable:
    """What every policy takes, and what its bytes leave out."""
    return TextTable(
        "What the policies take (from geometry; of transformers' caches measured)",
        ("policy", "formats", "block", "bytes once", "at tokens", "read unquantized", "keys"),
        [
            (
                row.name,
                row.cost.formats,
                str(row.cost.block_size or "-"),
                f"{row.cost.static_bytes:,}",
                f"{row.cost.tokens:,}",
                row.cost.residual,
                row.cost.key_conditioning,
            )
            for row in result.policies
        ],
        [f"Left out: {entry.policy}: {entry.reason}." for entry in result.skipped],
    )


def _bytes(cost: Cost) -> str:
    return f"{cost.bytes_per_token:,.0f}"

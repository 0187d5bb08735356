"""``ascend-kv plan --published``: what the speed model rests on, row by row, and what it is not."""

from __future__ import annotations

from typing import Any

from ascend_kv.compressed_layers import DEEPSEEK_V4_FLASH, explain_compression
from ascend_kv.plan.published import studies, swap_row, third_from_first_two
from ascend_kv.plan.published_v4 import compression_claims
from ascend_kv.plan.study import FAR, Study
from ascend_kv.text_table import TextTable


def published_tables() -> list[TextTable]:
    """Every published row, predicted from the others of its study, and claims that no fit takes."""
    return [_summary_table(), *(_study_table(study) for study in studies()), _claims_table()]


def _summary_table() -> TextTable:
    third, swap = third_from_first_two(), swap_row()
    within, without = swap.within_6_gb / swap.published - 1, swap.without_swap / swap.published - 1
    constant = swap.constant / swap.published - 1
    rows: list[tuple[str, ...]] = [
        (
            "row 3 from rows 1 and 2", f"{third.published:g}", f"{third.predicted:.1f}",
            f"{third.error:+.1%}", f"{third.constant_error:+.1%}",
        ),
        (
            "row 4, if 6 GB hold 32 sequences", f"{swap.published:g}", f"{swap.within_6_gb:.1f}",
            f"{within:+.1%}", f"{constant:+.1%}",
        ),
        (
            "row 4, if nothing swapped", f"{swap.published:g}", f"{swap.without_swap:.1f}",
            f"{without:+.1%}", f"{constant:+.1%}",
        ),
    ]  # fmt: skip
    return TextTable(
        "The field article's throughput table, tokens/s (published | predicted)",
        ("row", "published", "predicted", "error", "error of the mean of the others"),
        rows,
        [
            "The budget behind row 4 is not given, and 9 GB do not fill a card of 64 GB where row "
            "1 keeps 12: that row cannot be predicted from the table. Over the host link "
            f"{swap.moved_bytes / 1e9:.2f} GB a step would explain it.",
        ],
    )  # fmt: skip


def _study_table(study: Study) -> TextTable:
    scale, unit = (1.0, "tokens/s") if study.unit == "tokens/s" else (1e3, f"ms: {study.unit}")
    rows: list[tuple[str, ...]] = [
        (
            held.name, f"{scale * held.published:.4g}", f"{scale * held.predicted:.4g}",
            f"{held.error:+.1%}", f"{held.constant_error:+.1%}", f"{held.efficiency:.0%}",
            "far" if held.efficiency < FAR else "",
        )
        for held in study.held_out()
    ]  # fmt: skip
    worse = sum(abs(held.error) > abs(held.constant_error) for held in study.held_out())
    return TextTable(
        f"{study.name} (published, {unit}; each row predicted from the others)",
        (
            "row", "published", "predicted", "error", "error of their mean",
            "roofline over measured", "from roofline",
        ),
        rows,
        [
            f"Source: {study.source}. {study.remark}",
            f"{_fitted(study)} The mean of the others is nearer in {worse} of {len(rows)} rows.",
        ],
    )  # fmt: skip


def _fitted(study: Study) -> str:
    """What came of the parameters when fitted to all rows."""
    if not study.free:
        return "Nothing is fitted to these rows."
    found = study.values()
    words = [
        f"{1e3 * found[name]:.4g} ms a {name.removesuffix('_seconds')}"
        if name.endswith("_seconds")
        else f"{name.replace('_', ' ')} {found[name]:.3g}"
        for name in study.free
    ]
    return f"Fitted to all rows: {', '.join(words)}."


def _claims_table() -> TextTable:
    rows: list[tuple[str, ...]] = [
        (
            claim.name, f"{1e3 * claim.claimed_seconds:g}", f"{1e3 * claim.roofline_seconds:.2f}",
            f"{claim.efficiency:.0%}", "far" if claim.efficiency < FAR else "", claim.remark,
        )
        for claim in compression_claims()
    ]  # fmt: skip
    return TextTable(
        "The field article's compression table, ms a token (published | roofline)",
        ("row", "claimed", "roofline", "roofline over claimed", "from roofline", "remark"),
        rows,
        [
            f"Far: more than {1 / FAR:g} times the roofline. One sequence's cache and one card's "
            "share of the weights at 4 TB/s.",
            "7.3 GB / 4 is 1.8 GB, and / 128 is 57 MB: as if every layer were of one kind.",
            *explain_compression(DEEPSEEK_V4_FLASH, 131072).splitlines(),
        ],
    )


def published_json() -> dict[str, Any]:
    """The same for scripts."""
    return {
        "article_third_row": third_from_first_two()._asdict(),
        "article_swap_row": swap_row()._asdict(),
        "studies": [
            {
                "name": study.name,
                "source": study.source,
                "unit": study.unit,
                "fitted": list(study.free),
                "remark": study.remark,
                "rows": [
                    {
                        **held._asdict(),
                        "error": held.error,
                        "constant_error": held.constant_error,
                        "far_from_roofline": held.efficiency < FAR,
                    }
                    for held in study.held_out()
                ],
            }
            for study in studies()
        ],
        "claims": [
            {**claim._asdict(), "far_from_roofline": claim.efficiency < FAR}
            for claim in compression_claims()
        ],
    }

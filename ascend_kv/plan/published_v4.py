"""Published decode measurements of DeepSeek-V4, and claims about its compression, to be fitted.

Figures are quoted with where they were read; nothing here was measured by this package.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ascend_kv.plan.fitting import Step, predict_seconds
from ascend_kv.plan.hardware import HARDWARE
from ascend_kv.plan.models import find_planned_model
from ascend_kv.plan.parallel import Parallel
from ascend_kv.plan.published_rows import ACCEPTED, STACKS, Row, Stack
from ascend_kv.plan.sparse import SparseCosts, SparseModel, matrix_rate, sparse_model
from ascend_kv.plan.study import Study
from ascend_kv.plan.weight_formats import WEIGHT_FORMATS, WeightFormat

_GB = 1e9
_FREE = (
    "memory_factor", "cube_factor", "draft_seconds", "key_seconds", "hif8 memory", "fp8 cube",
)  # fmt: skip
"""Fitted to all rows of 950DT at once: two factors for the roofline, what a draft costs beside its
bytes, what long rows of indexer keys cost, and where a format differs from MXFP8: HiF8 reads its
weights faster, FP8 by blocks of 128 multiplies more slowly."""


def _model(stack: Stack, cards: int) -> SparseModel:
    """One die's share: attention data parallel, experts shared by all, tokens spread by force."""
    parts = cards * stack.dies
    model = find_planned_model(stack.model)
    if stack.mark == "hif8":  # its compressors and routers are in 8 bit too
        model = model._replace(parameters=replace(model.parameters, half=0))
    entry = (stack.entry_bytes, stack.key_bytes)
    return sparse_model(model, stack.weights, Parallel(1, parts, parts), *entry, even=True)


def _step(stack: Stack, row: Row) -> Step:
    """A row's step: each sequence brings a token and its drafts, which a draft layer made."""
    model, hardware = _model(stack, row.cards), HARDWARE[stack.card]
    parameters, weights = model.parameters, stack.weights
    sequences = row.batch / (row.cards * stack.dies)
    tokens = sequences * (1 + row.drafts)
    output = parameters.output * weights.other_bytes
    moved = model.weight_bytes_read(tokens)
    # a draft layer is one more layer, and makes logits
    layer = parameters.linear_bytes(weights)
    layer += parameters.experts * weights.expert_bytes / model.parallel.expert
    moved += row.drafts * (layer / len(model.layers.kinds) + output)
    moved += model.cache_bytes_read(sequences, tokens, row.context)
    inner = parameters.active - parameters.output
    operations = 2 * (inner * tokens + parameters.output * sequences * (1 + 2 * row.drafts))
    operations += 2 * model.head_width * model.heads * tokens * model.attended(row.context)
    assert hardware.hbm_bytes_per_second is not None
    memory = moved / hardware.hbm_bytes_per_second
    cube = operations / matrix_rate(hardware, weights)
    features = {
        "memory_factor": memory * (stack.mark != "hif8"),
        "cube_factor": cube,
        "draft_seconds": float(row.drafts),
        "key_seconds": model.layers.count("csa") * model.keys(row.context),
        "hif8 memory": memory * (stack.mark == "hif8"),
        "fp8 cube": cube * (stack.mark == "fp8"),
    }
    name = f"batch {row.batch}, {row.context:,} tokens, {row.drafts} draft{'s' * (row.drafts > 1)}"
    if row.cards != stack.rows[0].cards:
        name += f", {row.cards} cards"
    seconds = row.tpot_milliseconds / 1e3 * (1 + ACCEPTED[row.drafts])
    return Step(name, seconds, features, max(memory, cube))


_DATA_TYPES = {
    "mx": "Experts 4.25 bits a weight, the rest 8.25, compressors and output 16",
    "hif8": "Experts 4.25 bits a weight, the rest 8, output 16",
    "fp8": "Experts 4.25 bits a weight, the rest 8, compressors and output 16",
    "a3": "W8A8; query and key projections, the first of the output, compressors and logits 16 bit",
    "v3.2": "W8A8; query's, keys' and values' first projections and logits 16 bit",
}


@cache
def v4_studies() -> tuple[Study, ...]:
    """DeepSeek-V4 by model, card and weight format; those of 950DT are fitted together."""
    steps = {stack.label: tuple(_step(stack, row) for row in stack.rows) for stack in STACKS}
    together = [stack for stack in STACKS if stack.card == "950DT"]
    found = []
    for stack in together:
        more = (step for other in together if other is not stack for step in steps[other.label])
        found.append(_study(stack, steps[stack.label], _FREE, tuple(more)))
    values = found[0].values()
    for stack in STACKS[len(together) :]:
        scaled = tuple(
            step._replace(features={"stack": predict_seconds(step, values)})
            for step in steps[stack.label]
        )
        # V3.2 is predicted blind, by V4 on other cards
        found.append(_study(stack, scaled, () if stack.mark == "v3.2" else ("stack",), ()))
    return tuple(found)


def _study(
    stack: Stack, steps: tuple[Step, ...], free: tuple[str, ...], more: tuple[Step, ...]
) -> Study:
    if more:
        how = f"Fitted together with the {len(more)} rows of the other tables of 950DT; bandwidth "
        how += "as announced, 4 TB/s."
    elif free:
        how = "One factor over what the 950DT's fit says of such a step. A card has two dies."
    else:
        how = "Nothing is fitted: this is what the fit to V4 on 950DT says of such a step. A card "
        how += "has two dies."
    return Study(
        f"cann-recipes-infer, {stack.label}",
        stack.source,
        "seconds a step",
        steps,
        free,
        "Step = published TPOT x (1 + accepted drafts: 1.44 of 3, 0.7 of 1); its tokens count the "
        f"drafts. {_DATA_TYPES[stack.mark]}; every card reads all that is not an expert and its "
        "share of those, which tokens reach evenly, as the rows were measured with forced "
        f"balance. {how}",
        more,
    )


def sparse_stacks(weights: WeightFormat) -> dict[str, tuple[SparseCosts, str]]:
    """Costs for predictions, "low", "best" and "high" in seconds, each with where it is from.

    Args:
        weights: FP8 by blocks multiplies more slowly, as its rows say.
    """
    studies = v4_studies()
    values = studies[0].values()
    cube = values["cube_factor"] + (values["fp8 cube"] if weights.blocks else 0)
    best = SparseCosts(values["memory_factor"], cube, values["key_seconds"])
    slow = next(study for study in studies if study.free == ("stack",))
    return {
        "low": (best._replace(memory_factor=values["hif8 memory"]), "V4 in HiF8 on 950DT"),
        "best": (best, "V4 in MXFP8-MXFP4 on 950DT, which foretells V3.2 on Atlas A3"),
        "high": (best._replace(stack=slow.values()["stack"]), "V4 in W8A8 on Atlas A3"),
    }


class Claim(NamedTuple):
    """One row of a published comparison that cannot be fitted, against a roofline.

    Attributes:
        name: of the row.
        claimed_seconds: a token.
        roofline_seconds: what its bytes take at least.
        remark: what stands against it.
    """

    name: str
    claimed_seconds: float
    roofline_seconds: float
    remark: str

    @property
    def efficiency(self) -> float:
        return self.roofline_seconds / self.claimed_seconds


def compression_claims() -> list[Claim]:
    """The article's table for DeepSeek-V4 Flash at 128K on 16 cards of 950DT."""
    bandwidth = HARDWARE["950DT"].hbm_bytes_per_second or 0.0
    parameters = find_planned_model("deepseek-v4-flash").parameters
    form = WEIGHT_FORMATS["mxfp8-mxfp4"]
    weights = parameters.linear_bytes(form) + parameters.output * form.other_bytes
    weights += parameters.experts * form.expert_bytes / 16
    rows = (("full attention", 7.3 * _GB, 0.080), ("CSA, 4 x", 1.8 * _GB, 0.025),
            ("HCA, 128 x", 57e6, 0.010))  # fmt: skip
    remarks = (
        "claimed as more than 80 ms",
        "all layers of one kind; the model mixes kinds",
        "9.66 ms is what cann-recipes-infer gives for the model's own mixture of window, CSA and "
        "HCA layers, with three draft tokens a step",
    )
    return [
        Claim(name, seconds, (weights + cached) / bandwidth, remark)
        for (name, cached, seconds), remark in zip(rows, remarks, strict=True)
    ]

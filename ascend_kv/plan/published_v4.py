"""Published decode measurements of DeepSeek-V4, and claims about its compression, to be fitted.

Figures are quoted with where they were read; nothing here was measured by this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from ascend_kv.compressed_layers import layers_from_config
from ascend_kv.plan.builtin_models import DEEPSEEK_MODELS
from ascend_kv.plan.fitting import Step
from ascend_kv.plan.hardware import HARDWARE
from ascend_kv.plan.parameters import deepseek_attention
from ascend_kv.plan.study import Study

_GB = 1e9


class _V4Row(NamedTuple):
    batch: int
    drafts: int
    context: int
    tpot_milliseconds: float
    cards: int = 16


_8K, _128K, _1M = 8192, 131072, 1048576
_FLASH_MXFP8 = (
    _V4Row(16, 3, _8K, 6.55), _V4Row(256, 3, _8K, 8.78), _V4Row(1536, 1, _8K, 16.46),
    _V4Row(2880, 1, _8K, 25.54), _V4Row(256, 3, _128K, 9.66), _V4Row(768, 1, _128K, 10.50),
    _V4Row(16, 3, _1M, 8.04), _V4Row(64, 3, _1M, 9.46),
)  # fmt: skip
_FLASH_HIF8 = (
    _V4Row(16, 3, _8K, 6.27), _V4Row(256, 3, _8K, 8.41), _V4Row(1536, 1, _8K, 15.95),
    _V4Row(16, 3, _128K, 6.45), _V4Row(256, 3, _128K, 9.22), _V4Row(16, 3, _1M, 7.71),
    _V4Row(64, 3, _1M, 9.11),
)  # fmt: skip
_FLASH_FP8 = (_V4Row(256, 3, _8K, 11.06), _V4Row(1536, 1, _8K, 24.28))
_PRO_MXFP8 = (
    _V4Row(16, 3, _8K, 17.64), _V4Row(64, 3, _8K, 19.03), _V4Row(128, 3, _8K, 20.61),
    _V4Row(3072, 1, _8K, 27.79, 64), _V4Row(16, 3, _128K, 19.46), _V4Row(64, 3, _128K, 21.23),
)  # fmt: skip
_PRO_HIF8 = (
    _V4Row(16, 3, _8K, 16.33), _V4Row(64, 3, _8K, 17.23), _V4Row(128, 3, _8K, 18.68),
    _V4Row(16, 3, _128K, 16.55), _V4Row(64, 3, _128K, 18.22),
)  # fmt: skip
_FLASH_A3 = (_V4Row(7168, 1, _8K, 27.82, 64), _V4Row(8192, 1, _8K, 29.17, 64))
_ACCEPTED = {1: 0.7, 3: 1.44}
"""Draft tokens that were accepted on the average, of 1 and of 3."""

V4_GUIDE = (
    "hicann/cann-recipes-infer docs/models/deepseek_v4/deepseek_v4_inference_guide.md, Benchmark"
)


def v4_cache_read(name: str, context: int, entry_bytes: float, index_bytes: float) -> float:
    """Bytes of cache that one decoded token of DeepSeek-V4 reads, all layers.

    Window and, where there are compressed entries, those an indexer chose (with all of its own
    keys) or, where 128 tokens make an entry, all of them.
    """
    layers = layers_from_config(DEEPSEEK_MODELS[name].config)
    sparse, heavy, dim = layers.count("csa"), layers.count("hca"), layers.head_dim
    keys = context // layers.csa_ratio
    window = len(layers.kinds) * min(context, layers.window_tokens) * dim * entry_bytes
    chosen = sparse * min(layers.index_topk, keys) * dim * entry_bytes
    index = sparse * keys * layers.index_dim * index_bytes
    return window + chosen + index + heavy * (context // layers.hca_ratio) * dim * entry_bytes


def _v4_study(name: str, label: str, rows: Sequence[_V4Row]) -> Study:
    """Rows of one model in one weight format; A3 rows are INT8 on cards of two dies."""
    config = DEEPSEEK_MODELS[name].config
    a3 = "A3" in label
    dies, bits, expert_bits = (2, 8.0, 8.0) if a3 else (1, 8.25, 4.25)
    bandwidth = HARDWARE["A3-die" if a3 else "950DT"].hbm_bytes_per_second or 0.0
    attention, output, routed, share = _v4_parameters(name)
    steps = []
    for batch, drafts, context, tpot, cards in rows:
        parts = cards * dies
        sequences = batch / parts
        tokens = sequences * (1 + drafts)
        reached = 1 - (1 - share) ** (tokens * parts)
        cached = sequences * v4_cache_read(name, context, 2 if a3 else 1, 1)
        experts = reached * routed * expert_bits / 8 / parts
        moved = (attention + output) * bits / 8 + experts + cached
        row = f"batch {batch}, {context:,} tokens, {drafts} draft{'s' * (drafts > 1)}"
        steps.append(
            Step(
                row + (f", {cards} cards" if cards != rows[0].cards else ""),
                tpot / 1e3 * (1 + _ACCEPTED[drafts]),
                config["num_hidden_layers"],
                tokens,
                moved / bandwidth,
                drafts=drafts,
            )
        )
    free = ["layer_seconds", "token_seconds"]
    if len(rows) > 2 and len({step.drafts for step in steps}) > 1:
        free.append("draft_seconds")
    return Study(
        f"cann-recipes-infer, {label}",
        V4_GUIDE,
        "seconds a step",
        tuple(steps),
        tuple(free) if len(rows) > 2 else ("token_seconds",),
        "Step = published TPOT x (1 + accepted drafts: 1.44 of 3, 0.7 of 1); its tokens count the "
        "drafts. "
        + (
            "W8A8; a card has two dies."
            if a3
            else "Experts 4.25 bits a weight, the rest 8.25; every card reads all that is not an "
            "expert and its share of those. Bandwidth as announced: 4 TB/s."
        )
        + (" Two rows: one parameter is fitted." if len(rows) == 2 else ""),
    )


def _v4_parameters(name: str) -> tuple[int, int, int, float]:
    """Attention and shared, output, routed weights, and the share of experts a token takes."""
    config = DEEPSEEK_MODELS[name].config
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    expert = 3 * hidden * config["moe_intermediate_size"]
    experts = config["n_routed_experts"]
    return (
        deepseek_attention(config) + layers * (expert + hidden * experts),
        config["vocab_size"] * hidden,
        layers * experts * expert,
        config["num_experts_per_tok"] / experts,
    )


@cache
def v4_studies() -> tuple[Study, ...]:
    """DeepSeek-V4 by model, card and weight format."""
    flash, pro = "deepseek-v4-flash", "deepseek-v4-pro"
    return (
        _v4_study(flash, "DeepSeek-V4 Flash, 16 x 950DT, MXFP8-MXFP4", _FLASH_MXFP8),
        _v4_study(flash, "DeepSeek-V4 Flash, 16 x 950DT, HiF8-MXFP8-MXFP4", _FLASH_HIF8),
        _v4_study(flash, "DeepSeek-V4 Flash, 16 x 950DT, FP8-MXFP4", _FLASH_FP8),
        _v4_study(pro, "DeepSeek-V4 Pro, 16 x 950DT, MXFP8-MXFP4", _PRO_MXFP8),
        _v4_study(pro, "DeepSeek-V4 Pro, 16 x 950DT, HiF8-MXFP8-MXFP4", _PRO_HIF8),
        _v4_study(flash, "DeepSeek-V4 Flash, 64 x Atlas A3", _FLASH_A3),
    )


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
    attention, output, routed, _ = _v4_parameters("deepseek-v4-flash")
    weights = (attention + output) * 8.25 / 8 + routed * 4.25 / 8 / 16
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

"""Published decode measurements of DeepSeek-V4 and V3.2 on Ascend cards, as they were published.

Figures are quoted with where they were read; nothing here was measured by this package.
"""

from __future__ import annotations

from typing import NamedTuple

from ascend_kv.plan.weight_formats import WEIGHT_FORMATS, WeightFormat


class Row(NamedTuple):
    """A published decode measurement: sequences on all cards, their tokens, and TPOT."""

    batch: int
    drafts: int
    context: int
    tpot_milliseconds: float
    cards: int = 16


_8K, _64K, _128K, _1M = 8192, 65536, 131072, 1048576
_FLASH_MXFP8 = (
    Row(16, 3, _8K, 6.55), Row(256, 3, _8K, 8.78), Row(1536, 1, _8K, 16.46),
    Row(2880, 1, _8K, 25.54), Row(256, 3, _128K, 9.66), Row(768, 1, _128K, 10.50),
    Row(16, 3, _1M, 8.04), Row(64, 3, _1M, 9.46),
)  # fmt: skip
_FLASH_HIF8 = (
    Row(16, 3, _8K, 6.27), Row(256, 3, _8K, 8.41), Row(1536, 1, _8K, 15.95),
    Row(16, 3, _128K, 6.45), Row(256, 3, _128K, 9.22), Row(16, 3, _1M, 7.71),
    Row(64, 3, _1M, 9.11),
)  # fmt: skip
_FLASH_FP8 = (Row(256, 3, _8K, 11.06), Row(1536, 1, _8K, 24.28))
_PRO_MXFP8 = (
    Row(16, 3, _8K, 17.64), Row(64, 3, _8K, 19.03), Row(128, 3, _8K, 20.61),
    Row(3072, 1, _8K, 27.79, 64), Row(16, 3, _128K, 19.46), Row(64, 3, _128K, 21.23),
)  # fmt: skip
_PRO_HIF8 = (
    Row(16, 3, _8K, 16.33), Row(64, 3, _8K, 17.23), Row(128, 3, _8K, 18.68),
    Row(16, 3, _128K, 16.55), Row(64, 3, _128K, 18.22),
)  # fmt: skip
_FLASH_A3 = (Row(7168, 1, _8K, 27.82, 64), Row(8192, 1, _8K, 29.17, 64))
_V32_W8 = (
    Row(256, 3, _64K, 19.84, 64), Row(512, 3, _64K, 22.78, 64), Row(128, 3, _128K, 18.85, 64),
    Row(512, 3, _128K, 25.8, 64), Row(64, 3, _64K, 20.81, 32), Row(32, 3, _64K, 24.39, 16),
)  # fmt: skip
_V32_W4 = (Row(64, 3, _64K, 20.18, 32), Row(32, 3, _64K, 22.51, 16))
ACCEPTED = {1: 0.7, 3: 1.44}
"""Draft tokens that were accepted on the average, of 1 and of 3."""

_V32_GUIDE = (
    "hicann/cann-recipes-infer docs/models/deepseek_v3_2_exp/deepseek_v3.2_exp_inference_guide.md, "
    "Benchmark"
)
V4_GUIDE = (
    "hicann/cann-recipes-infer docs/models/deepseek_v4/deepseek_v4_inference_guide.md, Benchmark"
)


_HIF8 = WEIGHT_FORMATS["mxfp8-mxfp4"]._replace(name="hif8-mxfp8-mxfp4", linear_bytes=1.0)
"""HiF8 with a scale for each output channel; compressors are in 8 bit too."""


class Stack(NamedTuple):
    """What ran a table of rows.

    Attributes:
        label: of the table.
        model: short name. weights: their format. card: of ``HARDWARE``, with ``dies`` each.
        mark: names the parameters that are this format's own.
        entry_bytes: of an entry and of a token in the window. key_bytes: of an indexer key.
        source: where the rows were read.
    """

    label: str
    model: str
    weights: WeightFormat
    card: str
    mark: str
    rows: tuple[Row, ...]
    dies: int = 1
    entry_bytes: int = 512
    key_bytes: int = 128
    source: str = V4_GUIDE


_FLASH, _PRO = "deepseek-v4-flash", "deepseek-v4-pro"
STACKS = (
    Stack(
        "DeepSeek-V4 Flash, 16 x 950DT, MXFP8-MXFP4",
        _FLASH, WEIGHT_FORMATS["mxfp8-mxfp4"], "950DT", "mx", _FLASH_MXFP8,
    ),
    Stack(
        "DeepSeek-V4 Flash, 16 x 950DT, HiF8-MXFP8-MXFP4",
        _FLASH, _HIF8, "950DT", "hif8", _FLASH_HIF8,
    ),
    Stack(
        "DeepSeek-V4 Flash, 16 x 950DT, FP8-MXFP4",
        _FLASH, WEIGHT_FORMATS["fp8-mxfp4"], "950DT", "fp8", _FLASH_FP8,
    ),
    Stack(
        "DeepSeek-V4 Pro, 16 x 950DT, MXFP8-MXFP4",
        _PRO, WEIGHT_FORMATS["mxfp8-mxfp4"], "950DT", "mx", _PRO_MXFP8,
    ),
    Stack(
        "DeepSeek-V4 Pro, 16 x 950DT, HiF8-MXFP8-MXFP4",
        _PRO, _HIF8, "950DT", "hif8", _PRO_HIF8,
    ),
    Stack(
        "DeepSeek-V4 Flash, 64 x Atlas A3",
        _FLASH, WEIGHT_FORMATS["w8a8"], "A3-die", "a3", _FLASH_A3, 2, 1024,
    ),
    Stack(
        "DeepSeek-V3.2-Exp, Atlas A3, W8A8C8",
        "deepseek-v3.2", WEIGHT_FORMATS["w8a8"], "A3-die", "v3.2", _V32_W8, 2, 656, 132, _V32_GUIDE,
    ),
    Stack(
        "DeepSeek-V3.2-Exp, Atlas A3, W8A8C8, experts W4A8",
        "deepseek-v3.2", WEIGHT_FORMATS["w4a8"], "A3-die", "v3.2", _V32_W4, 2, 656, 132, _V32_GUIDE,
    ),
)  # fmt: skip

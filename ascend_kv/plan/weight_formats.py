"""How weights are stored: bytes of each kind of weight, and what the device has to multiply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ascend_kv.errors import UsageError

_PLAIN = "the type's width"
_RECIPES = "hicann/cann-recipes-infer, models/deepseek_v4/utils/convert_config.py"
_BLOCKS, _MX8, _MX4 = 1 + 1 / 128**2, 1 + 1 / 32, 0.5 + 1 / 32


class WeightFormat(NamedTuple):
    """How weights are stored.

    Attributes:
        name: as ``--weights`` takes it.
        linear_bytes: of a weight in a linear layer, scales included.
        other_bytes: of one in embedding, output and norms.
        expert_bytes: of one in a routed expert.
        eight_bits: whether activations are 8 bit too, so that matrices multiply at that rate.
        floats: whether a device needs FP8 for it.
        source: of the layout.
    """

    name: str
    linear_bytes: float
    other_bytes: float
    expert_bytes: float
    eight_bits: bool
    floats: bool
    source: str

    @property
    def blocks(self) -> bool:
        """Whether FP8 weights share scales by blocks of 128 x 128."""
        return self.floats and self.linear_bytes == _BLOCKS

    @property
    def integers(self) -> bool:
        return self.eight_bits and not self.floats


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "float32": WeightFormat("float32", 4, 4, 4, False, False, _PLAIN),
    "float16": WeightFormat("float16", 2, 2, 2, False, False, _PLAIN),
    "bfloat16": WeightFormat("bfloat16", 2, 2, 2, False, False, _PLAIN),
    "w8a8": WeightFormat(
        "w8a8", 1, 2, 1, True, False,
        "INT8 linear layers with a scale for each output channel, which is below 0.2 %; embedding "
        "and output in 16 bit, as in cann-recipes-infer models/qwen",
    ),
    "w4a8": WeightFormat(
        "w4a8", 1, 2, 0.5, True, False,
        f"INT4 routed experts, other linear layers INT8, scales by output channel: {_RECIPES}",
    ),
    "w4a16": WeightFormat(
        "w4a16", 0.5 + 2 / 128, 2, 0.5 + 2 / 128, False, False,
        "INT4 linear layers, a 16-bit scale for each group of 128 weights",
    ),
    "fp8": WeightFormat(
        "fp8", _BLOCKS, 2, _BLOCKS, True, True,
        "FP8 linear layers, a scale for each 128 x 128 weights: DeepSeek-V3's technical report",
    ),
    "fp8-mxfp4": WeightFormat(
        "fp8-mxfp4", _BLOCKS, 2, _MX4, True, True,
        f"FP4 routed experts with a scale for each 32 weights, others FP8 by blocks: {_RECIPES}",
    ),
    "mxfp8-mxfp4": WeightFormat(
        "mxfp8-mxfp4", _MX8, 2, _MX4, True, True,
        f"FP4 routed experts, other linear layers FP8, a scale for each 32 weights: {_RECIPES}",
    ),
}  # fmt: skip


def weight_format(name: str, model_dtype: str) -> WeightFormat:
    """The format of that name; "auto" is the model's own type.

    Raises:
        UsageError: an unknown name.
    """
    chosen = model_dtype if name == "auto" else name
    if chosen not in WEIGHT_FORMATS:
        raise UsageError("--weights", name, ("auto", *WEIGHT_FORMATS))
    return WEIGHT_FORMATS[chosen]

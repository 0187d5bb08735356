"""A card's memory and parallel sizes: what is counted, what is left, and what is refused."""

from __future__ import annotations

import pytest
from refusals import refused

from ascend_kv.devices import DEVICES
from ascend_kv.errors import UsageError
from ascend_kv.geometry import FormatSpec, LayerFormat, MixedFormat, format_spec
from ascend_kv.plan.deployment import Deployment
from ascend_kv.plan.hardware import HARDWARE, get_hardware
from ascend_kv.plan.memory import (
    Serving,
    activations_part,
    fixed_parts,
    loaded_prefix_part,
    make_budget,
    score_bias_part,
    weights_part,
)
from ascend_kv.plan.models import find_planned_model
from ascend_kv.plan.parallel import (
    Parallel,
    choose_parallel,
    copies_of_heads,
    divides,
    rank_geometry,
)
from ascend_kv.plan.weight_formats import WEIGHT_FORMATS

GIB = 2**30
QWEN = find_planned_model("qwen2.5-7b")


def parts(name: str, serving: Serving, parallel: Parallel = Parallel(), weights: str = "bfloat16"):  # noqa: B008
    model = find_planned_model(name)
    return [
        weights_part(model.parameters, WEIGHT_FORMATS[weights], parallel),
        *fixed_parts(HARDWARE["910B1"], parallel),
        activations_part(model.geometry, model.parameters, serving, parallel, 2),
    ]


def test_a_budget_that_vllm_ascend_measured() -> None:
    """Pull request 8289: of 61.27 GiB at 0.9, 1.14 GiB are weights, 0.22 activations, 0.13 outside
    torch, 0.04 graphs, and a cache of 53.46 GiB is advised. 1.14 GiB are Qwen3-0.6B's weights.

    Every measured part lies in the range that the plan gives for it, and so does the cache.
    """
    serving = Serving(2048, 256, 2048, utilization=0.9)
    budget = make_budget(HARDWARE["910B1"], parts("qwen3-0.6b", serving), serving, 1)
    by_name = {part.name: part for part in budget.parts}
    for name, measured in (
        ("weights", 1.14), ("activations", 0.22), ("graph and workspace", 0.13 + 0.04)
    ):  # fmt: skip
        part = by_name[name]
        assert part.low <= round(measured * GIB) <= part.high, name
    assert budget.kv_low < 53.46 * GIB < budget.kv_high


def test_parts_and_cache_are_the_whole_card() -> None:
    serving = Serving(8192)
    budget = make_budget(HARDWARE["910B3"], parts("qwen2.5-7b", serving), serving, 1)
    assert budget.kv_bytes + sum(part.bytes for part in budget.parts) == 64 * GIB
    assert budget.kv_low < budget.kv_bytes < budget.kv_high
    for part in budget.parts:
        assert part.low <= part.bytes <= part.high, part.name
        assert part.source and part.formula, part.name


def test_weights_by_hand() -> None:
    parameters = QWEN.parameters
    part = weights_part(parameters, WEIGHT_FORMATS["bfloat16"], Parallel())
    assert part.bytes == 2 * parameters.total
    halves = weights_part(parameters, WEIGHT_FORMATS["bfloat16"], Parallel(2, 3))
    assert halves.bytes == parameters.total + parameters.norms  # vectors lie on both cards
    quantized = weights_part(parameters, WEIGHT_FORMATS["w8a8"], Parallel())
    linear = parameters.attention + parameters.dense
    assert quantized.bytes == 2 * parameters.total - linear
    tied = find_planned_model("qwen2.5-0.5b").parameters
    one = weights_part(tied, WEIGHT_FORMATS["float16"], Parallel())
    assert one.bytes == 2 * (tied.embedding + tied.attention + tied.dense + tied.norms)


def test_activations_by_hand() -> None:
    serving = Serving(1024, max_num_seqs=3, max_num_batched_tokens=7)
    part = activations_part(QWEN.geometry, QWEN.parameters, serving, Parallel(4), 2)
    assert part.bytes == 7 * (3 * 3584 + 3 * 18944 // 4) * 2 + 3 * 152064 * (2 + 4 + 4)
    mixture = find_planned_model("mixtral-8x7b")  # two experts of eight, and the router
    part = activations_part(mixture.geometry, mixture.parameters, serving, Parallel(), 2)
    assert part.bytes == 7 * (3 * 4096 + 2 * 3 * 14336 + 8) * 2 + 3 * 32000 * 10


@pytest.mark.parametrize(
    ("model", "spec", "expected", "most"),
    [
        # the bias stands for what is left out of keys, however the values are kept
        ("qwen2.5-7b", MixedFormat(format_spec("float16"), format_spec("int8")), 0, 0),
        ("qwen2.5-7b", format_spec("int8"), 0, 5 * 28 * 1024 * 2),
        ("qwen2.5-7b", FormatSpec("fp8_e4m3", 8, "layer"), 5 * 28 * 1024 * 2, 5 * 28 * 1024 * 2),
        ("qwen2.5-7b", format_spec("float16"), 0, 0),
        ("qwen3-8b", FormatSpec("int4", 4, "token_head"), 0, 0),  # no key bias
    ],
)
def test_score_bias_where_it_may_be_needed(
    model: str, spec: LayerFormat, expected: int, most: int
) -> None:
    serving = Serving(1024, max_num_seqs=5)
    geometry = find_planned_model(model).geometry
    part = score_bias_part(geometry, [spec], serving, HARDWARE["910B1"], Parallel())
    assert (part.bytes, part.low, part.high) == (expected, 0, most)
    part = score_bias_part(geometry, [spec], serving, HARDWARE["cpu"], Parallel())
    assert (part.bytes, part.high) == (0, 0)
    assert ("tile by tile" in part.formula) == (most > 0)


def test_a_loaded_prefix_by_hand() -> None:
    int8, half = format_spec("int8"), format_spec("float16")
    serving = Serving(1000, max_num_seqs=5, max_num_batched_tokens=7)
    formats = [half, MixedFormat(half, int8)]
    part = loaded_prefix_part(QWEN.geometry, formats, serving, HARDWARE["910B1"], 2)
    one = 2 * 4 * 1000 * 128 * 2
    assert (part.low, part.bytes, part.high) == (0, one, 3 * one)  # 7 tokens: 3 chunks of 2
    for others, hardware in (([half], "910B1"), (formats, "cpu")):
        part = loaded_prefix_part(QWEN.geometry, others, serving, HARDWARE[hardware], 2)
        assert (part.low, part.bytes, part.high) == (0, 0, 0)


def test_only_the_quantized_side_is_dequantized() -> None:
    deployment = Deployment(
        QWEN, WEIGHT_FORMATS["bfloat16"], Parallel(2), *get_hardware("910B1"), Serving(64), [(1, 1)]
    )
    int8, half = format_spec("int8"), format_spec("float16")
    side = 2 * 128  # heads of a card x head_dim
    for formats, sides in (
        ([int8] * 28, 56), ([MixedFormat(int8, half)] * 28, 28), ([half] * 27 + [int8], 2),
        ([half] * 28, 0),
    ):  # fmt: skip
        assert deployment.served_model(formats, 128).kv_numbers == sides * side


def test_communicators_take_twice_their_buffer() -> None:
    by_name = {part.name: part.bytes for part in fixed_parts(HARDWARE["910B1"], Parallel(2, 2))}
    assert by_name["HCCL buffers"] == 2 * 2 * 200 * 2**20
    by_name = {part.name: part.bytes for part in fixed_parts(HARDWARE["910B1"], Parallel())}
    assert by_name["HCCL buffers"] == 0


@pytest.mark.parametrize(
    ("model", "serving", "least", "culprit", "remedy"),
    [
        ("qwen2.5-72b", Serving(8192), 1, "weights", "--tensor-parallel"),
        ("qwen2.5-14b", Serving(8192, 4096, 400000), 1, "activations", "--max-num-batched-tokens"),
        ("qwen2.5-14b", Serving(8192), 40 * GIB, "KV cache", "--max-model-len"),
        ("qwen2.5-14b", Serving(8192, utilization=0.001), 1, "weights", "w8a8"),
    ],
)
def test_what_does_not_fit_is_named(
    model: str, serving: Serving, least: int, culprit: str, remedy: str
) -> None:
    error = refused(
        UsageError, make_budget, HARDWARE["910B1"], parts(model, serving), serving, least
    )
    assert f"room for {culprit}:" in error.legal and remedy in error.hint
    assert "-" not in error.legal.replace(culprit, "")  # never a negative size


def test_devices_by_name() -> None:
    device, hardware = get_hardware("Ascend910B4")
    assert (device.name, hardware.memory_bytes) == ("910B4", 32 * GIB)
    assert hardware.hbm_bytes_per_second is None  # not published: no speed is predicted
    assert get_hardware("950DT")[0].name == "950DT"
    for name in DEVICES:  # one list for every command
        assert get_hardware(name)[0] is DEVICES[name] and get_hardware(name)[1].name == name
    assert refused(UsageError, get_hardware, "A3-die").field == "device"
    for name in DEVICES:
        hardware = HARDWARE[name]
        for figure in ("memory_bytes", "usable_bytes", "hbm_bytes_per_second", "cube_flops"):
            if getattr(hardware, figure) is not None:
                assert hardware.sources[figure], (name, figure)


def test_heads_are_dealt_out_and_repeated() -> None:
    geometry = QWEN.geometry  # 28 heads, 4 KV heads
    assert [size for size in range(1, 29) if divides(geometry, size)] == [1, 2, 4, 28]
    assert rank_geometry(geometry, 2).num_kv_heads == 2
    assert rank_geometry(geometry, 28).num_kv_heads == 1
    assert (copies_of_heads(geometry, 4), copies_of_heads(geometry, 28)) == (1, 7)
    llama = find_planned_model("llama-3-70b").geometry  # 64 heads, 8 KV heads
    half = [format_spec("float16")] * 80
    whole = llama.token_bytes(half)
    assert rank_geometry(llama, 8).token_bytes(half) == whole // 8
    assert rank_geometry(llama, 16).token_bytes(half) == whole // 8  # not a sixteenth
    assert copies_of_heads(llama, 16) == 2


def test_numbers_of_cards() -> None:
    geometry = QWEN.geometry
    assert choose_parallel(geometry, None, None, None) == Parallel(1, 1)
    assert choose_parallel(geometry, 4, None, None) == Parallel(4, 1)
    assert choose_parallel(geometry, 16, 4, None) == Parallel(4, 4)
    assert choose_parallel(geometry, 16, None, 16) == Parallel(1, 16)
    assert choose_parallel(geometry, None, 2, 3).cards == 6


def test_a_size_that_does_not_divide_is_refused_with_those_that_do() -> None:
    error = refused(UsageError, choose_parallel, QWEN.geometry, 16, None, None)
    assert error.field == "--cards" and error.given == 16
    assert "data parallel 16" in error.legal and "4 x 4" in error.legal
    assert "28 query heads and 4 KV heads" in error.hint and "4 and 28" in error.hint
    error = refused(UsageError, choose_parallel, QWEN.geometry, None, 7, None)
    assert error.field == "--tensor-parallel" and error.given == 7
    assert "data parallel 7" in error.legal and error.hint.endswith("4 and 28.")


@pytest.mark.parametrize("sizes", [(16, 3, None), (16, 4, 2), (0, None, None), (None, 1, 0)])
def test_products_and_sizes_that_cannot_be(sizes: tuple[int | None, ...]) -> None:
    refused(UsageError, choose_parallel, QWEN.geometry, *sizes)

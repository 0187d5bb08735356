"""The performance model: its arithmetic by hand, its fits, and what it says of published rows."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from ascend_kv.plan.fitting import (
    Step,
    dense_step,
    fit,
    hold_out,
    least_relative_squares,
    leave_one_out,
)
from ascend_kv.plan.hardware import HARDWARE
from ascend_kv.plan.models import find_planned_model
from ascend_kv.plan.performance import (
    COLLECTIVE_SECONDS,
    PEAK,
    Costs,
    Load,
    ServedModel,
    StepTime,
    latency,
    load_of,
    step_time,
)
from ascend_kv.plan.published import (
    article,
    qwen3_graph,
    stacks,
    studies,
    swap_row,
    third_from_first_two,
    vllm_serving,
)
from ascend_kv.plan.published_v4 import compression_claims, v4_studies
from ascend_kv.plan.study import FAR
from ascend_kv.plan.weight_formats import WEIGHT_FORMATS

CARD = HARDWARE["910B1"]
QWEN = find_planned_model("qwen2.5-7b").parameters


def served(weights: str = "bfloat16", tensor: int = 1, kv_numbers: int = 0) -> ServedModel:
    return ServedModel(
        28, QWEN, WEIGHT_FORMATS[weights], tensor, 28 * 128 // tensor, 3584, 57_344, kv_numbers
    )


def test_the_third_row_from_the_first_two() -> None:
    third = third_from_first_two()
    assert third.published == 147
    assert abs(third.error) < 0.15
    assert abs(third.error) < abs(third.constant_error)


@pytest.mark.parametrize("study", [article(), vllm_serving(), qwen3_graph()], ids=lambda s: s.name)
def test_beats_the_constant_predictor_on_every_row(study) -> None:
    for held in study.held_out():
        assert abs(held.error) < min(0.15, abs(held.constant_error)), held


def test_beats_it_on_most_rows_of_v4_and_says_where_not() -> None:
    held = [row for study in v4_studies()[:6] for row in study.held_out()]
    worse = [row.name for row in held if abs(row.error) > abs(row.constant_error)]
    assert len(held) == 30 and len(worse) == 4, worse
    assert max(abs(row.error) for row in held) < 0.2
    assert sum(abs(row.error) for row in held) / len(held) < 0.045
    assert sum(abs(row.constant_error) for row in held) / len(held) > 0.15


def test_another_model_on_another_card_is_foretold() -> None:
    """DeepSeek-V3.2 on Atlas A3: nothing is fitted to its rows."""
    blind = v4_studies()[6:]
    assert [study.free for study in blind] == [(), ()]
    held = [row for study in blind for row in study.held_out()]
    assert len(held) == 8 and all(abs(row.error) < 0.125 for row in held)


def test_a_row_held_out_of_a_common_fit_does_not_see_itself() -> None:
    study = v4_studies()[2]
    assert len(study.more) == 26
    step = study.steps[0]
    wrong = step._replace(seconds=9.0)
    right = hold_out(step, study.steps[1:], study.free, study.more)
    assert hold_out(wrong, study.steps[1:], study.free, study.more).predicted == right.predicted


def test_the_row_that_swaps_is_nearer_than_the_mean_under_either_reading() -> None:
    row = swap_row()
    for predicted in (row.within_6_gb, row.without_swap):
        assert abs(predicted - row.published) < abs(row.constant - row.published)
    # 61 ms a step beyond the prediction, at 31.5 GB/s
    assert row.moved_bytes == pytest.approx((48 / 138 - 48 / row.without_swap) * 31.5e9)


def test_every_published_row_is_there_with_its_source() -> None:
    rows = [step for study in studies() for step in study.steps]
    assert len(rows) == 3 + 4 + 4 + 8 + 7 + 2 + 6 + 5 + 2 + 6 + 2
    for study in studies():
        assert study.source and study.remark
        assert all(0 < step.efficiency < 1 for step in study.steps), study.name
    # throughput a card that the guide gives beside TPOT: 256 on 16 cards, 8.78 ms, 1,821.75
    step = v4_studies()[0].steps[1]
    assert 256 / 16 / (step.seconds / 2.44) == pytest.approx(1821.75, rel=1e-3)


def test_claims_far_from_any_roofline_are_called_so() -> None:
    assert all(held.efficiency < FAR for held in article().held_out())
    assert max(held.efficiency for held in qwen3_graph().held_out()) > FAR
    full, sparse, heavy = compression_claims()
    assert full.efficiency < FAR and sparse.efficiency < FAR < heavy.efficiency < 1


def test_a_step_by_hand() -> None:
    load = Load(decodes=4, decode_context=4000)
    step = step_time(served(), load, CARD, PEAK)
    weights = 2 * (QWEN.attention + QWEN.dense + QWEN.output)
    memory = (weights + 4004 * 57_344) / 1.6e12
    assert step.seconds == pytest.approx(memory)
    assert step.bound == "memory"
    assert step.parts["cube"] == pytest.approx(
        (2 * 4 * QWEN.active + 4 * 28 * 3584 * 4000) / (24 * 8192 * 1.85e9)
    )
    costs = Costs(1e-3, 2e-3, 0.5, 1.0)
    slow = step_time(served(), load, CARD, costs)
    assert slow.seconds == pytest.approx(28e-3 + 8e-3 + 2 * memory)
    assert slow.bound == "layers"


def test_prompts_are_bound_by_the_cube_and_int8_doubles_it() -> None:
    prompt = Load(0, 0, 4096, 4096 * 4097 // 2)
    half = step_time(served(), prompt, CARD, PEAK)
    int8 = step_time(served("w8a8"), prompt, CARD, PEAK)
    assert half.bound == int8.bound == "cube"
    assert half.parts["cube"] == pytest.approx(2 * int8.parts["cube"])


def test_cards_share_memory_and_pay_for_collectives() -> None:
    load = Load(8, 8000)
    one, four = (step_time(served(tensor=n), load, CARD, PEAK) for n in (1, 4))
    read = served().weight_bytes_read(8)
    assert served(tensor=4).weight_bytes_read(8) == read / 4
    carried = 2 * 8 * 3584 * 2 * 3 / 4 / 56e9
    assert four.parts["collectives"] == pytest.approx(56 * (COLLECTIVE_SECONDS + carried))
    assert one.parts["collectives"] == 0 and four.parts["memory"] < one.parts["memory"]


def test_dequantizing_counts_for_quantized_caches_only() -> None:
    load = Load(8, 8000)
    assert step_time(served(), load, CARD, PEAK).parts["vector"] == 0
    vector = step_time(served(kv_numbers=28_672), load, CARD, PEAK).parts["vector"]
    assert vector == pytest.approx(2 * 4 * 28_672 * 8008 / (48 * 256 * 1.85e9))


def test_what_is_copied_is_written_and_read_once_more() -> None:
    load = load_of([(1000, 1002), (499, 500)])
    model = served(kv_numbers=28_672)
    copying = model._replace(copied_bytes=1000, loaded_bytes=10)
    assert copying.moved_bytes(load) - model.moved_bytes(load) == 2 * (500 * 1000 + 1002 * 10)


def test_prompts_read_and_dequantize_what_lies_before_them() -> None:
    """Two chunks of 2 and 6 tokens behind 1,000 and nothing: each reads its own context, once."""
    load = load_of([(1000, 1002), (0, 6), (499, 500)])
    assert load == Load(1, 500, 8, 1001 + 1002 + 21, 1002 + 6)
    model = served(kv_numbers=28_672)
    read = (500 + 1008 + 9) * 57_344
    assert model.moved_bytes(load) == model.weight_bytes_read(9) + read
    vector = step_time(model, load, CARD, PEAK).parts["vector"]
    assert vector == pytest.approx(2 * 4 * 28_672 * (500 + 1008 + 9) / (48 * 256 * 1.85e9))


def test_latency_of_chunks_and_copies() -> None:
    seen: list[Load] = []

    def clock(load: Load) -> StepTime:
        seen.append(load)
        return StepTime(0.5, {"layers": 0.5}, "layers")

    found = latency(
        clock, batch=6, prompt_tokens=25, context_tokens=10.4, max_num_batched_tokens=10, copies=3
    )
    assert [load.prefill_tokens for load in seen] == [10, 10, 5, 0]
    assert sum(load.prefill_pairs for load in seen) == 25 * 26 // 2
    assert [load.prefill_context for load in seen] == [10, 20, 25, 0]
    assert seen[-1] == Load(6, 62)
    assert found == (1.5, 0.5, 36.0, "layers")


def make_step(layers: int, tokens: float, roofline: float, values: dict[str, float]) -> Step:
    seconds = layers * values["layer_seconds"] + tokens * values["token_seconds"]
    seconds += roofline * values["roofline_factor"]
    return dense_step("made", seconds, layers, tokens, roofline)


def test_a_fit_finds_the_costs_that_made_the_steps() -> None:
    generator = random.Random(3)
    values = {"layer_seconds": 2e-3, "token_seconds": 3e-4, "roofline_factor": 1.7}
    steps = [
        make_step(generator.randint(10, 90), generator.randint(1, 64), generator.random(), values)
        for _ in range(9)
    ]
    free = ("layer_seconds", "token_seconds", "roofline_factor")
    assert fit(steps, free) == pytest.approx(values)
    assert all(abs(held.error) < 1e-9 for held in leave_one_out(steps, free))


def test_costs_are_never_negative() -> None:
    steps = [dense_step("", 1.0, 10, 1.0, 0.1), dense_step("", 0.9, 10, 10.0, 0.1)]
    found = fit(steps, ("layer_seconds", "token_seconds"))
    assert found["token_seconds"] == 0 and found["layer_seconds"] > 0


def test_what_rows_cannot_tell_apart_is_left_out() -> None:
    rows = [({"a": 2.0, "b": 4.0}, 6.0, 0.0), ({"a": 1.0, "b": 2.0}, 3.0, 0.0)]
    assert least_relative_squares(rows, ["a", "b"]) == pytest.approx({"a": 3.0, "b": 0.0})
    assert least_relative_squares(rows, ["b", "a"]) == pytest.approx({"a": 0.0, "b": 1.5})
    nothing = [({"a": 0.0}, 1.0, 0.0)]
    assert least_relative_squares(nothing, ["a"]) == {"a": 0.0}


def test_a_held_out_row_does_not_see_itself() -> None:
    first, second, third = article().steps
    wrong = third._replace(seconds=99.0)
    assert hold_out(wrong, (first, second), article().free).predicted == pytest.approx(
        third_from_first_two().predicted
    )


def test_stacks_are_ordered() -> None:
    load = Load(32, 32 * 500)
    low, best, high = (
        step_time(served(), load, CARD, costs).seconds for costs, _ in stacks().values()
    )
    assert low < best < high


def test_the_recipe_lists_every_study_with_the_rows_that_the_mean_wins() -> None:
    recipe = Path(__file__).parent.parent / "recipes" / "plan.md"
    shown = re.findall(
        r"^\|.*\| (\d+) \|.*\|.*\| (\d+ of \d+) \|$", recipe.read_text(), re.MULTILINE
    )
    found = []
    for study in studies():
        held = study.held_out()
        worse = sum(abs(row.error) > abs(row.constant_error) for row in held)
        found.append((str(len(study.free)), f"{worse} of {len(held)}"))
    assert shown == found

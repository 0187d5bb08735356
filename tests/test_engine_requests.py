"""What a request may ask of the engine, and how it ends: stops, continuations, logprobs, errors."""

from __future__ import annotations

import math

import pytest
import torch
from slot_model import (
    VOCAB,
    SlotModel,
    expected,
    greedy,
    make_engine,
    next_token,
    run,
)

from ascend_kv.cache.tables import PagedTables
from ascend_kv.config import SchedulerConfig
from ascend_kv.engine.batch import Batch
from ascend_kv.engine.engine import Engine
from ascend_kv.engine.outputs import CompletionOutput
from ascend_kv.engine.params import SamplingParams
from ascend_kv.errors import UsageError


class Letters:
    """A tokenizer whose token t is the letter chr(97 + t % 26)."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + token % 26) for token in ids)


def lettered(**limits: int) -> tuple[Engine, SlotModel]:
    tables = PagedTables(limits.pop("num_blocks", 64), 4)
    config = SchedulerConfig(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=8)
    model = SlotModel(tables)
    return Engine(model, tables, config, tokenizer=Letters()), model


def test_stop_strings_end_across_tokens() -> None:
    prompt, letters = [3, 1, 4], Letters()
    tokens = expected(prompt, 12)
    text = letters.decode(tokens)
    stop = text[4:7]
    at = text.index(stop)
    for include, kept in ((False, text[:at]), (True, text[: at + 3])):
        engine, _ = lettered()
        params = greedy(12, stop=["?", stop], include_stop_str_in_output=include)
        engine.add_request("x", prompt, params)
        seen: list[str] = []
        while engine.has_unfinished_requests():
            seen += [output.outputs[0].text for output in engine.step()]
        assert seen[-1] == kept
        # What is shown before the end never has to be taken back.
        assert all(kept.startswith(earlier) for earlier in seen)
    completion = run_one(lettered()[0], prompt, greedy(12, stop=stop))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == tokens[: at + 3]
    completion = run_one(lettered()[0], prompt, greedy(12, stop=stop, min_tokens=10))
    assert len(completion.token_ids) >= 10


def run_one(engine: Engine, prompt: list[int], params: SamplingParams) -> CompletionOutput:
    engine.add_request("x", prompt, params)
    return run(engine)["x"].outputs[0]


def test_stop_tokens_and_end_of_sequence() -> None:
    prompt = [3, 1, 4]
    tokens = expected(prompt, 9)
    stop = tokens[4]
    cut = tokens[: tokens.index(stop) + 1]
    for eos, params, reason, result in [
        ((stop,), greedy(9), "stop", cut),
        ((stop,), greedy(9, ignore_eos=True), "length", tokens),
        ((), greedy(9, stop_token_ids=[stop]), "stop", cut),
        ((stop,), greedy(9, ignore_eos=True, stop_token_ids=[stop]), "stop", cut),
    ]:
        engine, _ = make_engine(PagedTables(64, 4), eos=eos)
        engine.add_request("x", prompt, params)
        completion = run(engine)["x"].outputs[0]
        assert (completion.token_ids, completion.finish_reason) == (result, reason)


def test_none_for_max_tokens_and_stops() -> None:
    engine, _ = lettered()
    params = SamplingParams(temperature=0, max_tokens=None, min_tokens=3, stop=None,
                            stop_token_ids=None)  # fmt: skip
    assert params.stop_strings == params.stop_tokens == ()
    completion = run_one(engine, [7] * 10, params)
    assert len(completion.token_ids) == 64 - 10 and completion.finish_reason == "length"


def test_what_are_no_params_is_refused() -> None:
    engine, _ = make_engine(PagedTables(64, 4))
    with pytest.raises(UsageError, match="sampling_params: got {'max_tokens': 3}"):
        engine.add_request("x", [1], {"max_tokens": 3})  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: got 'an empty prompt'"),
        ([1] * 64, "prompt: got '64 tokens'; legal: at most 63 tokens"),
        ([1, VOCAB], f"prompt_token_ids: got {VOCAB}; legal: 0 to {VOCAB - 1}"),
        ([-1], "prompt_token_ids: got -1"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_others_go_on(prompt: list[int], message: str) -> None:
    engine, _ = make_engine(PagedTables(64, 4), vocab_size=VOCAB)
    engine.add_request("good", [1, 2], greedy(3))
    with pytest.raises(UsageError) as caught:
        engine.add_request("bad", prompt, greedy(3))
    assert str(caught.value).startswith(message)
    outputs = run(engine)
    assert set(outputs) == {"good"}
    assert outputs["good"].outputs[0].token_ids == expected([1, 2], 3)


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    engine, _ = make_engine(PagedTables(64, 4))
    with pytest.raises(UsageError, match="stop_token_ids"):
        engine.add_request("x", [1], greedy(3, stop="a"))


def test_min_tokens_puts_the_end_off() -> None:
    prompt = [3, 1, 4]
    tokens = expected(prompt, 9)
    engine, _ = make_engine(PagedTables(64, 4), eos=(tokens[0],))
    completion = run_one(engine, prompt, greedy(9, min_tokens=1))
    assert completion.token_ids[0] != tokens[0]


def test_n_continuations_come_as_one_output() -> None:
    engine, _ = make_engine(PagedTables(64, 4))
    params = SamplingParams(n=3, temperature=1e-5, seed=1, max_tokens=5)
    engine.add_request("x", [1, 2], params)
    outputs = run(engine)
    assert set(outputs) == {"x"}
    assert [completion.index for completion in outputs["x"].outputs] == [0, 1, 2]
    for completion in outputs["x"].outputs:
        assert completion.token_ids == expected([1, 2], 5)


def test_n_continuations_draw_from_streams_of_their_own() -> None:
    engine, _ = make_engine(PagedTables(64, 4))
    engine.add_request("x", [1, 2], SamplingParams(n=2, temperature=50.0, seed=1, max_tokens=6))
    first, second = run(engine)["x"].outputs
    assert first.token_ids != second.token_ids
    # nor does another seed begin where this one's second continuation did
    engine.add_request("y", [1, 2], SamplingParams(n=1, temperature=50.0, seed=2, max_tokens=6))
    assert run(engine)["y"].outputs[0].token_ids != second.token_ids


@pytest.mark.parametrize("num_blocks", [64, 11], ids=["roomy", "preempted"])
def test_logprobs_of_prompt_and_output(num_blocks: int) -> None:
    engine, _ = lettered(num_blocks=num_blocks)
    prompt = list(range(20))
    asked = greedy(9, logprobs=1, prompt_logprobs=2)
    for name in ("x", "y"):
        engine.add_request(name, prompt, asked)
    outputs = run(engine)
    assert (engine.stats.preemptions > 0) == (num_blocks == 11)
    for output in outputs.values():
        completion = output.outputs[0]
        assert completion.token_ids == expected(prompt, 9)
        assert completion.logprobs is not None and output.prompt_logprobs is not None
        assert [list(place) for place in completion.logprobs] == [[t] for t in completion.token_ids]
        # The stand-in's logits are 1 for its token and 0 elsewhere.
        likely, unlikely = (1 - math.log(math.e + VOCAB - 1), -math.log(math.e + VOCAB - 1))
        assert all(
            entry.logprob == pytest.approx(likely) and entry.rank == 1
            for place in completion.logprobs
            for entry in place.values()
        )
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for position, place in enumerate(output.prompt_logprobs[1:], start=1):
            assert place is not None
            best = next_token(prompt[:position])
            assert place[best].logprob == pytest.approx(likely)
            assert place[best].decoded_token == chr(97 + best % 26)
            if prompt[position] != best:
                assert place[prompt[position]].logprob == pytest.approx(unlikely)


def test_without_being_asked_there_are_no_logprobs() -> None:
    engine, _ = lettered()
    engine.add_request("x", [1, 2], greedy(3))
    output = run(engine)["x"]
    assert output.prompt_logprobs is None and output.outputs[0].logprobs is None


def test_an_id_in_use_is_refused() -> None:
    engine, _ = make_engine(PagedTables(64, 4))
    engine.add_request("x", [1], greedy(3))
    with pytest.raises(UsageError, match="request_id"):
        engine.add_request("x", [1], greedy(3))


def test_any_text_is_a_legal_id() -> None:
    engine, _ = make_engine(PagedTables(64, 4))
    for name, count in (("q#0", 1), ("q", 2), ("", 1), ("0", 2), ("1", 1)):
        engine.add_request(name, [1, 2], SamplingParams(n=count, temperature=1e-5, max_tokens=5))
    outputs = run(engine)
    assert {name: len(output.outputs) for name, output in outputs.items()} == {
        "q#0": 1, "q": 2, "": 1, "0": 2, "1": 1,
    }  # fmt: skip
    for output in outputs.values():
        assert all(one.token_ids == expected([1, 2], 5) for one in output.outputs)
    with pytest.raises(UsageError, match="request_id"):
        engine.add_request(5, [1], greedy(3))  # type: ignore[arg-type]


def test_abort_frees_running_and_waiting_requests() -> None:
    tables = PagedTables(64, 4)
    engine, _ = make_engine(tables, max_num_seqs=1)
    for name in ("running", "waiting", "kept"):
        engine.add_request(name, [1, 2, 3], greedy(5))
    engine.step()
    aborted = [engine.abort_request(name) for name in ("running", "waiting", "unknown")]
    assert [output and output.outputs[0].finish_reason for output in aborted] == [
        "abort",
        "abort",
        None,
    ]
    assert aborted[0] is not None and aborted[0].outputs[0].token_ids == expected([1, 2, 3], 1)
    outputs = run(engine)
    assert set(outputs) == {"kept"}
    assert outputs["kept"].outputs[0].token_ids == expected([1, 2, 3], 5)
    assert tables.stats().used_blocks == 0


def test_a_poisoned_request_ends_with_an_error_and_the_others_go_on() -> None:
    engine, model = make_engine(PagedTables(64, 4))
    model.poisoned_tokens = frozenset([99])
    for name, prompt in (("bad", [1, 99]), ("good", [1, 2])):
        engine.add_request(name, prompt, greedy(3))
    outputs = run(engine)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert "not finite" in str(outputs["bad"].error)
    assert outputs["bad"].outputs[0].token_ids == []
    assert outputs["good"].error is None
    assert outputs["good"].outputs[0].token_ids == expected([1, 2], 3)


def test_a_step_that_fails_takes_its_own_requests_and_no_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tables = PagedTables(64, 4)
    engine, model = make_engine(tables, max_num_seqs=2)
    engine.add_request("a", [1, 2], greedy(9))
    engine.add_request("pair", [3], SamplingParams(n=2, temperature=1e-5, max_tokens=9))
    engine.add_request("later", [4, 5], greedy(9))
    engine.step()  # "a" and one of the pair; the other one waits
    with monkeypatch.context() as patch:

        def fail(batch: Batch) -> torch.Tensor:
            raise ValueError("NaN in the keys")

        patch.setattr(model, "forward", fail)
        with pytest.raises(ValueError, match="NaN in the keys"):
            engine.step()
    assert "its requests are given up: a, pair" in caplog.text
    assert tables.stats().used_blocks == 0
    engine.add_request("a", [6], greedy(3))  # the id is free again
    outputs = run(engine)
    assert set(outputs) == {"a", "later"}
    assert outputs["later"].outputs[0].token_ids == expected([4, 5], 9)
    assert outputs["a"].outputs[0].token_ids == expected([6], 3)
    assert tables.stats().used_blocks == 0


def test_a_tokenizer_that_fails_halfway_leaves_the_engine_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = lettered()
    engine.add_request("short", [1], greedy(1))  # finishes before the other one fails
    engine.add_request("n", [2], greedy(5))
    decode, calls = Letters.decode, []

    def failing(self: Letters, ids: list[int], skip_special_tokens: bool = False) -> str:
        calls.append(ids)
        if len(calls) == 4:
            raise RuntimeError("no such token")
        return decode(self, ids, skip_special_tokens)

    with monkeypatch.context() as patch:
        patch.setattr(Letters, "decode", failing)
        with pytest.raises(RuntimeError, match="no such token"):
            run(engine)
    assert not engine.has_unfinished_requests()
    assert run_one(engine, [3, 1, 4], greedy(5)).token_ids == expected([3, 1, 4], 5)

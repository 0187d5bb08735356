"""What ``LLM`` and ``LLMEngine`` offer beside ``generate``: chat, streams, steps, memory."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from bench_fixture import make_model_with_tokenizer

from ascend_kv.cache.tables import ContiguousTables, PagedTables
from ascend_kv.engine.params import SamplingParams
from ascend_kv.errors import RunError, UsageError
from ascend_kv.integrations.loading import LoadedModel, load_model
from ascend_kv.llm import LLM
from ascend_kv.llm_engine import LLMEngine
from ascend_kv.ops import platform

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_model_with_tokenizer(tmp_path_factory.mktemp("model")))


def make(cls: Any, weights: LoadedModel, **options: Any) -> Any:
    given = {"max_model_len": 96, "kv_cache_memory_bytes": 1 << 20} | options
    return cls(weights.path, weights=weights, **given)


@pytest.fixture
def llm(weights: LoadedModel) -> LLM:
    llm: LLM = make(LLM, weights)
    llm.tokenizer.chat_template = TEMPLATE
    return llm


# Conversations


def test_a_conversation_is_the_prompt_that_the_template_makes(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (answer,) = llm.chat(messages, GREEDY, use_tqdm=False)
    prompt = "system: Be brief.\nuser: Hi\nassistant: "
    assert answer.prompt == prompt
    (plain,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert answer.outputs[0].token_ids == plain.outputs[0].token_ids
    several = llm.chat([messages, messages[1:]], GREEDY, use_tqdm=False)
    assert [output.prompt for output in several] == [prompt, "user: Hi\nassistant: "]
    assert several[0].outputs[0].token_ids == answer.outputs[0].token_ids
    with pytest.raises(UsageError, match="messages"):
        llm.chat([], GREEDY)


@pytest.mark.parametrize("messages", [["Hi"], [{"role": "user"}], "Hi", [[{"content": "x"}]]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(UsageError, match='messages: .*legal: mappings with "role" and "content"'):
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert not llm.has_unfinished_requests()


def test_conversations_need_a_tokenizer_with_a_template(llm: LLM, weights: LoadedModel) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    llm.tokenizer.chat_template = "{{ raise_exception('no systems here') }}"
    with pytest.raises(UsageError, match="no systems here"):
        llm.chat(messages)
    llm.tokenizer.chat_template = None
    with pytest.raises(UsageError, match="chat template"):
        llm.chat(messages)
    with pytest.raises(UsageError, match="skip_tokenizer_init=False"):
        make(LLM, weights, skip_tokenizer_init=True).chat(messages)


def test_text_that_cannot_be_encoded_fails_alone(llm: LLM) -> None:
    good, bad = llm.generate(["Hello", "a\ud800b"], GREEDY, use_tqdm=False)
    assert len(good.outputs[0].token_ids) == 6 and good.error is None
    assert bad.outputs[0].finish_reason == "error" and bad.prompt == "a\ud800b"
    assert str(bad.error).startswith(r"prompt: got '\ud800'; legal: text that UTF-8 can encode")
    (answer,) = llm.chat([{"role": "user", "content": "\udfff"}], GREEDY, use_tqdm=False)
    assert "UTF-8" in str(answer.error)
    for call in (lambda: llm.add_request("x", "\ud800"), lambda: llm.generate_async("\ud800")):
        with pytest.raises(UsageError, match="prompt: got"):
            call()


# Streams


def test_streams_check_their_arguments_at_once(llm: LLM) -> None:
    with pytest.raises(UsageError, match="prompt_token_ids"):
        llm.stream([{"prompt_token_ids": "x"}])
    with pytest.raises(UsageError, match="prompt: got 5"):
        llm.generate_async(5)  # type: ignore[arg-type]


def test_streams_may_be_read_in_turns(llm: LLM) -> None:
    prompts = ["def f(x):", "import", "a"]
    want = [output.outputs[0].text for output in llm.generate(prompts, GREEDY, False)]
    first, second = llm.stream(prompts[:2], GREEDY), llm.stream(prompts[2:], GREEDY)
    last: dict[str, Any] = {}
    for output in (next(first), next(second), *second, *first):
        last[output.request_id] = output
    assert sorted(output.outputs[0].text for output in last.values()) == sorted(want)
    assert all(output.finished for output in last.values())


def test_requests_that_are_queued_are_not_lost_while_others_run(llm: LLM) -> None:
    wanted = {name: llm.generate(name, GREEDY, False)[0].outputs[0].text for name in "abcd"}
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    whole = llm.generate("d", long, use_tqdm=False)[0].outputs[0].text
    ids = {"a": "5-0", "b": "async-7", "c": "c"}  # what generate would call its own, too
    for prompt, name in ids.items():
        llm.add_request(name, prompt, GREEDY)
    llm.add_request("long", "d", long)
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].text == wanted["a"]

    async def read() -> list[str]:
        return [output.outputs[0].text async for output in llm.generate_async("b", GREEDY)]

    assert asyncio.run(read())[-1] == wanted["b"]
    assert len(list(llm.stream("c", GREEDY))) == 6
    with pytest.raises(UsageError, match="request_id"):
        llm.add_request("c", "another")  # its output has not been seen yet
    aborted = llm.abort_request("5-0")  # finished meanwhile
    assert aborted is not None and aborted.outputs[0].text == wanted["a"]
    assert llm.abort_request("5-0") is None
    last = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            last[output.request_id] = output
    texts = {name: output.outputs[0].text for name, output in last.items()}
    assert texts == {"async-7": wanted["b"], "c": wanted["c"], "long": whole}
    assert all(output.finished for output in last.values())


def test_a_stream_lost_in_a_step_of_another_call_ends_with_an_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = llm.stream(["one", "two"], GREEDY)
    next(stream)

    def failing(batch: Any) -> Any:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(llm.model, "forward", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            llm.generate("three", GREEDY, use_tqdm=False)
    with pytest.raises(RunError, match=r"prompt 0, 1: lost in .*failed: RuntimeError: no memory$"):
        list(stream)
    assert llm.generate("four", GREEDY, use_tqdm=False)[0].finished


def test_an_aborted_stream_ends_with_what_it_has(llm: LLM) -> None:
    stream = llm.stream(["one"], GREEDY)
    llm.abort_request(next(stream).request_id)
    (last,) = stream
    assert last.finished and last.outputs[0].finish_reason == "abort"


def test_a_stream_grows_to_what_generate_gives(llm: LLM) -> None:
    prompts = ["def f(x):", "import", "a"]
    whole = llm.generate(prompts, GREEDY, use_tqdm=False)
    seen: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for output in llm.stream(prompts, GREEDY):
        seen[int(output.request_id.split("-")[-1])].append(output)
    for number, outputs in seen.items():
        tokens = [output.outputs[0].token_ids for output in outputs]
        want = whole[number].outputs[0]
        assert tokens == [want.token_ids[: n + 1] for n in range(6)]
        assert [output.finished for output in outputs] == [False] * 5 + [True]
        assert outputs[-1].outputs[0].text == want.text
        assert all(want.text.startswith(output.outputs[0].text) for output in outputs)


def test_leaving_a_stream_early_frees_its_requests(llm: LLM) -> None:
    before = llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    stream = llm.stream(["abc", "defg"], GREEDY)
    next(stream)
    assert llm.has_unfinished_requests()
    stream.close()  # type: ignore[attr-defined]
    assert not llm.has_unfinished_requests()
    assert llm.tables.stats().used_blocks == 0
    assert llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == before


def test_asyncio_shares_batches_and_may_be_cancelled(llm: LLM) -> None:
    prompts = ["def f(x):", "import", "a"]
    whole = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, False)]

    async def read(prompt: str) -> list[list[int]]:
        stream = llm.generate_async(prompt, GREEDY)
        return [output.outputs[0].token_ids async for output in stream]

    async def together() -> Any:
        endless = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)

        async def left() -> None:
            async for _ in llm.generate_async("x", endless):
                pass

        cancelled = asyncio.create_task(left())
        results = await asyncio.gather(*map(read, prompts))
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        return results

    steps = len(llm.engine.stats.steps)
    for _ in range(2):  # another event loop later
        results = asyncio.run(asyncio.wait_for(together(), 60))
        assert results == [[tokens[: n + 1] for n in range(6)] for tokens in whole]
        assert not llm.has_unfinished_requests()
        assert llm.tables.stats().used_blocks == 0
    assert max(step.running for step in list(llm.engine.stats.steps)[steps:]) > 2

    async def refused() -> None:
        async for _ in llm.generate_async("x" * 200):
            pass

    with pytest.raises(UsageError, match="at most 95"):
        asyncio.run(asyncio.wait_for(refused(), 60))


# Steps


def test_an_engine_is_driven_step_by_step(weights: LoadedModel) -> None:
    engine = make(LLMEngine, weights)
    engine.add_request("a", "abc", GREEDY)
    engine.add_request("b", {"prompt_token_ids": [5, 6]}, SamplingParams(n=2, max_tokens=30))
    with pytest.raises(UsageError, match="request_id"):
        engine.add_request("a", "x")
    assert [output.request_id for output in engine.step()] == ["a", "b"]
    aborted = engine.abort_request("b")
    assert [one.finish_reason for one in aborted.outputs] == ["abort"] * 2
    assert engine.abort_request("b") is None
    tokens = []
    while engine.has_unfinished_requests():
        (output,) = engine.step()
        tokens = output.outputs[0].token_ids
    assert len(tokens) == 6 and output.finished and output.prompt == "abc"
    assert engine.step() == []
    assert engine.tables.stats().used_blocks == 0


# One mapping for the cache


def test_the_cache_in_one_mapping(weights: LoadedModel) -> None:
    config = {"enable_paged_attention": True, "block_size": 4, "kv_cache_dtype": "int8"}
    engine = make(LLMEngine, weights, kv_cache_config=config)
    assert isinstance(engine.tables, PagedTables) and engine.block_size == 4
    assert engine.formats[0].name == "int8"
    config["enable_paged_attention"] = False
    engine = make(LLMEngine, weights, kv_cache_config=config)
    assert isinstance(engine.tables, ContiguousTables)
    config["kv_allocator"] = "contiguous"  # said twice, and alike
    engine = make(LLMEngine, weights, kv_cache_config=config, kv_cache_memory_bytes="64KiB")
    assert isinstance(engine.tables, ContiguousTables)
    budget = {"kv_cache_memory_bytes": "256KiB"}
    engine = make(LLMEngine, weights, kv_cache_memory_bytes=None, kv_cache_config=budget)
    block_bytes = engine.geometry.block_bytes(engine.formats, engine.block_size)
    assert engine.cache.num_blocks == (1 << 18) // block_bytes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"blok_size": 4}, "kv_cache_config: blok_size.*block_size"),
        ({"block_size": "4"}, "kv_cache_config: block_size: got '4'"),
        ({"enable_paged_attention": 1}, "kv_cache_config.enable_paged_attention"),
        ({"allocator": "paged"}, "kv_cache_config: allocator: .*Did you mean kv_allocator"),
        (
            {"enable_paged_attention": True, "kv_allocator": "contiguous"},
            "kv_cache_config.kv_allocator: got 'contiguous'; legal: paged, as enable_paged",
        ),
        ({"block_size": 8}, "kv_cache_config.block_size: got 8; legal: 4, as the argument"),
    ],
)
def test_mappings_that_are_refused(
    weights: LoadedModel, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make(LLMEngine, weights, block_size=4, kv_cache_config=config)


# Memory


def test_a_share_of_the_free_memory_is_used_and_said(
    weights: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "free_memory_bytes", lambda device: 1_000_003)
    options: dict[str, Any] = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.25}
    with caplog.at_level(logging.INFO):
        llm = make(LLM, weights, **options)
    block_bytes = llm.geometry.block_bytes(llm.formats, llm.block_size)
    assert llm.cache.num_blocks == 250_000 // block_bytes
    assert "KV cache: 244.14 KiB of the 976.57 KiB available" in caplog.text
    # bytes that are named come first
    llm = make(LLM, weights, kv_cache_memory_bytes=1 << 18, gpu_memory_utilization=0.25)
    assert llm.cache.num_blocks == (1 << 18) // block_bytes
    with pytest.raises(UsageError, match="kv_cache_memory_bytes"):
        make(LLM, weights, kv_cache_memory_bytes=None, gpu_memory_utilization=0.001)


@pytest.mark.parametrize("share", [0, -0.5, 1.01, float("nan"), "0.5"])
def test_shares_that_are_refused(weights: LoadedModel, share: Any) -> None:
    with pytest.raises(UsageError) as caught:
        make(LLM, weights, kv_cache_memory_bytes=None, gpu_memory_utilization=share)
    assert caught.value.field == "gpu_memory_utilization"


@pytest.mark.parametrize(("utilization", "expected"), [(None, 650), (0.5, 250)])
def test_on_an_npu_the_share_is_of_all_memory(
    monkeypatch: pytest.MonkeyPatch, utilization: float | None, expected: int
) -> None:
    monkeypatch.setattr(platform, "free_memory_bytes", lambda device: 750)
    monkeypatch.setattr(platform, "total_memory_bytes", lambda device: 1000)
    npu: Any = SimpleNamespace(device="npu")
    assert LLMEngine._share_of_memory(npu, utilization, 0) == expected
    with pytest.raises(UsageError, match="weights and others take 250 B of 1000 B"):
        LLMEngine._share_of_memory(npu, 0.25, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": -1},
        {"seed": 1.5},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 3, "max_num_seqs": 4},
        {"max_model_len": 1},
        {"enable_chunked_prefill": False, "max_model_len": 96, "max_num_batched_tokens": 95},
    ],
)
def test_what_is_wrong_without_a_model_is_said_before_weights_are_loaded(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_weights(*_: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("ascend_kv.llm_engine.load_model", no_weights)
    with pytest.raises(UsageError) as caught:
        LLM("somewhere", **wrong)
    assert caught.value.field in wrong

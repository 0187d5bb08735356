"""``LLM``: prompts in, outputs out, at once, as they grow or for asyncio, named as in vLLM."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ascend_kv.engine.async_engine import AsyncEngine
from ascend_kv.engine.outputs import CompletionOutput, RequestOutput
from ascend_kv.engine.params import SamplingParams
from ascend_kv.errors import RunError, UsageError
from ascend_kv.integrations.prompts import (
    Message,
    Prompt,
    TokenizedPrompt,
    apply_chat_template,
    tokenize,
)
from ascend_kv.llm_engine import LLMEngine

logger = logging.getLogger(__name__)


class LLM(LLMEngine):
    """A model on a paged, possibly quantized KV cache. Arguments are ``LLMEngine``'s.

    Example:
        >>> llm = LLM("Qwen/Qwen2.5-7B-Instruct", kv_cache_dtype="int8", max_model_len=4096)
        >>> outputs = llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=32))
        >>> outputs[0].outputs[0].text
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        super().__init__(model, **options)
        self._request_ids = itertools.count()
        self._async_engine: AsyncEngine | None = None
        # Every step serves whoever waits: outputs go to the inbox of the call that queued the
        # request, those of ``add_request`` are kept for ``step``. Only the newest of each counts.
        self._inboxes: dict[str, dict[str, RequestOutput]] = {}
        self._kept: dict[str, RequestOutput] = {}

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None
    ) -> None:
        """Queue a request for ``step``; see ``LLMEngine``.

        ``generate``, ``chat``, ``stream`` and ``generate_async`` run it along meanwhile; what it
        has got by then comes with the next ``step``.
        """
        taken = self._kept.keys() | self._inboxes.keys()
        if isinstance(request_id, str) and request_id in taken:
            raise UsageError("request_id", request_id, "a text that no unfinished request has")
        super().add_request(request_id, prompt, params)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request; returns what it has and was not seen yet, None for an unknown id.

        A stream whose request it is gives that too, and ends.
        """
        kept = self._kept.pop(request_id, None)
        output = super().abort_request(request_id) or kept
        if output is not None and request_id in self._inboxes:
            self._inboxes[request_id][request_id] = output
        return output

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has anything left to do, or to give."""
        return bool(self._kept) or super().has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """Outputs that are news: those kept while others ran, else those of one batch.

        Requests of a ``stream`` that is not read to its end run along; the stream has theirs.
        """
        if not self._kept:
            self._run_batch()
        outputs = list(self._kept.values())
        self._kept.clear()
        return outputs

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate a continuation of every prompt, batched as the cache allows.

        Args:
            prompts: text, ``{"prompt": text}`` or ``{"prompt_token_ids": [...]}``, or a list.
            sampling_params: one for all, or one each.
            use_tqdm: show a progress bar on stderr.

        Returns:
            One output a prompt, in order. A prompt that cannot be served (empty, too long) has
            ``error`` set and finish_reason "error"; the others are served all the same.
            Requests of ``add_request`` run along, and ``step`` gives their outputs.

        Raises:
            UsageError: arguments of the wrong kind; nothing has been generated then.
        """
        return self._run(self._tokenized(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the model's own template.

        Args:
            messages: ``{"role": ..., "content": ...}`` in order, or a list of such lists.
            sampling_params, use_tqdm: as ``generate``.

        Raises:
            UsageError: as ``generate``; also a model without a chat template.
        """
        several = isinstance(messages, Sequence) and messages
        single = not several or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        prompts = [apply_chat_template(self.tokenizer, one) for one in conversations]
        return self._run(prompts, sampling_params, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Outputs as they grow: every request once for each step that gave it a token.

        ``request_id`` ends in the number of the prompt; texts and tokens are all there is so
        far, not only what is new. Leaving the iteration early aborts what is unfinished.

        Raises:
            UsageError: as ``generate``, before the iteration begins.
        """
        tokenized = self._tokenized(prompts)
        params = _one_each(sampling_params, len(tokenized))
        return (output for _, output in self._stream(tokenized, params))

    def generate_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one prompt as they grow, for asyncio; concurrent calls share batches.

        Leaving the iteration early, or cancelling the task, aborts the request.

        Raises:
            UsageError: arguments of the wrong kind, at once; a prompt that cannot be served,
                when the iteration begins.
        """
        tokenized = tokenize(self.tokenizer, prompt)
        if tokenized.refusal is not None:
            raise tokenized.refusal
        (params,) = _one_each(sampling_params, 1)
        if self._async_engine is None:
            self._async_engine = AsyncEngine(self.engine, self._deliver)
        (request_id,) = self._new_ids("async-{call}", 1)
        return self._async_engine.generate(request_id, tokenized.token_ids, params, tokenized.text)

    def _tokenized(self, prompts: Prompt | Sequence[Prompt]) -> list[TokenizedPrompt]:
        if isinstance(prompts, str | Mapping):
            prompts = [prompts]
        if not isinstance(prompts, Iterable):
            raise UsageError("prompts", prompts, "a prompt, or a list of prompts")
        return [tokenize(self.tokenizer, prompt) for prompt in prompts]

    def _new_ids(self, form: str, count: int) -> list[str]:
        """Ids for the requests of one call that no request of the user's has."""
        while True:
            call = next(self._request_ids)
            ids = [form.format(call=call, number=number) for number in range(count)]
            if not any(self.engine.has_request(name) or name in self._kept for name in ids):
                return ids

    def _run_batch(self) -> None:
        for output in self.engine.step():
            self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        self._inboxes.get(output.request_id, self._kept)[output.request_id] = output

    def _run(
        self,
        prompts: list[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _one_each(sampling_params, len(prompts))
        results: dict[int, RequestOutput] = {}
        with tqdm(total=len(prompts), unit="request", disable=not use_tqdm) as bar:
            for index, output in self._stream(prompts, params):
                if output.finished:
                    results[index] = output
                    bar.update()
        self.warn_of_clipping()
        return [results[index] for index in range(len(prompts))]

    def _stream(
        self, prompts: list[TokenizedPrompt], params: list[SamplingParams]
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Outputs with the numbers of their prompts; refused prompts come first."""
        numbers: dict[str, int] = {}  # of what is not finished
        inbox: dict[str, RequestOutput] = {}
        ids = self._new_ids("{call}-{number}", len(prompts))
        try:
            for number, (request_id, prompt, one) in enumerate(
                zip(ids, prompts, params, strict=True)
            ):
                try:
                    self._queue(request_id, prompt, one)
                    numbers[request_id] = number
                    self._inboxes[request_id] = inbox
                except UsageError as error:
                    logger.warning("prompt %d refused: %s", number, error)
                    yield number, _refused(request_id, prompt, str(error))
            # Someone else may have stepped, or aborted a request, while this waited at a yield.
            while inbox or any(self.engine.has_request(request_id) for request_id in numbers):
                if not inbox:
                    self._run_batch()
                for request_id in list(inbox):
                    output, number = inbox.pop(request_id), numbers[request_id]
                    if output.finished:
                        del numbers[request_id], self._inboxes[request_id]
                    yield number, output
            if numbers:
                lost = ", ".join(str(number) for number in sorted(numbers.values()))
                why = self.engine.last_failure
                raise RunError(f"prompt {lost}: lost in another call's step, which failed: {why}")
        finally:
            for request_id in numbers:  # after an interruption the engine must be usable again
                self.engine.abort_request(request_id)
                del self._inboxes[request_id]


def _refused(request_id: str, prompt: TokenizedPrompt, error: str) -> RequestOutput:
    completion = CompletionOutput(0, "", [], "error")
    return RequestOutput(request_id, prompt.text, prompt.token_ids, [completion], True, error)


def _one_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * count
    params = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params]
    for one in params:
        if not isinstance(one, SamplingParams):
            raise UsageError("sampling_params", one, "SamplingParams, or a list of them")
    if len(params) != count:
        raise UsageError("sampling_params", f"{len(params)} of them", f"1 or {count}")
    return params

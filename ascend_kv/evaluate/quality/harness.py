"""Tasks of lm-evaluation-harness on an ``LLM``: a thin adapter, and one call of the library.

The library (pip: lm_eval) asks a model three things, and ``LLM.generate`` answers them all: the
log probability of a continuation and of a whole text, both from ``prompt_logprobs``, and greedy
text up to a stop string. Prompts are tokenized as ``LLM`` does it, with the special tokens that
the model's tokenizer puts before a text.

Source of the interface: lm_eval 0.4, ``lm_eval/api/model.py``, class ``LM``.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ascend_kv.engine.outputs import RequestOutput
from ascend_kv.engine.params import SamplingParams
from ascend_kv.errors import RunError, UsageError
from ascend_kv.evaluate.quality.recipe import HarnessRecipe
from ascend_kv.llm import LLM
from ascend_kv.registry import did_you_mean

PACKAGE = "lm_eval"
_GENERATED = 256
"""Tokens to generate where a task does not say."""
_BOOTSTRAPS = 1000
_PROMPTS = "prompts without their beginning"
_CONTINUATIONS = "continuations scored in part"
_ANSWERS = "answers ended before the task's limit"


class Figure(NamedTuple):
    """One figure of a task, as the library gives it."""

    task: str
    metric: str
    value: float
    error: float | None


def find_harness() -> Any:
    """The library.

    Raises:
        UsageError: it is not installed; says how to get it.
    """
    try:
        return importlib.import_module(PACKAGE)
    except ImportError as error:
        raise UsageError(
            "lm_eval.tasks",
            f"no module {error.name}",
            "an installed lm-evaluation-harness",
            f"Its tasks need it: pip install {PACKAGE}",
        ) from error


def check_tasks(harness: Any, recipe: HarnessRecipe) -> Any:
    """See that the library knows the tasks; returns its task manager.

    Raises:
        UsageError: a task that it does not know.
    """
    manager = importlib.import_module(f"{PACKAGE}.tasks").TaskManager(
        include_path=recipe.include_path
    )
    known = tuple(manager.all_tasks)
    for task in recipe.tasks:
        if task not in known:
            legal = f"one of the {len(known)} tasks of {PACKAGE} {_version(harness)}"
            raise UsageError("lm_eval.tasks", task, legal, did_you_mean(task, known))
    return manager


def _version(harness: Any) -> str:
    return str(getattr(harness, "__version__", "(version unknown)"))


def run_task(
    harness: Any, manager: Any, llm: LLM, task: str, recipe: HarnessRecipe
) -> tuple[list[Figure], str]:
    """Run one task of the library, or a group or tag of tasks.

    Args:
        harness: of ``find_harness``.
        manager: of ``check_tasks``.
        llm: with its tokenizer.
        task: its name in the library.
        recipe: limit and number of examples.

    Returns:
        Its figures; where it has none of its own, as a tag, those of its tasks. And what did not
        fit into the model's longest sequence, in words; empty where everything did.

    Raises:
        RunError: the library or the task failed, such as for want of its data set.
    """
    adapter = make_adapter(llm)
    try:
        found = harness.simple_evaluate(
            model=adapter,
            tasks=[task],
            num_fewshot=recipe.num_fewshot,
            limit=recipe.limit,
            bootstrap_iters=_BOOTSTRAPS,
            log_samples=False,
            task_manager=manager,
        )
    except Exception as error:  # tasks run code of their own, and fetch data
        reason = " ".join(str(error).split())[:300]
        raise RunError(
            f"lm_eval task {task} failed: {type(error).__name__}: {reason}. Its data set may have "
            "to be fetched first, on a machine with a network"
        ) from error
    results = found["results"]
    figures = list(_figures(task, results.get(task, {}))) or [
        figure for name in sorted(results) for figure in _figures(name, results[name])
    ]
    if not figures:
        raise RunError(f"lm_eval task {task} came back without a figure")
    return figures, ", ".join(f"{count:,} {what}" for what, count in sorted(adapter.cut.items()))


def _figures(task: str, results: Mapping[str, Any]) -> Iterator[Figure]:
    for key, value in results.items():
        metric, _, filtered = key.partition(",")
        if metric.endswith(("_stderr", "sample_len")) or isinstance(value, bool | str | None):
            continue
        error = results.get(f"{metric}_stderr,{filtered}")
        name = metric if filtered in ("", "none") else f"{metric} ({filtered})"
        spread = float(error) if isinstance(error, int | float) else None
        yield Figure(task, name, float(value), spread)


def make_adapter(llm: LLM) -> Any:
    """The adapter as an instance of the library's own base class."""
    base = importlib.import_module(f"{PACKAGE}.api.model").LM
    kind = type("AscendKvModel", (Adapter, base), {})
    return kind(llm)


class Adapter:
    """``LLM`` behind lm-evaluation-harness' three questions; mixed into its base class."""

    def __init__(self, llm: LLM) -> None:
        """Take over the model; its tokenizer must be there."""
        super().__init__()
        assert llm.tokenizer is not None, "the library's prompts are texts"
        self._llm, self._tokenizer = llm, llm.tokenizer
        self._longest = llm.max_model_len - 1  # of a prompt: one token is generated after it
        self.cut: Counter[str] = Counter()
        """How often something did not fit, by what it was."""

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Log probability of each continuation, and whether greedy decoding gives it."""
        pairs = [self._encode(*request.args) for request in requests]
        return self._score([(context, wanted) for context, wanted in pairs])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log probability of each whole text; long ones in windows, every token once."""
        texts = [self._tokens(request.args[0]) for request in requests]
        windows = [list(self._windows(tokens)) for tokens in texts]
        scores = iter(self._score([window for text in windows for window in text]))
        return [sum(next(scores)[0] for _ in text) for text in windows]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Greedy text up to the first stop string."""
        prompts, params, wanted = [], [], []
        for request in requests:
            context, options = request.args
            wanted.append(int(options.get("max_gen_toks", _GENERATED)))
            tokens = min(wanted[-1], self._longest // 2)
            until = options.get("until") or ()
            stops = (until,) if isinstance(until, str) else tuple(stop for stop in until if stop)
            temperature = float(options.get("temperature", 0)) if options.get("do_sample") else 0.0
            params.append(SamplingParams(max_tokens=tokens, temperature=temperature, stop=stops))
            prompts.append(self._fit(self._tokens(context), self._llm.max_model_len - tokens))
        written = [output.outputs[0] for output in self._generate(prompts, params)]
        for answer, tokens in zip(written, wanted, strict=True):
            if answer.finish_reason == "length" and len(answer.token_ids) < tokens:
                self.cut[_ANSWERS] += 1
        return [answer.text for answer in written]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation in the model's own template."""
        text: str = self._tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return text

    @property
    def tokenizer_name(self) -> str:
        """What the library tells cached requests apart by."""
        return str(self._llm.weights.path)

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    @property
    def _first(self) -> list[int]:
        """A token to begin with, where a text begins with nothing."""
        for name in ("bos_token_id", "eos_token_id"):
            token = getattr(self._tokenizer, name, None)
            if token is not None:
                return [int(token)]
        return [0]

    def _encode(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Both in tokens; spaces between them belong to the continuation."""
        stripped = context.rstrip()
        continuation, context = context[len(stripped) :] + continuation, stripped
        if not context:
            tokens = self._tokens(continuation)
            return (tokens[:1], tokens[1:]) if tokens[:1] == self._first else (self._first, tokens)
        before, whole = self._tokens(context), self._tokens(context + continuation)
        return whole[: len(before)], whole[len(before) :]

    def _windows(self, tokens: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Context and what follows it; the last window has as much context as fits."""
        if tokens[:1] == self._first:
            tokens = tokens[1:]
        step, done = self._longest - 1, 0
        while done < len(tokens):
            stop = min(done + step, len(tokens))
            begin = max(0, stop - self._longest)
            context = tokens[begin:done] if done else self._first
            yield context, tokens[done:stop]
            done = stop

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        prompts = [self._fit(context + wanted, self._longest) for context, wanted in pairs]
        params = [SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)] * len(pairs)
        scored = []
        for prompt, (_, wanted), output in zip(
            prompts, pairs, self._generate(prompts, params), strict=True
        ):
            count = min(len(wanted), len(prompt) - 1)
            if count < len(wanted):
                self.cut[_CONTINUATIONS] += 1
            marks = (output.prompt_logprobs or [])[len(prompt) - count :]
            entries = [
                mark[token]
                for mark, token in zip(marks, prompt[len(prompt) - count :], strict=True)
                if mark is not None
            ]
            total = sum(entry.logprob for entry in entries)
            scored.append((total, all(entry.rank == 1 for entry in entries)))
        return scored

    def _fit(self, prompt: list[int], longest: int) -> list[int]:
        if len(prompt) > longest:
            self.cut[_PROMPTS] += 1
        return prompt[-longest:]

    def _generate(
        self, prompts: Sequence[list[int]], params: list[SamplingParams]
    ) -> list[RequestOutput]:
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        for output in outputs:
            if output.error is not None:
                raise RunError(f"a request of the task failed: {output.error}")
        return outputs

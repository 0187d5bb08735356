"""Computes the cells that are missing.

Perplexity runs window by window with all policies in step, for they are compared with the
reference's probabilities, which are too large to keep. The other tasks run policy by policy. After
every cell the run may be interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import torch

from ascend_kv.evaluate.machine import this_machine
from ascend_kv.evaluate.quality import harness
from ascend_kv.evaluate.quality.evaluation import QUESTION_TASKS, Evaluation
from ascend_kv.evaluate.quality.generation import agreeing_tokens, continue_greedily
from ascend_kv.evaluate.quality.policies import UNQUANTIZED
from ascend_kv.evaluate.quality.questions import as_cell, score_question
from ascend_kv.evaluate.quality.results import EvalResult
from ascend_kv.evaluate.quality.scorers import PagedScorer, PolicyRunner, other_cost, paged_cost
from ascend_kv.evaluate.quality.scoring import score_window
from ascend_kv.evaluate.quality.summary import COST, summarize
from ascend_kv.integrations.quantized_cache import QuantizedCacheModel
from ascend_kv.ops import platform

_CACHE_SHARE = 0.5
"""Of the free memory that the caches of policies that run in step may take."""
_HARNESS_SEQUENCES = 8

Save = Callable[[EvalResult], None]


def run_eval(evaluation: Evaluation, save: Save) -> EvalResult:
    """Compute what is missing.

    Args:
        evaluation: what there is to do.
        save: called with the result so far after every task, and when the run breaks off.

    Raises:
        UsageError: too little memory for a cache.
        RunError: a cell cannot be written, or a task failed.
    """
    job = _Job(evaluation)
    total, done = evaluation.count()
    if done:
        evaluation.log.say(f"Going on: {done:,} of {total:,} cells are there already.")
    try:
        for task in evaluation.recipe.ordered_tasks:
            job.run(task)
            save(job.result())
    except BaseException:  # an interruption too
        save(job.result())
        raise
    return job.result()


class _Job:
    """One run."""

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation, self.store, self.log = evaluation, evaluation.store, evaluation.log
        self._began = time.perf_counter()
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")

    def result(self) -> EvalResult:
        """Everything that the cells hold by now."""
        evaluation = self.evaluation
        total, done = evaluation.count()
        result = EvalResult(
            started=self._started,
            quick=evaluation.quick,
            machine=this_machine(evaluation.device, torch.get_num_threads()),
            operators=platform.implementations(evaluation.device),
            whole_number_bits=platform.whole_number_bits(evaluation.device),
            model=evaluation.model,
            text=evaluation.text,
            recipe=evaluation.recipe_as_run(),
            cells=total,
            cells_done=done,
            skipped=evaluation.skipped,
            wall_seconds=time.perf_counter() - self._began,
        )
        summarize(evaluation, result)
        return result

    def run(self, task: str) -> None:
        """Compute the cells of one task."""
        if task == "perplexity":
            self._run_perplexity()
        elif task == "lm_eval":
            self._run_harness()
        else:
            run = self._generate if task == "generation" else self._ask
            for runner in self.evaluation.runners:
                pending = self.evaluation.pending(task, runner)
                if pending:
                    with self.log.bar(
                        f"{task}, {runner.policy.name}", len(pending), "items"
                    ) as advance:
                        run(task, runner, pending, advance)

    def _run_perplexity(self) -> None:
        evaluation = self.evaluation
        missing = {
            runner.policy.name: set(evaluation.pending("perplexity", runner))
            for runner in evaluation.runners
        }
        length = evaluation.recipe.perplexity.window_tokens
        wanted = [runner for runner in evaluation.runners[1:] if missing[runner.policy.name]]
        tokens = length * sum(len(items) for items in missing.values())
        if not tokens:
            return
        with self.log.bar("perplexity", tokens, "tokens") as advance:
            for group in self._groups(wanted, length):
                self._score_group(group, missing, length, advance)

    def _groups(self, runners: Sequence[PolicyRunner], length: int) -> Iterator[list[PolicyRunner]]:
        """Policies whose caches fit into memory together; one group at least, if an empty one."""
        room = _CACHE_SHARE * platform.free_memory_bytes(self.evaluation.device)
        group: list[PolicyRunner] = []
        taken = self.evaluation.reference.cache_bytes(length)
        for runner in runners:
            needed = runner.cache_bytes(length)
            if group and taken + needed > room:
                yield group
                group, taken = [], self.evaluation.reference.cache_bytes(length)
            group.append(runner)
            taken += needed
        yield group

    def _score_group(
        self,
        group: Sequence[PolicyRunner],
        missing: dict[str, set[Any]],
        length: int,
        advance: Callable[[int], None],
    ) -> None:
        reference = self._open(self.evaluation.reference, length)
        scorers = {runner.policy.name: self._open(runner, length) for runner in group}
        for number, window in enumerate(self.evaluation.windows):
            names = [name for name in scorers if number in missing[name]]
            if not names and number not in missing[UNQUANTIZED]:
                continue
            own, scores = score_window(
                window,
                reference,
                {name: scorers[name] for name in names},
                self.evaluation.chunk_tokens,
                advance,
            )
            if number in missing[UNQUANTIZED]:
                missing[UNQUANTIZED].discard(number)
                self.store.put(UNQUANTIZED, "perplexity", number, asdict(own))
            for name in names:
                self.store.put(name, "perplexity", number, asdict(scores[name]))

    def _open(self, runner: PolicyRunner, length: int) -> PagedScorer | QuantizedCacheModel:
        scorer = runner.open(length)
        self._note_cost(runner, scorer)
        return scorer

    def _note_cost(self, runner: PolicyRunner, scorer: PagedScorer | QuantizedCacheModel) -> None:
        """Keep what a policy takes."""
        name = runner.policy.name
        if self.store.get(name, *COST) is None:
            if isinstance(scorer, PagedScorer):
                cost = paged_cost(runner, scorer.llm)
            else:
                cost = other_cost(runner, scorer)
            self.store.put(name, *COST, asdict(cost))

    def _generate(
        self,
        task: str,
        runner: PolicyRunner,
        pending: Sequence[int],
        advance: Callable[[int], None],
    ) -> None:
        evaluation, name = self.evaluation, runner.policy.name
        settings, chunk = evaluation.recipe.generation, evaluation.chunk_tokens
        scorer = self._open(runner, settings.prompt_tokens + settings.max_tokens)
        for number in pending:
            prompt = evaluation.prompts[number]
            if name == UNQUANTIZED:
                written = continue_greedily(scorer, prompt, settings.max_tokens, chunk)
                cell: dict[str, Any] = {"tokens": written}
            else:
                reference = self.store.get(UNQUANTIZED, task, number)
                assert reference is not None, "the reference runs first"
                agreed = agreeing_tokens(scorer, prompt, reference["tokens"], chunk)
                cell = {"agreed": agreed}
            self.store.put(name, task, number, cell)
            advance(1)

    def _ask(
        self,
        task: str,
        runner: PolicyRunner,
        pending: Sequence[int],
        advance: Callable[[int], None],
    ) -> None:
        assert task in QUESTION_TASKS
        questions = self.evaluation.questions[task]
        scorer = self._open(runner, max(len(question.token_ids) for question in questions))
        for number in pending:
            question = questions[number]
            answers = score_question(scorer, question, self.evaluation.chunk_tokens)
            self.store.put(runner.policy.name, task, number, as_cell(question, answers))
            advance(1)

    def _run_harness(self) -> None:
        evaluation = self.evaluation
        settings = evaluation.recipe.lm_eval
        for runner in evaluation.runners:
            pending = evaluation.pending("lm_eval", runner)
            if not pending:
                continue
            llm = runner.open_llm(settings.max_model_len, _HARNESS_SEQUENCES, texts=True)
            self._note_cost(runner, PagedScorer(llm))
            for task in pending:
                self.log.say(f"lm_eval, {runner.policy.name}: {task} ...")
                figures, cut = harness.run_task(
                    evaluation.harness, evaluation.harness_tasks, llm, task, settings
                )
                cell = {"figures": [figure._asdict() for figure in figures], "cut": cut}
                self.store.put(runner.policy.name, "lm_eval", task, cell)

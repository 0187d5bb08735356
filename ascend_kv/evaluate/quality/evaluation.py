"""What an evaluation has to do, known before anything is computed: policies, items, cells.

Everything that can be refused is refused here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ascend_kv.errors import UsageError
from ascend_kv.evaluate.calibration import calibrate_keys, calibrate_scales, calibration_text
from ascend_kv.evaluate.console import Log
from ascend_kv.evaluate.machine import this_machine
from ascend_kv.evaluate.model_choice import choose_model, load_text_tokenizer
from ascend_kv.evaluate.perplexity import cut_windows
from ascend_kv.evaluate.quality import harness
from ascend_kv.evaluate.quality.cells import CellStore
from ascend_kv.evaluate.quality.generation import cut_prompts
from ascend_kv.evaluate.quality.policies import REFERENCE, Policy
from ascend_kv.evaluate.quality.questions import (
    Question,
    Source,
    make_copies,
    make_needles,
    make_recall,
)
from ascend_kv.evaluate.quality.recipe import EvalRecipe
from ascend_kv.evaluate.quality.results import Skipped
from ascend_kv.evaluate.quality.scorers import PolicyRunner, make_runner
from ascend_kv.evaluate.results import TextInfo
from ascend_kv.evaluate.text import Text, load_text
from ascend_kv.ops import platform

QUESTION_TASKS = ("needle", "copy", "recall")
_KEY_OF_LENGTHS = {"needle": "needle.lengths", "copy": "copy.lengths", "recall": "recall.pairs"}
_FINGERPRINT_BYTES = 1 << 16
_VERSIONS = ("ascend_kv", "torch", "transformers")


class Evaluation:
    """Model, text, items and policies of one run, and the cells they lead to."""

    def __init__(self, recipe: EvalRecipe, directory: Path, quick: bool, log: Log) -> None:
        """Load the model, make the items, check the policies, open the cells.

        Raises:
            UsageError: a value that is not legal, or cells of other settings in ``directory``.
            RunError: the model cannot be had, or the directory not be written.
        """
        self.recipe, self.quick, self.log = recipe, quick, log
        self.harness = self.harness_tasks = None
        if "lm_eval" in recipe.tasks:
            self.harness = harness.find_harness()
            self.harness_tasks = harness.check_tasks(self.harness, recipe.lm_eval)
        text = load_text(None if recipe.text is None else Path(recipe.text))
        self.loaded, self.model, self.device = choose_model(
            recipe.model, recipe.dtype, recipe.device, log
        )
        if self.loaded.geometry.compressed is not None:
            legal = "a model that keeps a key and a value of every token"
            raise UsageError("model", self.model.model_type, legal)
        self._tokenizer = load_text_tokenizer(self.loaded)
        # A long text may exceed the model's longest sequence: it is cut up, never run whole.
        self._token_ids = list(self._tokenizer(text.content, verbose=False)["input_ids"])
        self.text = TextInfo(text.source, text.sha256, len(self._token_ids))
        self.windows: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.questions: dict[str, list[Question]] = {}
        self._make_items()
        self.runners: list[PolicyRunner] = []
        self.skipped: list[Skipped] = []
        self._make_runners()
        self.store = CellStore(directory, self._settings())

    @property
    def reference(self) -> PolicyRunner:
        """The unquantized cache."""
        return self.runners[0]

    @property
    def chunk_tokens(self) -> int:
        """Tokens a forward, in every task."""
        return self.recipe.perplexity.chunk_tokens

    def items(self, task: str, runner: PolicyRunner) -> Sequence[object]:
        """What a task asks of a policy; names or numbers of the cells."""
        if task == "perplexity":
            return range(len(self.windows))
        if task == "generation":
            return range(len(self.prompts))
        if task == "lm_eval":
            return [] if runner.policy.huggingface is not None else self.recipe.lm_eval.tasks
        return range(len(self.questions[task]))

    def pending(self, task: str, runner: PolicyRunner) -> list[Any]:
        """Those of the items that have no cell yet."""
        name = runner.policy.name
        return [
            item for item in self.items(task, runner) if self.store.get(name, task, item) is None
        ]

    def count(self) -> tuple[int, int]:
        """Cells there are to be, and cells that are there."""
        total = missing = 0
        for task in self.recipe.ordered_tasks:
            for runner in self.runners:
                total += len(self.items(task, runner))
                missing += len(self.pending(task, runner))
        return total, total - missing

    def _make_items(self) -> None:
        recipe, longest = self.recipe, self.loaded.geometry.max_position_tokens
        tasks = recipe.ordered_tasks
        lengths: list[tuple[str, object, int]] = []
        if "perplexity" in tasks:
            tokens = recipe.perplexity.window_tokens
            lengths.append(("perplexity.window_tokens", tokens, tokens))
        if "generation" in tasks:
            tokens = recipe.generation.prompt_tokens + recipe.generation.max_tokens
            lengths.append(("generation", f"prompt_tokens + max_tokens = {tokens}", tokens))
        if "lm_eval" in tasks:
            tokens = recipe.lm_eval.max_model_len
            lengths.append(("lm_eval.max_model_len", tokens, tokens))
        _check_lengths(lengths, longest)
        if "perplexity" in tasks:
            self.windows = cut_windows(recipe.perplexity, self._token_ids)
        if "generation" in tasks:
            self._check_text("generation.prompt_tokens", recipe.generation.prompt_tokens)
            self.prompts = cut_prompts(recipe.generation, self._token_ids)
        self._check_text("any task", 1)
        source = Source(self._tokenizer, self._token_ids, recipe.seed)
        if "needle" in tasks:
            self.questions["needle"] = make_needles(recipe.needle, source)
        if "copy" in tasks:
            self.questions["copy"] = make_copies(recipe.copy, source)
        if "recall" in tasks:
            self.questions["recall"] = make_recall(recipe.recall, source)
        for task, questions in self.questions.items():
            most = max(len(question.token_ids) for question in questions)
            _check_lengths([(_KEY_OF_LENGTHS[task], f"questions of {most} tokens", most)], longest)

    def _check_text(self, key: str, tokens: int) -> None:
        if len(self._token_ids) < tokens:
            legal = f"at least {tokens} tokens, for {key}"
            raise UsageError("text", f"{len(self._token_ids)} tokens", legal, "Give a longer text.")

    def _make_runners(self) -> None:
        named = not self.recipe.has_built_in_policies
        for policy in (REFERENCE, *self.recipe.policies):
            made = make_runner(policy, self.loaded, self.device, self.recipe.block_size, named)
            if isinstance(made, PolicyRunner):
                if policy.calibrate:
                    made = replace(made, calibrated=self._calibrate(policy))
                self.runners.append(made)
                if "lm_eval" in self.recipe.tasks and policy.huggingface is not None:
                    reason = "the library's tasks run on ascend_kv's engine"
                    self.skipped.append(Skipped(policy.name, "lm_eval", reason))
            else:
                self.skipped.append(Skipped(policy.name, "", made))
        for entry in self.skipped:
            task = f", {entry.task}" if entry.task else ""
            self.log.say(f"Left out: {entry.policy}{task}: {entry.reason}.")
        if len(self.runners) == 1:
            given = ", ".join(policy.name for policy in self.recipe.policies) or "none"
            legal = "one or more that can be measured here, beside the unquantized cache"
            reasons = " ".join(f"{entry.policy}: {entry.reason}." for entry in self.skipped)
            raise UsageError("policies", given, legal, reasons)

    def _calibrate(self, policy: Policy) -> dict[str, Any]:
        """What the calibration text makes for a policy."""
        self.log.say(f"Calibrating: {policy.name} ...")
        made: dict[str, Any] = {}
        if "keys" in policy.calibrate:
            made["key_calibration"] = self._key_statistics
        if "scales" in policy.calibrate:
            config = policy.cache_config(self.loaded.dtype)
            config = replace(config, **made)
            with policy.named_in_errors():
                made["kv_cache_scales"] = calibrate_scales(
                    self.loaded, config, self._calibration_tokens
                )
        return made

    @cached_property
    def _key_statistics(self) -> dict[str, Any]:
        return calibrate_keys(self.loaded, self._calibration_tokens)

    @cached_property
    def _calibration_text(self) -> Text:
        settings = self.recipe.calibration
        path = None if settings.text is None else Path(settings.text)
        text = calibration_text(path, settings.tokens)
        if text.sha256 == self.text.sha256:
            hint = "A cache must not be judged by the text that it learned from."
            raise UsageError("calibration.text", text.source, "another text than text", hint)
        return text

    @cached_property
    def _calibration_tokens(self) -> list[int]:
        settings = self.recipe.calibration
        ids = self._tokenizer(self._calibration_text.content, verbose=False)["input_ids"]
        if len(ids) < settings.tokens:
            legal = f"at least {settings.tokens} tokens, for calibration.tokens"
            raise UsageError("calibration.text", f"{len(ids)} tokens", legal)
        return list(ids[: settings.tokens])

    def _policy_settings(self, policy: Policy) -> dict[str, Any]:
        if not policy.calibrate:
            return policy.settings
        text = {"text": self._calibration_text.sha256, "tokens": self.recipe.calibration.tokens}
        return policy.settings | {"calibration": text}

    def _settings(self) -> dict[str, Any]:
        """All that decides what is in a cell."""
        recipe = self.recipe
        versions = this_machine(self.device, 1).versions
        sections = {task: asdict(getattr(recipe, task)) for task in recipe.ordered_tasks}
        # How the interval is made and which of the library's tasks run may change later.
        for task, key in (("perplexity", "cluster_tokens"), ("lm_eval", "tasks")):
            sections.get(task, {}).pop(key, None)
        return {
            "model": asdict(self.model),
            "model_files": _fingerprint(self.loaded.path),
            "device": self.device,
            "text": self.text.sha256,
            "seed": recipe.seed,
            "block_size": self.reference.block_size,
            "chunk_tokens": self.chunk_tokens,
            "versions": {name: versions[name] for name in _VERSIONS},
            "operators": platform.served_by(self.device),
            "whole_number_bits": platform.whole_number_bits(self.device),
            "tasks": sections,
            "policies": {
                runner.policy.name: self._policy_settings(runner.policy) for runner in self.runners
            },
        }

    def recipe_as_run(self) -> dict[str, Any]:
        """Tasks and settings for the report."""
        recipe = replace(self.recipe, policies=())
        content = asdict(recipe)
        del content["policies"]
        return content


def _check_lengths(lengths: Sequence[tuple[str, object, int]], longest: int) -> None:
    for key, shown, needed in lengths:
        if needed > longest:
            raise UsageError(key, shown, f"at most {longest}, the model's longest sequence")


def _fingerprint(path: Path) -> str:
    """Tells one checkpoint from another without reading gigabytes: sizes and ends of its files."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            digest.update(content.read(_FINGERPRINT_BYTES))
            content.seek(max(0, size - _FINGERPRINT_BYTES))
            digest.update(content.read())
    return digest.hexdigest()

"""A plan against what the engine allocates and reaches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deepseek_models import make_deepseek
from tiny_models import make_model

from ascend_kv import LLM, SamplingParams, cli
from ascend_kv.errors import RunError
from ascend_kv.evaluate.default_model import fetch_default_model

BUDGET = 200_000


def plan(capsys: pytest.CaptureFixture[str], model: Path, *options: str) -> dict[str, Any]:
    assert cli.main(["plan", str(model), "--json", *options]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


@pytest.mark.parametrize("allocator", ["paged", "contiguous"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float16", "int8"])
def test_blocks_and_sequences_are_those_of_the_engine(
    allocator: str, kv_cache_dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path)
    (policy,) = plan(
        capsys, tmp_path, "--memory", str(BUDGET), "--formats", kv_cache_dtype, "--block-size", "4",
        "--max-model-len", "64", "--prompt", "40", "--output", "24",
    )["policies"]  # fmt: skip
    planned = policy[allocator]
    llm = LLM(
        str(tmp_path), kv_cache_dtype=kv_cache_dtype, block_size=4, max_model_len=64,
        kv_cache_memory_bytes=BUDGET, kv_allocator=allocator, max_num_batched_tokens=512,
        skip_tokenizer_init=True,
    )  # fmt: skip
    assert llm.engine.scheduler.tables.num_blocks == planned["num_blocks"]
    if allocator == "paged":
        assert llm.cache.allocated_bytes == planned["kv_bytes"]
    # Sequences that all stand at their full length: one more than the plan's does not fit.
    at_once = planned["sequences_full_length"]
    assert 3 <= at_once < 64
    tables = llm.engine.scheduler.tables
    for number in range(at_once):
        assert tables.reserve(f"x{number}", 64)
    assert not tables.can_admit(64)
    for number in range(at_once):
        tables.release(f"x{number}")
    # And served: as many run at once, and nobody is preempted.
    prompts = [{"prompt_token_ids": [1] * 61} for _ in range(at_once)]
    llm.generate(prompts, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True), False)
    assert max(step.running for step in llm.engine.stats.steps) == at_once
    assert llm.engine.stats.preemptions == 0


RUN = """
import re, sys
from ascend_kv import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_cache_dtype="int8", kv_cache_memory_bytes=int(sys.argv[2]),
          max_model_len=512, skip_tokenizer_init=True)
prompts = [{"prompt_token_ids": [5] * 440} for _ in range(4)]
llm.generate(prompts, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True), False)
print(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


@pytest.mark.network
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux' /proc")
def test_memory_of_a_run_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """A real model with its cache full: the process within a tenth of the plan."""
    try:
        model = fetch_default_model()
    except RunError as error:
        pytest.skip(f"the model cannot be had here: {error}")
    budget = 4 * 512 * 12_240
    planned = plan(
        capsys, model, "--memory", str(budget), "--formats", "int8", "--max-model-len", "512"
    )["total_bytes"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(model), str(budget)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    measured = int(done.stdout.split()[-1]) * 1024
    assert planned == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("entries", "keys"), [("auto", "auto"), ("int8", "int8")])
def test_slots_blocks_and_sequences_of_deepseek_v4_are_those_of_the_engine(
    entries: str, keys: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_deepseek(tmp_path)
    budget = 700_000
    (policy,) = plan(
        capsys, tmp_path, "--memory", str(budget), "--formats", entries, "--indexer-format", keys,
        "--block-size", "4", "--max-model-len", "512", "--max-num-seqs", "6", "--prompt", "300",
        "--output", "200",
    )["policies"]  # fmt: skip
    llm = LLM(
        str(tmp_path), kv_cache_dtype=entries, indexer_cache_dtype=keys, block_size=4,
        max_model_len=512, max_num_seqs=6, kv_cache_memory_bytes=budget, skip_tokenizer_init=True,
    )  # fmt: skip
    assert llm.cache.blocks._asdict() == policy["blocks"]
    assert llm.cache.bytes_by_group == policy["group_bytes"]
    assert llm.cache.allocated_bytes == sum(policy["group_bytes"].values()) <= budget
    # Sequences that all stand at their full length: one more than the plan's does not fit.
    at_once, tables = policy["sequences_full_length"], llm.tables
    for number in range(at_once):
        assert tables.reserve(f"x{number}", 512)
    assert at_once >= 2 and not tables.can_admit(512)

"""A tiny model with a tokenizer and a recipe to match, for the tests of the main job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from tiny_models import make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ascend_kv.evaluate.factors import find_factors
from ascend_kv.evaluate.machine import Machine
from ascend_kv.evaluate.results import (
    AttentionRoute,
    BenchResult,
    Budget,
    CalibrationRun,
    FormatPerplexity,
    Measured,
    ModelInfo,
    Perplexity,
    PlantedRow,
    Predicted,
    Sample,
    SchemeResult,
    Sweep,
    SweepPoint,
    TextInfo,
    Timeline,
    check_speed,
)
from ascend_kv.evaluate.workload import WorkloadSummary

RECIPE: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_batched_tokens": 48,
    "block_size": 4,
    "budget": {"sequences": 3, "kv_cache_dtype": "16-bit"},
    "workload": {
        "requests": 16,
        "prompt_tokens": {"mean": 10, "sigma": 0.3, "min": 4, "max": 32},
        "output_tokens": {"mean": 20, "sigma": 0.3, "min": 4, "max": 32},
    },
    "schemes": [
        {"name": "one", "allocator": "contiguous", "kv_cache_dtype": "16-bit"},
        {"name": "two", "allocator": "contiguous", "kv_cache_dtype": "int8"},
        {"name": "three", "allocator": "paged", "kv_cache_dtype": "16-bit"},
        {"name": "four", "allocator": "paged", "kv_cache_dtype": "int8"},
        {"name": "five", "allocator": "paged", "kv_cache_dtype": "int8", "batch": "all"},
    ],
    "sweep": {"batches": [1, 4], "context_tokens": 20, "steps": 2},
    "perplexity": {"windows": 2, "window_tokens": 40, "cluster_tokens": 8, "chunk_tokens": 16},
    "planted_bias": {"texts": 1},
    "samples": {"prompts": ["def f(x):", "import"], "max_tokens": 6},
    "quick": {"workload": {"requests": 6}},
}


def make_model_with_tokenizer(directory: Path, **changes: Any) -> Path:
    """A random Llama whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    make_model(directory, vocab_size=len(alphabet), **changes)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


def write_recipe(path: Path, **changes: Any) -> Path:
    """The tiny recipe with some of its keys changed."""
    path.write_text(yaml.safe_dump(RECIPE | changes))
    return path


CALIBRATION = CalibrationRun(12.0, 36, 0.02)


def make_scheme(
    name: str, allocator: str, kv_cache_dtype: str, batch: str, speed: float, ratio: float
) -> SchemeResult:
    """A scheme with round figures; nothing has run."""
    predicted = Predicted(8, 1000, 90, 1_440_000, 4.0, 8.5, 11.25, 1.5 * speed)
    measured = Measured(
        wall_seconds=1000 / speed,
        generated_tokens=1000,
        tokens_per_second=speed,
        steps=100,
        model_seconds=900 / speed,
        engine_step_seconds=0.001,
        batch_mean=6.0,
        batch_mean_busy=7.5,
        batch_peak=8,
        kv_allocated_bytes=1_440_000,
        kv_geometry_bytes=1_440_000,
        kv_token_bytes_mean=960_000.0,
        kv_held_bytes_mean=1_000_000.0,
        utilisation=0.96,
        preemptions=3,
        recomputed_tokens=1234,
        key_conditioning="keys as the model makes them",
        speed_probes=9,
        speed_probe_seconds=0.025,
        timeline=Timeline([0.0, 1.0, 2.0], [8, 8, 4], [0.95, 0.97, 0.96]),
    )
    check = check_speed(predicted, measured, CALIBRATION)
    return SchemeResult(name, allocator, kv_cache_dtype, batch, predicted, measured, check, ratio)


def make_result() -> BenchResult:
    """A finished result with every part, made up."""
    length = {"mean": 12, "sigma": 0.3, "min": 4, "max": 32}
    schemes = [
        make_scheme("contiguous 16-bit", "contiguous", "float16", "planned", 50.0, 1.0),
        make_scheme("paged INT8", "paged", "int8", "planned", 125.0, 2.5),
    ]
    return BenchResult(
        started="2026-01-02T03:04:05+00:00",
        quick=True,
        machine=Machine("cpu", "Some Processor", 2, 2, 1 << 34, "Linux 6", {"python": "3.11.7"}),
        operators={"kv_cache_store": "reference"},
        model=ModelInfo("some-model", "float32", "llama", 30, 9, 3, 64),
        text=TextInfo("some text", "ab" * 32, 5000),
        budget=Budget(1_500_000, 4, 1024, "float16", 16),
        workload=WorkloadSummary(24, 80.0, 32, 150, 60.0, 20, 130, 140.0, 1440),
        recipe={"workload": {"prompt_tokens": length, "output_tokens": length}},
        calibration=CALIBRATION,
        schemes=schemes,
        factors=find_factors(schemes),
        perplexity=Perplexity(
            "some method", 2, 1024, 2046, 16, "cache",
            [
                FormatPerplexity("float32", 12.5, 1.0, 1.0, 1.0, "as the model makes them", 9.0),
                FormatPerplexity("int8", 12.51, 1.0008, 0.9996, 1.002, "pair scales", 9.0),
            ],
        ),
        planted_bias=[
            PlantedRow("unquantized", 8.25, 1.0, 0.0, 1.0, "keys as the model makes them"),
            PlantedRow("INT8 as it is", 66.0, 8.0, 0.75, 0.25, "keys as the model makes them"),
        ],
        samples=[Sample("Say | it", "float32", "one\ntwo", "int8", "one\nthree", 9, 4)],
        sweep=Sweep("int8", 216, [SweepPoint(1, 40.0, 0.025), SweepPoint(8, 130.0, 0.0615)]),
        attention_routes=[
            AttentionRoute("contiguous 16-bit", "decode: loaded (cache type)", 1200, "cache type"),
            AttentionRoute("paged INT8", "decode: paged", 34, ""),
        ],
        wall_seconds=80.0,
        complete=True,
    )  # fmt: skip

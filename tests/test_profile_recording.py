"""Profiles that ``ascend-kv bench --profile`` records, from the model to the tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bench_fixture import make_model_with_tokenizer, write_recipe

from ascend_kv import cli
from ascend_kv.evaluate import profiling
from ascend_kv.ops import platform, profiler
from ascend_kv.profile import inputs
from ascend_kv.profile.summary import Profile, read_profile


def test_bench_records_a_profile_of_each_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model_with_tokenizer(tmp_path / "model")
    formats = {
        "float16": "float16",
        "int8": "int8",
        "int8-asymmetric": "int8/asymmetric",
        "k-int4-v-fp8": "k:int4+v:fp8",
    }
    schemes = [{"name": name, "kv_cache_dtype": name} for name in formats.values()]
    recipe = write_recipe(tmp_path / "recipe.yaml", schemes=schemes)
    output = tmp_path / "out"
    arguments = ["bench", str(recipe), "--model", str(model), "--device", "cpu", "--quick"]
    assert cli.main([*arguments, "--profile", "--output", str(output), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["complete"]  # the report itself is as ever
    assert "Where a decode step's time went" in printed.err
    assert "int8/asymmetric: 2 steps" in printed.err

    folders = {folder.name: folder for folder in (output / "profile").iterdir()}
    assert sorted(folders) == sorted(formats)
    for name, folder in folders.items():
        content = json.loads((folder / "profile.json").read_text())
        assert content["tasks_on"] == "host" and len(content["steps"]) == 2
        assert content["workload"]["kv_cache_dtype"] == formats[name]
        calls = {row["name"]: row["calls"] for row in content["operators"]}
        assert calls["paged_attention"] == calls["kv_cache_store"] == 2 * 3  # steps, layers
        for part in ("attention", "KV operators", "matmul", "host gaps"):
            assert all(step["parts_seconds"][part] > 0 for step in content["steps"]), part
        moved = {row["name"]: row["moved_bytes"] for row in content["bandwidth"]}
        a_step = content["workload"]["bytes_per_step"]
        assert moved["paged_attention"] == 2 * a_step["attention"]
        assert moved["kv_cache_store"] == 2 * a_step["KV operators"]
    assert cli.main(["profile", str(folders["int8"]), "--compare", str(folders["float16"])]) == 0
    assert "Before and after, per step" in capsys.readouterr().out


def read(folder: Path) -> Profile:
    with platform.record_steps("cpu", folder, 2) as step:
        for _ in range(3):
            torch.ops.aten.mm(torch.ones(64, 64), torch.ones(64, 64))
            torch.ones(9).sin()
            step()
    return read_profile(folder)


def test_a_cpu_records_the_steps_it_is_asked_for(tmp_path: Path) -> None:
    profile = read(tmp_path)
    assert profile.on_host and [step.name for step in profile.steps] == ["1", "2"]
    calls = {operator.name: operator.calls for operator in profile.operators}
    assert calls["aten::mm"] == calls["aten::sin"] == 2
    assert profile.part_ns("matmul") > 0 and profile.remarks == []


def test_attention_of_more_sequences_than_a_profile_lists(tmp_path: Path) -> None:
    """torch leaves long lists out: then there is no bandwidth, rather than a wrong one."""
    for sequences, known in ((4, 1), (64, 0)):
        folder = tmp_path / str(sequences)
        query, cache = torch.ones(sequences, 4, 8), torch.ones(sequences, 2, 4, 8)
        tables = torch.arange(sequences, dtype=torch.int32)[:, None]
        lengths = [3] * sequences
        with platform.record_steps("cpu", folder, 1) as step:
            for _ in range(2):
                torch.ops.ascend_kv.paged_attention(
                    query, cache, cache, tables, [1] * sequences, lengths, 0.3
                )
                step()
        operators = {operator.name: operator for operator in read_profile(folder).operators}
        assert operators["paged_attention"].moved_calls == known
        if known:
            moved = sequences * 3 * 2 * 2 * 8 * 4 + 2 * query.nbytes
            assert operators["paged_attention"].moved_bytes == moved


class Recorder:
    """Stands in for ``torch_npu.profiler``, as far as its documents go."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.did: list[str] = []
        self.ProfilerActivity = SimpleNamespace(CPU="CPU", NPU="NPU")
        self.ExportType = SimpleNamespace(Text="text")
        self.ProfilerLevel = SimpleNamespace(Level1="level 1")
        self.AiCMetrics = SimpleNamespace(MemoryAccess="memory access")

    def schedule(self, *, wait: int, warmup: int, active: int, repeat: int) -> tuple[int, ...]:
        return wait, warmup, active, repeat

    def tensorboard_trace_handler(self, dir_name: str) -> str:
        return f"into {dir_name}"

    def _ExperimentalConfig(self, **given: str) -> dict[str, str]:
        return given

    def profile(self, **given: Any) -> Recorder:
        self.given = given
        return self

    def step(self) -> None:
        self.did.append("step")

    def __enter__(self) -> None:
        self.did.append("enter")

    def __exit__(self, *_: object) -> None:
        self.did.append("exit")


def test_an_npu_records_shapes_and_memory_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, library = Recorder(), ModuleType("torch_npu")
    library.profiler = recorder  # type: ignore[attr-defined]
    monkeypatch.setattr(platform, "_torch_npu", lambda: library)
    with platform.record_steps("npu", tmp_path / "profile", 3) as step:
        step()
    assert recorder.did == ["enter", "step", "exit"]
    assert recorder.given == {
        "activities": ["CPU", "NPU"],
        "schedule": (0, profiler.WARM_UP_STEPS, 3, 1),
        "on_trace_ready": f"into {tmp_path / 'profile'}",
        "record_shapes": True,
        "experimental_config": {
            "export_type": "text",
            "profiler_level": "level 1",
            "aic_metrics": "memory access",
        },
    }
    assert (tmp_path / "profile").is_dir()


def test_both_rooms_name_the_note_alike() -> None:
    assert profiling.WORKLOAD == inputs.WORKLOAD
    assert re.fullmatch(r"ascend_kv\.\w+/\d+", profiling.SCHEMA)

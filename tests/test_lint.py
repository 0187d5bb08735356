"""What the doctor says of a recipe: each pitfall is found where it is, and nowhere else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bench_fixture import RECIPE, write_recipe
from deepseek_models import make_deepseek
from safetensors.torch import save_file
from tiny_models import make_model

from ascend_kv import cli
from ascend_kv.devices import get_device
from ascend_kv.evaluate.lint import Lint, lint_recipe
from ascend_kv.evaluate.lint_others import lint_eval
from ascend_kv.evaluate.quality.policies import DEFAULT_POLICIES
from ascend_kv.evaluate.quality.recipe import load_eval_recipe
from ascend_kv.evaluate.recipe import load_recipe

WIDE: dict[str, Any] = {"hidden_size": 384, "num_attention_heads": 6, "dtype": torch.bfloat16}
"""Heads of 64 in a half type: the NPU's attention takes them."""
SOUND: dict[str, Any] = {
    "block_size": 32,
    "max_model_len": 256,
    "workload": {
        "requests": 8,
        "prompt_tokens": {"mean": 150, "sigma": 0.3, "min": 32, "max": 180},
        "output_tokens": {"mean": 60, "sigma": 0.3, "min": 16, "max": 70},
    },
    "schemes": RECIPE["schemes"][:4],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    models = {kind: make_model(folder / kind, kind, **WIDE) for kind in ("llama", "qwen2")}
    for kind in models:  # the weights are as random as ever, the type is what is asked about
        config = json.loads((models[kind] / "config.json").read_text())
        config["dtype"] = "bfloat16"
        (models[kind] / "config.json").write_text(json.dumps(config))
    return models


def look(
    tmp_path: Path, model: Path | str | None, device: str = "910B3", **changes: Any
) -> list[Lint]:
    path = write_recipe(tmp_path / "recipe.yaml", **{**SOUND, **changes})
    return lint_recipe(load_recipe(path), get_device(device), None if model is None else str(model))


def keys(found: list[Lint], *severities: str) -> list[str]:
    return [x.key for x in found if x.severity in (severities or ("error", "warning"))]


def test_a_sound_recipe_has_nothing_to_complain_of(models: dict[str, Path], tmp_path: Path) -> None:
    assert keys(look(tmp_path, models["llama"])) == []
    assert keys(look(tmp_path, models["qwen2"])) == []
    assert keys(look(tmp_path, models["llama"], "cpu", block_size=16)) == []


def test_the_worst_comes_first(models: dict[str, Path], tmp_path: Path) -> None:
    found = look(tmp_path, models["llama"], block_size=8)
    order = [x.severity for x in found]
    assert order == sorted(order, key=("error", "warning", "note").index)
    assert {"error", "warning", "note"} == set(order)
    assert all(x.found and x.reason and x.remedy for x in found)


@pytest.mark.parametrize(("size", "legal"), [(8, False), (16, False), (32, True), (64, True)])
def test_block_sizes_that_int8_cannot_have(
    size: int, legal: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    found = look(tmp_path, models["llama"], block_size=size)
    assert ("block_size" in keys(found, "error")) is not legal
    assert "block_size" in keys(found, "note")  # 128 is recommended
    assert ("block_size" in keys(found, "warning")) is (size < 16)


def test_a_format_that_the_device_does_not_read(models: dict[str, Path], tmp_path: Path) -> None:
    perplexity = {**RECIPE["perplexity"], "formats": ["float32"]}
    found = look(tmp_path, models["llama"], perplexity=perplexity)
    assert keys(found, "error") == ["perplexity.formats[0]"]
    assert "float16, bfloat16, int8" in found[0].remedy


def test_blocks_that_stay_half_empty(models: dict[str, Path], tmp_path: Path) -> None:
    found = look(tmp_path, models["llama"], block_size=128)
    assert keys(found) == ["block_size"] and "26%" in found[0].reason  # 64 of 180 + 64
    assert keys(look(tmp_path, models["llama"], block_size=64)) == []


def test_keys_with_a_large_bias(models: dict[str, Path], tmp_path: Path) -> None:
    bare = {"pair_scaling": False, "key_offset_layers": "none"}
    found = look(tmp_path, models["qwen2"], **bare)
    assert keys(found) == ["pair_scaling"] and found[0].severity == "error"
    assert keys(look(tmp_path, models["llama"], **bare)) == []
    assert keys(look(tmp_path, models["qwen2"], pair_scaling=False)) == []
    first = look(tmp_path, models["qwen2"], kv_cache_dtype_skip_layers=[0, 1], **bare)
    assert keys(first) == ["pair_scaling", "kv_cache_dtype_skip_layers"]
    assert "[0, 1], without 2, the last" in first[1].found
    both = look(tmp_path, models["qwen2"], kv_cache_dtype_skip_layers=[0, -1], **bare)
    assert keys(both) == ["pair_scaling"]


def test_static_scales(models: dict[str, Path], tmp_path: Path) -> None:
    scales = tmp_path / "scales.safetensors"
    given = {"scale_type": "static", "granularity": "head", "kv_cache_scales": str(scales)}
    assert keys(look(tmp_path, models["llama"], **given)) == ["kv_cache_scales"]  # not there
    names = [f"layers.{i}.{side}_scale" for i in range(3) for side in ("key", "value")]
    others = {"layers.0.mlp.weight_scale": torch.zeros(2)}  # not of the cache
    save_file({name: torch.ones(1, 2, 1, 1) for name in names} | others, scales)
    (lost,) = [x for x in look(tmp_path, models["llama"], **given) if x.severity == "error"]
    assert "all 12 numbers are 1.0" in lost.found and "54623" in lost.reason
    save_file({name: torch.full((1, 2, 1, 1), 0.1) for name in names}, scales)
    found = look(tmp_path, models["llama"], **given)
    assert keys(found) == [] and "scale_type" in keys(found, "note")
    scales.write_bytes(b"no scales")  # said better by the run itself
    assert keys(look(tmp_path, models["llama"], **given)) == []


def test_scales_of_a_checkpoint(models: dict[str, Path], tmp_path: Path) -> None:
    model = Path(shutil.copytree(models["llama"], tmp_path / "calibrated"))
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"kv_cache_scheme": {"num_bits": 8}}
    (model / "config.json").write_text(json.dumps(config))
    unused = [x for x in look(tmp_path, model) if x.key == "scale_type"]
    assert len(unused) == 1 and "kv_cache_scheme" in unused[0].found
    given = {"scale_type": "static", "granularity": "layer", "kv_cache_scales": str(model)}
    assert keys(look(tmp_path, model, **given)) == ["kv_cache_scales"]
    bare = {"pair_scaling": False, "key_offset_layers": "none"}
    assert keys(look(tmp_path, model, **given, **bare)) == []


def test_caches_that_an_npu_copies_in_every_step(models: dict[str, Path], tmp_path: Path) -> None:
    schemes = [{**scheme, "kv_cache_dtype": "float16"} for scheme in RECIPE["schemes"][:2]]
    found = look(tmp_path, models["llama"], schemes=schemes)
    assert keys(found) == ["schemes[0, 1].kv_cache_dtype"] and "cache type" in found[0].found
    grouped = look(tmp_path, models["llama"], granularity="group", group_size=32)
    assert keys(grouped) == ["schemes[1, 3].kv_cache_dtype"] and "scales" in grouped[0].found
    assert keys(look(tmp_path, models["llama"], "cpu", granularity="group", group_size=32)) == []
    slow = look(tmp_path, models["llama"], dtype="float32")
    assert keys(slow) == ["schemes[0, 1, 2, 3].kv_cache_dtype"]
    assert "reference" in slow[0].reason


def test_a_batch_that_loses_its_blocks(models: dict[str, Path], tmp_path: Path) -> None:
    few = {**SOUND["workload"], "requests": 4}
    found = look(tmp_path, models["llama"], schemes=RECIPE["schemes"], workload=few)
    assert keys(found) == []  # they fit
    many = {**SOUND["workload"], "requests": 100}
    found = look(tmp_path, models["llama"], schemes=RECIPE["schemes"], workload=many)
    assert keys(found) == ["schemes[4].batch"] and "100 requests" in found[0].found


def test_formats_with_an_open_block_for_each_sequence(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Counted for those that run, and for all requests only where all are let in."""
    schemes = [{"name": "one", "kv_cache_dtype": "int4/kivi"}]
    work = {**SOUND["workload"], "requests": 300}
    changes = {"block_size": 64, "schemes": schemes, "workload": work}
    assert keys(look(tmp_path, models["llama"], "cpu", **changes)) == []
    changes["schemes"] = [{**schemes[0], "batch": "all"}]
    (found,) = look(tmp_path, models["llama"], "cpu", **changes)
    assert found.key == "schemes[0]" and "open blocks of 300 sequences" in found.remedy


def test_memory(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = (models["llama"] / "model.safetensors").stat().st_size
    geometry_bytes = 3 * 256 * 3 * 2 * 2 * 64 * 2  # sequences, tokens, layers, sides, heads
    for memory, severity in ((1.0, "error"), (1.05, "warning"), (1.3, None)):
        size = int(memory * (weights + geometry_bytes)) - (memory == 1.0)
        device = replace(get_device("910B3"), memory_bytes=size)
        path = write_recipe(tmp_path / "recipe.yaml", **SOUND)
        found = lint_recipe(load_recipe(path), device, str(models["llama"]))
        assert [x.severity for x in found if x.key == "budget"] == ([severity] if severity else [])


def test_sequences_longer_than_the_model(models: dict[str, Path], tmp_path: Path) -> None:
    found = look(tmp_path, models["llama"], max_model_len=257)
    assert keys(found) == ["max_model_len"] and found[0].remedy == "at most 256"


def test_a_model_that_compresses_is_not_for_bench(tmp_path: Path) -> None:
    (found,) = look(tmp_path, make_deepseek(tmp_path / "model"))
    assert (found.severity, found.key, found.found) == ("error", "model", "deepseek_v4")
    assert "compressed layers" in found.reason


@pytest.mark.parametrize("device", ["cpu", "910B3"])
def test_keys_and_values_of_two_formats(
    models: dict[str, Path], tmp_path: Path, device: str
) -> None:
    schemes = [{"name": "mixed", "kv_cache_dtype": "k:int8+v:int8/asymmetric"}]
    assert keys(look(tmp_path, models["llama"], device, schemes=schemes), "error") == []
    bare = {"pair_scaling": False, "key_offset_layers": "none"}
    found = look(tmp_path, models["qwen2"], device, schemes=schemes, **bare)
    assert keys(found, "error") == ["pair_scaling"]


def test_a_model_that_is_not_here_is_not_fetched(tmp_path: Path) -> None:
    for model in (None, "Qwen/Qwen2.5-7B-Instruct"):
        found = look(tmp_path, model, block_size=8)
        assert keys(found, "note")[0] == "model" and "block_size" in keys(found, "error")
    (tmp_path / "bad").mkdir()
    for bad in (tmp_path / "bad", tmp_path / "gone", "gone.gguf"):
        assert keys(look(tmp_path, bad), "error") == ["model"]


def test_layers_that_a_model_has_not(models: dict[str, Path], tmp_path: Path) -> None:
    for field in ("key_offset_layers", "kv_cache_dtype_skip_layers"):
        found = look(tmp_path, models["qwen2"], **{field: [99]})
        assert any("99" in lint.found for lint in found if lint.severity == "error"), field


def test_the_command(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", **{**SOUND, "block_size": 128})
    arguments = ["doctor", str(recipe), "--model", str(models["llama"]), "--target", "910B1"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    assert "warning block_size: 128 tokens" in printed.out and "-> A smaller" in printed.out
    assert cli.main([*arguments, "--strict", "--json"]) == 1
    printed = capsys.readouterr()
    content = json.loads(printed.out)
    assert content["recipe"]["lints"][0]["severity"] == "warning"
    assert "block_size" in printed.err
    recipe = write_recipe(recipe, **{**SOUND, "block_size": 8})
    assert cli.main([*arguments, "--output", str(tmp_path / "out")]) == 1
    assert "error   block_size: 8\n" in (tmp_path / "out" / "doctor.txt").read_text()
    assert "block_size: 8" in capsys.readouterr().err
    recipe = write_recipe(recipe, **SOUND)
    assert cli.main(["doctor", str(recipe)]) == 0  # on what is here, the CPU
    assert "note    model: no model is named" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["--model", "x"], ["--target", "910B3"], ["{gone}"], ["{recipe}", "--target", "910C"]],
)
def test_mistakes_end_with_code_2(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"gone": str(tmp_path / "gone"), "recipe": str(write_recipe(tmp_path / "r.yaml"))}
    assert cli.main(["doctor", *(text.format(**places) for text in arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert any(f"{word}: got" in printed.err for word in (*arguments, "recipe"))


def write_yaml(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))  # which is YAML too
    return path


def look_at_eval(tmp_path: Path, model: Path | None, device: str, **content: Any) -> list[Lint]:
    recipe = load_eval_recipe(write_yaml(tmp_path / "eval.yaml", content))
    return lint_eval(recipe, get_device(device), None if model is None else str(model))


def test_an_evaluation_is_looked_over(models: dict[str, Path], tmp_path: Path) -> None:
    sound = {"policies": ["int8"], "needle": {"lengths": [128]}, "tasks": ["needle"]}
    assert look_at_eval(tmp_path, models["llama"], "910B3", **sound) == []
    found = look_at_eval(
        tmp_path,
        models["llama"],
        "910B3",
        policies=[
            "fp8_e4m3",
            "int8/group32",
            {
                "name": "lost",
                "kv_cache_config": {
                    "kv_cache_dtype": "int8", "scale_type": "static", "kv_cache_scales": "gone",
                },
            },
        ],
        tasks=["needle"],
        needle={"lengths": [4096]},
        text="missing.txt",
    )  # fmt: skip
    assert keys(found, "error") == [
        "policies[0] (fp8_e4m3)", "policies[2] (lost)", "text", "needle.lengths",
    ]  # fmt: skip
    assert keys(found, "note") == ["policies[1] (int8/group32)"]
    assert "copied out of the cache" in found[-1].reason
    assert keys(look_at_eval(tmp_path, models["llama"], "cpu", **sound)) == []
    means = {"name": "means", "kv_cache_config": {"untrained_compression": True, "compression": {}}}
    found = look_at_eval(tmp_path, models["llama"], "910B3", **sound | {"policies": [means]})
    assert keys(found, "error") == ["policies[0] (means)"] and "on a 910B3" in found[0].found
    assert look_at_eval(tmp_path, models["llama"], "cpu", **sound | {"policies": [means]}) == []
    deepseek = make_deepseek(tmp_path / "v4")
    assert [x.severity for x in look_at_eval(tmp_path, deepseek, "cpu", **sound)] == ["error"]


def test_built_in_policies_that_a_device_has_not_are_no_error(
    models: dict[str, Path], tmp_path: Path
) -> None:
    found = look_at_eval(tmp_path, models["llama"], "910B3", tasks=["copy"], copy={"lengths": [64]})
    left_out = {x.key for x in found if "left out" in x.reason}
    unreadable = {
        f"policies[{number}] ({policy.name})"
        for number, policy in enumerate(DEFAULT_POLICIES)
        if any(word in str(policy.kv_cache_config) for word in ("fp8", "int4"))
    }
    assert keys(found) == [] and unreadable and unreadable <= left_out
    assert not left_out & {"policies[0] (16-bit)", "policies[1] (int8)"}
    assert "model" in keys(look_at_eval(tmp_path, None, "910B3"), "note")


@pytest.mark.parametrize(
    ("recipe", "command"),
    [
        ("qwen_910b.yaml", "ascend-kv bench"),
        ("eval.yaml", "ascend-kv eval"),
        ("deepseek_v4.yaml", "tools/deepseek_v4.py"),
    ],
)
def test_the_doctor_says_what_kind_of_recipe_it_is(
    recipe: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).parent.parent / "recipes" / recipe
    assert cli.main(["doctor", str(path), "--target", "cpu"]) == 0
    assert f"{path} ({command})" in capsys.readouterr().out.replace("\n", "")


def test_a_deepseek_recipe_is_looked_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = yaml.safe_load(
        (Path(__file__).parent.parent / "recipes" / "deepseek_v4.yaml").read_text()
    )
    path = write_yaml(tmp_path / "v4.yaml", content | {"max_num_batched_tokens": 4})
    assert cli.main(["doctor", str(path), "--target", "910B1"]) == 1
    said = capsys.readouterr()
    assert "max_num_batched_tokens" in said.err and "small random model on the CPU" in said.out
    assert cli.main(["doctor", str(path), "--model", str(tmp_path)]) == 2
    assert "--model" in capsys.readouterr().err
    write_yaml(path, content | {"output_tokens": 0})
    assert cli.main(["doctor", str(path)]) == 2

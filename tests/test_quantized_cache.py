"""transformers' quantized caches as baselines: what is read, and what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import make_model
from transformers import cache_utils

from ascend_kv.errors import UsageError
from ascend_kv.integrations import quantized_cache
from ascend_kv.integrations.attention import ATTENTION_NAME
from ascend_kv.integrations.loading import LoadedModel, load_model
from ascend_kv.integrations.quantized_cache import QuantizedCacheModel, why_not
from ascend_kv.llm import LLM

WINDOW = [(7 * i * i + 3 * i) % 97 for i in range(45)]
GROUPED = {"nbits": 4, "axis_key": 0, "axis_value": 0, "q_group_size": 64}


class Marking(cache_utils.QuantizedLayer):
    """A backend that loses nothing, or adds 100 to all that is read back."""

    added = 0.0

    def _quantize(self, tensor: torch.Tensor, axis: int) -> Any:
        return tensor.clone(), {"scale": torch.zeros(3)}

    def _dequantize(self, stored: Any) -> torch.Tensor:
        return stored[0] + self.added


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def plain(loaded: LoadedModel) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(loaded.path)
    with torch.inference_mode():
        return model(torch.tensor([WINDOW])).logits[0]


@pytest.fixture
def marking(monkeypatch: pytest.MonkeyPatch) -> type[Marking]:
    monkeypatch.setattr(cache_utils, "QuantoQuantizedLayer", Marking)
    return Marking


def run(model: QuantizedCacheModel, pieces: int) -> torch.Tensor:
    logits = []
    for start in range(0, len(WINDOW), pieces):
        piece = WINDOW[start : start + pieces]
        logits.append(model.forward(piece, start, range(len(piece))))
    return torch.cat(logits)


@pytest.mark.parametrize("chunk", [1, 8, 45, 64])
@pytest.mark.parametrize("pieces", [1, 16, 45])
def test_a_cache_that_loses_nothing_gives_the_plain_logits(
    loaded: LoadedModel, plain: torch.Tensor, marking: type[Marking], chunk: int, pieces: int
) -> None:
    model = QuantizedCacheModel(loaded, "quanto", chunk, GROUPED)
    for _ in range(2):  # a second text begins with an empty cache
        assert torch.allclose(run(model, pieces), plain, atol=1e-4)
    assert model.stored_tokens() == 45
    assert loaded.hf_model.config._attn_implementation == ATTENTION_NAME


@pytest.mark.parametrize(("chunk", "first_changed"), [(8, 8), (20, 20), (45, 45)])
def test_all_chunks_but_the_latest_are_read_as_stored(
    loaded: LoadedModel,
    plain: torch.Tensor,
    marking: type[Marking],
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
    first_changed: int,
) -> None:
    monkeypatch.setattr(Marking, "added", 3.0)
    logits = run(QuantizedCacheModel(loaded, "quanto", chunk, GROUPED), 45)
    differs = (logits - plain).abs().amax(-1) > 1e-3
    assert differs.nonzero().flatten().tolist() == list(range(first_changed, 45))


def test_bytes_are_counted_through_tuples_and_mappings(
    loaded: LoadedModel, marking: type[Marking]
) -> None:
    model = QuantizedCacheModel(loaded, "quanto", 8, GROUPED)
    model.forward(WINDOW[:40], 0, [39])
    values = 3 * 2 * 2 * 40 * 8
    assert model.stored_bytes() == 4 * values + 3 * 2 * 3 * 4
    assert model.residual_tokens() == 0
    model.forward(WINDOW[40:43], 40, [2])
    assert model.residual_tokens() == 3 and model.stored_tokens() == 43


@pytest.mark.skipif(why_not("fp8") is not None, reason="this transformers has no fp8 cache")
def test_fp8_reads_what_it_stores(loaded: LoadedModel, plain: torch.Tensor) -> None:
    model = QuantizedCacheModel(loaded, "fp8", 8, {})
    error = (run(model, 45) - plain).abs().amax(-1)
    assert error[:8].max() < 1e-4 < error[8:].max() < 5
    assert model.stored_bytes() == 3 * 2 * (2 * 45 * 8 + 4)


def test_folded_weights_are_unfolded_first(tmp_path: Path, marking: type[Marking]) -> None:
    """A key bias that one of our caches has taken out of the weights is in them again."""
    loaded = load_model(make_model(tmp_path, "qwen2"))
    model = QuantizedCacheModel(loaded, "quanto", 8, GROUPED)
    before = run(model, 45)
    llm = LLM(
        loaded.path,
        weights=loaded,
        skip_tokenizer_init=True,
        max_model_len=32,
        kv_cache_memory_bytes=1 << 20,
        kv_cache_dtype="int8",
        key_offset_layers="all",
    )
    assert llm.conditioning.offset_layers
    llm.generate([{"prompt_token_ids": [3, 4]}], use_tqdm=False)
    assert torch.equal(run(model, 45), before)


def test_what_the_backend_refuses_is_said(loaded: LoadedModel) -> None:
    with pytest.raises(UsageError) as caught:
        QuantizedCacheModel(loaded, "fp8", 8, {"nbits": 4})
    assert caught.value.field == "huggingface"


@pytest.mark.parametrize(("backend", "package"), [("quanto", "optimum-quanto"), ("hqq", "hqq")])
def test_a_missing_package_is_named(
    backend: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_cache, "_is_installed", lambda module: False)
    assert why_not(backend) == f"{package} is not installed (pip install {package})"
    monkeypatch.setattr(quantized_cache, "_is_installed", lambda module: True)
    assert why_not(backend) is None


def test_a_package_is_looked_for(tmp_path: Path) -> None:
    assert quantized_cache._is_installed("torch.nn")
    assert not quantized_cache._is_installed("no_such_package.below")

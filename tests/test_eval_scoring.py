"""Loss, divergence and agreement: against a float64 oracle, and against transformers' forward."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import transformers
from tiny_models import make_model

from ascend_kv.evaluate.quality import scoring
from ascend_kv.evaluate.quality.policies import REFERENCE, Policy
from ascend_kv.evaluate.quality.scorers import PagedScorer, make_runner, paged_cost
from ascend_kv.evaluate.quality.scoring import log_probabilities, score_chunk, score_window
from ascend_kv.integrations.loading import LoadedModel, load_model
from ascend_kv.ops import platform

WINDOW = [(7 * i * i + 3 * i) % 97 for i in range(45)]


def oracle(p_logits: np.ndarray, q_logits: np.ndarray) -> float:
    """KL(p || q) of one token with Python's exact sums, the largest logit taken off first."""

    def logs(logits: np.ndarray) -> list[float]:
        shifted = [float(x) - float(logits.max()) for x in logits]
        total = math.log(math.fsum(math.exp(x) for x in shifted))
        return [x - total for x in shifted]

    p, q = logs(p_logits.astype(np.float64)), logs(q_logits.astype(np.float64))
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q))


@pytest.mark.parametrize("at_once", [1, 4 * 501, 1 << 20])
@pytest.mark.parametrize("tokens", [1, 4, 13])
@pytest.mark.parametrize("error", [1e-4, 0.1, 5.0])
def test_scores_equal_the_oracle(
    tokens: int, error: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors down to where the divergence is 1e-9, which float32 could not tell from 0.

    ``at_once``: one row of the vocabulary at a time, four, all.
    """
    monkeypatch.setattr(scoring, "_AT_ONCE", at_once)
    p = torch.randn(tokens, 501) * 6
    q = p + error * torch.randn(tokens, 501)
    targets = torch.randint(0, 501, (tokens,))
    scores = score_chunk(q, log_probabilities(p), targets)
    expected = [oracle(a, b) for a, b in zip(p.numpy(), q.numpy())]
    assert scores.divergence == pytest.approx(expected, rel=1e-6, abs=1e-14)
    losses = torch.nn.functional.cross_entropy(q.double(), targets, reduction="none")
    assert scores.loss == pytest.approx(losses.tolist(), rel=1e-12)
    assert scores.agreement == (p.argmax(-1) == q.argmax(-1)).int().tolist()


def test_divergence_is_of_the_policy_from_the_reference_not_the_other_way() -> None:
    p, q = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    (found,) = score_chunk(q, log_probabilities(p), torch.tensor([0])).divergence
    assert found == pytest.approx(oracle(p[0].numpy(), q[0].numpy()))
    assert abs(found - oracle(q[0].numpy(), p[0].numpy())) > 0.1


def test_what_the_reference_rules_out_counts_nothing() -> None:
    p = torch.tensor([[0.0, 1.0, -math.inf]])
    same = score_chunk(p, log_probabilities(p), torch.tensor([1]))
    assert same.divergence == [pytest.approx(0.0, abs=1e-15)] and same.agreement == [1]
    ruled_out = score_chunk(p, log_probabilities(torch.zeros(1, 3)), torch.tensor([1]))
    assert ruled_out.divergence == [math.inf]


def test_a_logit_that_is_nan_shows() -> None:
    q = torch.zeros(3, 5)
    q[1, 2] = math.nan
    scores = score_chunk(q, log_probabilities(torch.zeros(3, 5)), torch.tensor([0, 1, 2]))
    assert [math.isnan(loss) for loss in scores.loss] == [False, True, False]
    assert math.isnan(scores.divergence[1])


def test_nothing_to_score() -> None:
    empty = score_chunk(
        torch.zeros(0, 7), log_probabilities(torch.zeros(0, 7)), torch.zeros(0).long()
    )
    assert empty.loss == [] and empty.agreement == []


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(make_model(tmp_path_factory.mktemp("model")))


def open_scorer(loaded: LoadedModel, policy: Policy) -> PagedScorer:
    runner = make_runner(policy, loaded, "cpu", 8)
    assert not isinstance(runner, str)
    scorer = runner.open(len(WINDOW))
    assert isinstance(scorer, PagedScorer)
    return scorer


@pytest.mark.parametrize("chunk_tokens", [1, 11, 44, 45, 64])
def test_a_window_in_any_chunks(loaded: LoadedModel, chunk_tokens: int) -> None:
    """All caches in step, on weights that are folded for one of them and not for the other."""
    int8 = Policy("int8", {"kv_cache_dtype": "int8"})
    seen: list[int] = []
    own, scores = score_window(
        WINDOW,
        open_scorer(loaded, REFERENCE),
        {"int8": open_scorer(loaded, int8), "same": open_scorer(loaded, REFERENCE)},
        chunk_tokens,
        seen.append,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(loaded.path)
    with torch.inference_mode():
        logits = model(torch.tensor([WINDOW])).logits[0].double().log_softmax(-1)
    expected = [-float(logits[i, token]) for i, token in enumerate(WINDOW[1:])]
    assert own.loss == pytest.approx(expected, abs=1e-4)
    assert scores["same"].loss == own.loss
    assert max(scores["same"].divergence) < 1e-12 and set(scores["same"].agreement) == {1}
    assert 1e-8 < float(np.mean(scores["int8"].divergence)) < 1e-2
    assert len(scores["int8"].agreement) == 44 and sum(seen) == 3 * 45
    assert own.seconds > 0 and scores["int8"].seconds > 0


def test_policies_do_not_disturb_each_other(loaded: LoadedModel) -> None:
    """The divergence of one is the same whoever else runs, to the last bit."""
    int8 = Policy("int8", {"kv_cache_dtype": "int8"})
    bare = Policy("bare", {"kv_cache_dtype": "int8", "pair_scaling": False})

    def run(policies: Sequence[Policy]) -> list[float]:
        scorers = {policy.name: open_scorer(loaded, policy) for policy in policies}
        return score_window(WINDOW, open_scorer(loaded, REFERENCE), scorers, 16)[1][
            "int8"
        ].divergence

    assert run([int8]) == run([bare, int8, Policy("16-bit", {"kv_cache_dtype": "float16"})])


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        ({"kv_cache_dtype": "int8"}, 3 * 2 * 2 * (8 + 4)),
        ({"kv_cache_dtype": "16-bit"}, 3 * 2 * 2 * 8 * 2),
        ({"kv_cache_dtype": "int8", "symmetric": False}, 3 * 2 * 2 * (8 + 8)),
        ({"kv_cache_dtype": "k:int8+v:int4/asymmetric"}, 3 * 2 * (8 + 4 + 4 + 4)),
        (
            {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": [-1]},
            2 * 2 * 2 * (8 + 4) + 2 * 2 * 8 * 4,
        ),
    ],
)
def test_bits_and_bytes_hold_the_scales(
    loaded: LoadedModel, config: dict[str, object], token_bytes: int
) -> None:
    """Three layers, two KV heads of eight numbers."""
    runner = make_runner(Policy("p", config), loaded, "cpu", 8)
    assert not isinstance(runner, str)
    llm = runner.open_llm(40)
    cost = paged_cost(runner, llm)
    assert cost.bytes_per_token == token_bytes
    assert cost.bits_per_value == pytest.approx(8 * token_bytes / (3 * 2 * 2 * 8))
    assert llm.cache.allocated_bytes == runner.cache_bytes(40) == 40 * token_bytes


def test_a_policy_that_is_the_reference_is_left_out(loaded: LoadedModel) -> None:
    reason = make_runner(Policy("32", {"kv_cache_dtype": "float32"}), loaded, "cpu", 8)
    assert isinstance(reason, str) and "float32" in reason


def test_a_format_that_the_device_has_not_got_is_left_out(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "device_name", lambda device: "910B3")
    fp8 = Policy("fp8", {"kv_cache_dtype": "k:int8+v:fp8_e4m3"})
    reason = make_runner(fp8, loaded, "npu", 128)
    assert isinstance(reason, str) and "fp8_e4m3 on 910B3" in reason
    assert not isinstance(
        make_runner(Policy("i", {"kv_cache_dtype": "int8"}), loaded, "npu", 128), str
    )

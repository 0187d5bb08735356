"""Greedy, temperature and top-p sampling."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from ascend_kv.engine import sampler as sampler_module
from ascend_kv.engine.choice import _filter, _invert
from ascend_kv.engine.params import SamplingParams
from ascend_kv.engine.request import Request
from ascend_kv.engine.sampler import Sampler
from ascend_kv.errors import UsageError


def request(name: str = "r", **params: object) -> Request:
    return Request(name, [1], SamplingParams(**params))  # type: ignore[arg-type]


def tokens(sampler: Sampler, logits: torch.Tensor, requests: list[Request]) -> list[int | None]:
    return [sampled.token for sampled in sampler.sample(logits, requests)]


def draw_many(logits: torch.Tensor, count: int, **params: object) -> torch.Tensor:
    """Empirical distribution of ``count`` draws of one request."""
    sampler, one = Sampler(), request(seed=5, **params)
    drawn = torch.tensor([sampler.sample(logits[None], [one])[0].token for _ in range(count)])
    return torch.bincount(drawn, minlength=logits.numel()) / count


def test_greedy_takes_the_first_of_the_best() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, -1.0, 0.5]])
    assert tokens(Sampler(), logits, [request(temperature=0)] * 2) == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -3.0])
    want = torch.softmax(logits / temperature, 0)
    got = draw_many(logits, 4000, temperature=temperature)
    # Five standard errors of a share of 4,000 draws.
    assert (got - want).abs().max() < 5 * math.sqrt(0.25 / 4000)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.3, 0.06, 0.04]))
    got = draw_many(logits, 2000, top_p=0.75)
    assert got[[0, 3, 4]].sum() == 0
    assert got[1] == pytest.approx(0.5 / 0.8, abs=0.06)
    assert draw_many(logits, 50, top_p=1e-9)[1] == 1


def test_top_p_of_a_flat_distribution_keeps_nearly_all() -> None:
    logits = torch.zeros(5000)
    got = draw_many(logits, 400, top_p=0.999)
    assert int((got > 0).sum()) > 300  # 400 draws of 4,995 tokens seldom meet one twice


def test_draws_over_many_chunks_follow_the_weights_and_skip_zeros() -> None:
    weights = np.zeros(1000, dtype=np.float32)
    weights[[0, 255, 256, 999]] = [1, 2, 3, 4]
    grid = [_invert(weights, (i + 0.5) / 1000) for i in range(1000)]
    assert Counter(grid) == {0: 100, 255: 200, 256: 300, 999: 400}
    assert _invert(weights, np.nextafter(1.0, 0.0)) == 999
    weights[999] = 0
    assert _invert(weights, np.nextafter(1.0, 0.0)) == 256


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 50, generator=generator)

    def mine(company: int) -> list[int | None]:
        sampler = Sampler(seed=company)
        requests = [request(str(i)) for i in range(company)] + [request("mine", seed=11)]
        rows = [torch.cat([logits.flip(0)[:company], logits[step][None]]) for step in range(20)]
        return [tokens(sampler, row, requests)[-1] for row in rows]

    assert mine(0) == mine(3) == mine(7)
    assert len(set(mine(0))) > 5


def test_requests_without_a_seed_differ_but_the_run_repeats() -> None:
    logits = torch.zeros(2, 1000)
    names = [request("a"), request("b")]
    first, again = Sampler(3), Sampler(3)
    drawn = [tokens(first, logits, names) for _ in range(5)]
    assert drawn == [tokens(again, logits, names) for _ in range(5)]
    assert [a for a, _ in drawn] != [b for _, b in drawn]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_p": 0.5}])
def test_a_row_that_is_not_finite_gives_no_token(bad: float, params: dict[str, float]) -> None:
    logits = torch.zeros(2, 8)
    logits[0, 3] = bad
    first, second = tokens(Sampler(), logits, [request("a", **params), request("b", **params)])
    assert first is None and second is not None


def kept_tokens(logits: torch.Tensor, **params: object) -> set[int]:
    """Tokens that a request with these parameters can draw."""
    got = draw_many(logits, 600, **params)
    return set(torch.nonzero(got).flatten().tolist())


def test_top_k_and_min_p_limit_what_is_drawn() -> None:
    logits = torch.log(torch.tensor([0.1, 0.4, 0.3, 0.12, 0.08]))
    assert kept_tokens(logits) == {0, 1, 2, 3, 4}
    assert kept_tokens(logits, top_k=-1) == {0, 1, 2, 3, 4}
    assert kept_tokens(logits, top_k=2) == {1, 2}
    assert kept_tokens(logits, top_k=99) == {0, 1, 2, 3, 4}
    assert kept_tokens(logits, min_p=0.26) == {1, 2, 3}
    assert kept_tokens(logits, min_p=0.5, top_k=3) == {1, 2}
    # top_p counts within what top_k left: 0.4 / 0.7 of it reaches 0.5.
    assert kept_tokens(logits, top_k=2, top_p=0.5) == {1}
    assert kept_tokens(logits, top_p=0.5) == {1, 2}
    got = draw_many(logits, 2000, top_k=2)
    assert got[1] == pytest.approx(0.4 / 0.7, abs=0.06)


def test_top_k_breaks_ties_towards_the_lowest_token() -> None:
    assert kept_tokens(torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0]), top_k=2) == {1, 2}


def after(prompt: list[int], output: list[int], **params: object) -> Request:
    one = Request("r", prompt, SamplingParams(temperature=0, **params), frozenset([0]))  # type: ignore[arg-type]
    for token in output:
        one.append(token, 1000)
    return one


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        # logits [-1, 2, 1.5, 1.8, 0] after prompt [1] and output [3, 3]
        ({}, 1),
        ({"repetition_penalty": 1.5}, 2),
        ({"presence_penalty": 2.0}, 1),
        ({"frequency_penalty": -0.2}, 3),
        ({"presence_penalty": -0.3}, 3),
    ],
)
def test_penalties(params: dict[str, float], expected: int) -> None:
    logits = torch.tensor([[-1.0, 2.0, 1.5, 1.8, 0.0]])
    assert tokens(Sampler(), logits, [after([1], [3, 3], **params)]) == [expected]
    assert logits.tolist() == [[-1.0, 2.0, 1.5, pytest.approx(1.8), 0.0]]  # left as it was


def test_repetition_penalty_multiplies_negative_logits() -> None:
    logits = torch.tensor([[-1.0, -1.1, -3.0]])
    assert tokens(Sampler(), logits, [after([0], [], repetition_penalty=1.2)]) == [1]


def test_min_tokens_forbids_every_stop_token_until_then() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    for output, expected in (([], 2), ([2], 2), ([2, 2], 0)):
        one = after([1], output, min_tokens=2, stop_token_ids=[1])
        assert tokens(Sampler(), logits, [one]) == [expected]


@pytest.mark.parametrize("count", [0, 1, 3, 50])
def test_logprobs_are_the_models_own(count: int) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    want = torch.log_softmax(logits.double(), -1)[0]
    order = want.argsort(descending=True).tolist()
    one = request(logprobs=count, seed=2, temperature=3.0, top_k=20)
    sampled = Sampler().sample(logits, [one])[0]
    assert sampled.logprobs is not None and sampled.token is not None
    assert set(sampled.logprobs) == {sampled.token, *order[:count]}
    for token, entry in sampled.logprobs.items():
        assert entry.logprob == pytest.approx(float(want[token]), abs=1e-6)
        assert entry.rank == order.index(token) + 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("frequency_penalty", 2.1),
        ("presence_penalty", float("nan")),
        ("logprobs", -1),
        ("prompt_logprobs", True),
        ("stop", ["a", ""]),
        ("stop", ""),
        ("stop", 0),
        ("stop", [5]),
        ("stop_token_ids", 0),
        ("stop_token_ids", "5"),
        ("stop_token_ids", ["5"]),
        ("stop_token_ids", [True]),
        ("ignore_eos", "x"),
        ("include_stop_str_in_output", 1),
        ("skip_special_tokens", None),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("temperature", -1),
        ("temperature", 1e-9),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("seed", -1),
        ("temperature", "0"),
        ("temperature", None),
        ("top_p", "0.9"),
        ("min_p", True),
        ("repetition_penalty", None),
        ("presence_penalty", "1"),
    ],
)
def test_bad_parameters_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        request(**{field: value})
    assert caught.value.field == field and caught.value.given is value


def filtered(weights: np.ndarray, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The tokens that are left, by the definition: one loop over all of them, in float64."""
    order = sorted(range(len(weights)), key=lambda token: (-float(weights[token]), token))
    order = [token for token in order if weights[token] >= np.float32(min_p)]
    order = order[: top_k if top_k > 0 else None]
    whole, before, left = math.fsum(map(float, weights[order])), 0.0, []
    for token in order:
        if top_p < 1 and left and before >= top_p * whole:
            break
        left.append(token)
        before += float(weights[token])
    return left


@pytest.mark.parametrize("top_k", [0, 1, 3, 40, 2000])
@pytest.mark.parametrize("top_p", [1.0, 0.97, 0.5, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 1.0])
def test_filters_keep_what_their_definition_keeps(top_k: int, top_p: float, min_p: float) -> None:
    random = np.random.default_rng(top_k)
    for size in (1, 7, 1000):
        # Quarters, so that there are many ties and no sum depends on its order.
        weights = np.exp2(random.integers(-12, 0, size)).astype(np.float32)
        weights[random.integers(size)] = 1
        params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
        kept, tokens = _filter(weights, params)
        assert tokens.tolist() == filtered(weights, top_k, top_p, min_p)
        assert kept.tolist() == weights[tokens].tolist()


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(13, 301, generator=torch.Generator().manual_seed(1))
    logits[4, 2], logits[11, 0] = float("nan"), float("inf")
    kinds: list[dict[str, float]] = [{"temperature": 0}, {}, {"top_p": 0.9}, {"logprobs": 2}]

    def run() -> list[object]:
        sampler = Sampler(seed=3)
        mixed = [request(str(row), **kinds[row % 4]) for row in range(13)]
        greedy = [request(str(row), temperature=0) for row in range(13)]
        return [*sampler.sample(logits, mixed), *sampler.sample(logits, greedy)]

    alone = run()
    begun: list[str] = []
    pool = ThreadPoolExecutor(3, initializer=lambda: begun.append("a thread"))
    monkeypatch.setattr(sampler_module, "_LOGITS_WORTH_A_THREAD", 1)
    monkeypatch.setattr(sampler_module, "_threads", lambda: pool)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert run() == alone
    assert begun  # the rows really went to threads


def test_nothing_to_sample_gives_nothing() -> None:
    assert Sampler().sample(torch.zeros(0, 8), []) == []

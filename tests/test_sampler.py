"""Greedy, temperature and top-p sampling."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from ascend_kv.engine.request import Request, SamplingParams
from ascend_kv.engine.sampler import Sampler, _invert
from ascend_kv.errors import UsageError


def request(name: str = "r", **params: object) -> Request:
    return Request(name, [1], SamplingParams(**params))  # type: ignore[arg-type]


def draw_many(logits: torch.Tensor, count: int, **params: object) -> torch.Tensor:
    """Empirical distribution of ``count`` draws of one request."""
    sampler, one = Sampler(), request(seed=5, **params)
    drawn = torch.tensor([sampler.sample(logits[None], [one])[0] for _ in range(count)])
    return torch.bincount(drawn, minlength=logits.numel()) / count


def test_greedy_takes_the_first_of_the_best() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, -1.0, 0.5]])
    assert Sampler().sample(logits, [request(temperature=0)] * 2) == [1, 0]


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

    def tokens(company: int) -> list[int | None]:
        sampler = Sampler(seed=company)
        requests = [request(str(i)) for i in range(company)] + [request("mine", seed=11)]
        rows = [torch.cat([logits.flip(0)[:company], logits[step][None]]) for step in range(20)]
        return [sampler.sample(row, requests)[-1] for row in rows]

    assert tokens(0) == tokens(3) == tokens(7)
    assert len(set(tokens(0))) > 5


def test_requests_without_a_seed_differ_but_the_run_repeats() -> None:
    logits = torch.zeros(2, 1000)
    names = [request("a"), request("b")]
    first, again = Sampler(3), Sampler(3)
    tokens = [first.sample(logits, names) for _ in range(5)]
    assert tokens == [again.sample(logits, names) for _ in range(5)]
    assert [a for a, _ in tokens] != [b for _, b in tokens]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_p": 0.5}])
def test_a_row_that_is_not_finite_gives_no_token(bad: float, params: dict[str, float]) -> None:
    logits = torch.zeros(2, 8)
    logits[0, 3] = bad
    tokens = Sampler().sample(logits, [request("a", **params), request("b", **params)])
    assert tokens[0] is None and tokens[1] is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
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
    ],
)
def test_bad_parameters_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        request(**{field: value})
    assert caught.value.field == field and caught.value.given is value

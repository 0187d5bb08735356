"""The rotation of keys and queries: the matrix of the definition, and products that stay."""

from __future__ import annotations

import numpy as np
import oracle_formats
import pytest
import torch

from ascend_kv.formats.hadamard import rotate, rotate_back

EPS = float(np.finfo(np.float32).eps)


@pytest.mark.parametrize(("dim", "n"), [(8, 8), (16, 16), (128, 128), (80, 16), (96, 32), (40, 8)])
def test_it_is_the_matrix_in_runs_of_channels(dim: int, n: int) -> None:
    x = torch.randn(3, 5, dim)
    matrix = oracle_formats.hadamard(n)
    wanted = np.einsum("ij,tbrj->tbri", matrix, x.double().numpy().reshape(3, 5, dim // n, n))
    exponent = n.bit_length() - 1
    bound = n * EPS * np.abs(x.double().numpy()).max()
    for function, less in ((rotate, -(-exponent // 2)), (rotate_back, exponent // 2)):
        found = function(x)
        assert found.dtype == torch.float32 and found.shape == x.shape
        exact = wanted.reshape(3, 5, dim) * 2.0**-less
        assert np.abs(found.double().numpy() - exact).max() <= bound
        assert np.abs(exact).max() > 100 * bound


@pytest.mark.parametrize("dim", [8, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_stay(dim: int, dtype: torch.dtype) -> None:
    query, key = (torch.randn(50, dim).to(dtype) for _ in range(2))
    exact = (query.double() * key.double()).sum(-1)
    rotated = (rotate_back(query).double() * rotate(key).double()).sum(-1)
    size = query.double().norm(dim=-1) * key.double().norm(dim=-1)
    assert ((rotated - exact).abs() <= 8 * EPS * size).all()


def test_small_whole_numbers_are_exact() -> None:
    query, key = (torch.randint(-9, 10, (20, 64)).float() for _ in range(2))
    assert torch.equal(rotate_back(rotate(key)), key)
    assert torch.equal((rotate_back(query) * rotate(key)).sum(-1), (query * key).sum(-1))


def test_a_token_does_not_notice_the_others() -> None:
    x = torch.randn(33, 2, 128)
    together = rotate(x)
    for token in (0, 17, 32):
        assert torch.equal(rotate(x[token : token + 1]), together[token : token + 1])
    assert rotate(x[:0]).shape == (0, 2, 128)


def test_one_large_channel_is_spread() -> None:
    x = torch.zeros(1, 64)
    x[0, 13] = 8.0
    assert torch.equal(rotate(x).abs(), torch.ones(1, 64))

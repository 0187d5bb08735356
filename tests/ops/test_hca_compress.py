"""hca_compress against loops in float64, and against DeepSeek-V4 of transformers."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import oracle_more
import pytest
import torch
from compare import assert_as_good, assert_rounded, assert_within, largest

from ascend_kv import ops
from ascend_kv.errors import UsageError

LENGTHS = [9, 0, 4, 3, 17]


def table(rows: int, pairs: int) -> torch.Tensor:
    angles = torch.arange(rows)[:, None] * 0.3 ** torch.arange(pairs)
    return torch.stack((angles.cos(), angles.sin()), -1)


def draw(
    lengths: list[int] = LENGTHS,
    ratio: int = 4,
    dim: int = 20,
    *,
    overlap: bool = False,
    dtype: torch.dtype = torch.float32,
    first_windows: list[int] | None = None,
    finish: bool = True,
) -> dict[str, Any]:
    """The arguments of a call; what no window may read is NaN."""
    width = 2 * dim if overlap else dim
    kv, gate = (torch.randn(sum(lengths), width).to(dtype) * scale for scale in (1, 3))
    end = 0
    for length in lengths:
        end += length
        for x in (kv, gate):
            x[end - length % ratio : end] = math.nan
    arguments = {
        "kv": kv,
        "gate": gate,
        "lengths": lengths,
        "ratio": ratio,
        "overlap": overlap,
        "position_bias": torch.randn(ratio, width),
        "first_windows": first_windows,
    }
    if overlap and first_windows is not None:
        for name in ("previous_kv", "previous_gate"):
            x = torch.randn(len(lengths), ratio, dim).to(dtype)
            x[[number == 0 for number in first_windows]] = math.nan
            arguments[name] = x
    if finish:
        last = max(first_windows or [0]) + max(lengths) // ratio
        arguments["norm_weight"] = torch.randn(dim)
        arguments["rotary_table"], arguments["rotary_dim"] = table(ratio * last + 1, 3), 6
    return arguments


def truth(arguments: dict[str, Any], dtype: type = np.float64) -> np.ndarray:
    arrays = {
        name: x.double().numpy() if isinstance(x, torch.Tensor) else x
        for name, x in arguments.items()
    }
    return oracle_more.compress(**arrays, dtype=dtype)


def check(arguments: dict[str, Any]) -> None:
    entries = ops.hca_compress(**arguments)
    assert entries.dtype == torch.float32
    assert_as_good(entries, truth(arguments), truth(arguments, np.float32))


@pytest.mark.parametrize("ratio", [1, 2, 4, 7])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("first_windows", [None, [0, 5, 2, 0, 1]])
@pytest.mark.parametrize("finish", [False, True])
def test_windows(ratio: int, overlap: bool, first_windows: Any, finish: bool) -> None:
    check(draw(ratio=ratio, overlap=overlap, first_windows=first_windows, finish=finish))


@pytest.mark.parametrize(("lengths", "ratio", "overlap"), [([300], 128, False), ([41], 4, True)])
def test_deepseek_sizes(lengths: list[int], ratio: int, overlap: bool) -> None:
    check(draw(lengths, ratio, 72, overlap=overlap))


@pytest.mark.parametrize("part", ["position_bias", "norm_weight", "rotary_table"])
def test_every_part_may_be_left_out(part: str) -> None:
    arguments = draw(overlap=True, first_windows=[1, 0, 0, 0, 2])
    arguments[part] = None
    if part == "rotary_table":
        arguments["rotary_dim"] = 0
    check(arguments)


def test_without_gates_it_is_the_mean() -> None:
    arguments = draw([8], dim=5, finish=False)
    arguments |= {"gate": torch.zeros(8, 5), "position_bias": None}
    mean = arguments["kv"].view(2, 4, 5).mean(1)
    assert_within(ops.hca_compress(**arguments), mean, 2e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("result", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overlap", [False, True])
def test_types_round_once(dtype: torch.dtype, result: torch.dtype | None, overlap: bool) -> None:
    arguments = draw(dtype=dtype, overlap=overlap, first_windows=[0, 5, 2, 0, 1])
    entries = ops.hca_compress(**arguments, dtype=result)
    exact = truth(arguments)
    assert entries.dtype == (result or dtype)
    assert_rounded(entries, exact, slack=2e-6 * largest(exact))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tile_elements", [1, 250, 1 << 30])
def test_tiles_do_not_matter(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, tile_elements: int
) -> None:
    arguments = draw(overlap=overlap, first_windows=[0, 5, 2, 0, 1])
    whole = ops.hca_compress(**arguments)
    module = sys.modules["ascend_kv.ops.hca_compress"]  # the package's name is the operator
    monkeypatch.setattr(module, "TILE_ELEMENTS", tile_elements)
    assert torch.equal(ops.hca_compress(**arguments), whole)


@pytest.mark.parametrize("overlap", [False, True])
def test_cut_anywhere(overlap: bool) -> None:
    """State kept by the caller: one call, or many, give the same entries bit for bit."""
    ratio, dim, total = 4, 20, 30
    whole = draw([total], ratio, dim, overlap=overlap, finish=True)
    whole["kv"], whole["gate"] = (torch.randn_like(whole["kv"]) for _ in range(2))
    expected = ops.hca_compress(**whole)
    for cuts in ([30], [1] * 30, [7, 1, 9, 13], [2, 2, 26]):
        entries, done, kept = [], 0, 0
        fixed = {k: v for k, v in whole.items() if k not in ("kv", "gate", "lengths")}
        previous: dict[str, Any] = {}
        for cut in cuts:
            low, high = done - kept, done + cut
            kv, gate = (whole[name][low:high] for name in ("kv", "gate"))
            number = low // ratio
            options = {**fixed, "first_windows": [number], **previous}
            entries.append(ops.hca_compress(kv, gate, [high - low], **options))
            count = (high - low) // ratio
            if overlap and count:
                rows = slice((count - 1) * ratio, count * ratio)
                previous["previous_kv"] = kv[None, rows, :dim]
                previous["previous_gate"] = gate[None, rows, :dim]
            done, kept = high, (high - low) % ratio
        assert torch.equal(torch.cat(entries), expected)


def test_extreme_gates() -> None:
    arguments = draw([24], dim=8, finish=False)
    gate = arguments["gate"]
    gate[0:4] *= 1e30  # one token takes all
    gate[4:8] = 3e38
    gate[8:12, ::2] = -math.inf
    gate[9] = -3e38
    arguments["kv"][12:16] *= 1e-38
    arguments["kv"][16:20] *= 3e37
    arguments["position_bias"] = None
    check(arguments)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_not_a_number_stays_visible(overlap: bool) -> None:
    arguments = draw([12], dim=6, overlap=overlap, finish=False)
    arguments["position_bias"] = None
    own = 6 if overlap else 0
    arguments["gate"][4:8, own + 1] = -math.inf  # with overlap the window before still counts
    arguments["gate"][9, own + 2] = math.nan
    arguments["kv"][10, own + 3] = math.inf
    arguments["kv"][0, own + 4] = math.nan
    entries = ops.hca_compress(**arguments)
    exact = truth(arguments)
    assert_within(entries, exact, 1e-5)
    assert np.isnan(exact).sum() == (2 if overlap else 3) and np.isinf(exact).sum() == 1


@pytest.mark.parametrize("lengths", [[], [0], [3, 2]])
@pytest.mark.parametrize("overlap", [False, True])
def test_no_full_window(lengths: list[int], overlap: bool) -> None:
    arguments = draw(lengths, overlap=overlap) if lengths else draw([4], overlap=overlap)
    if not lengths:
        arguments |= {"kv": arguments["kv"][:0], "gate": arguments["gate"][:0], "lengths": []}
    assert ops.hca_compress(**arguments, dtype=torch.float16).shape == (0, 20)


def test_a_window_longer_than_any_sequence() -> None:
    kv = torch.randn(8, 20)
    assert ops.hca_compress(kv, kv, [8], 1 << 62).shape == (0, 20)


def test_strided_input() -> None:
    arguments = draw(overlap=True, first_windows=[0, 5, 2, 0, 1])
    expected = ops.hca_compress(**arguments)
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor):
            arguments[name] = torch.stack((x, x), -1)[..., 0]
            assert not arguments[name].is_contiguous()
    assert torch.equal(ops.hca_compress(**arguments), expected)


@pytest.fixture(scope="module")
def deepseek() -> Any:
    """A small configuration with both kinds of compressor."""
    config_module = pytest.importorskip("transformers.models.deepseek_v4.configuration_deepseek_v4")
    return config_module.DeepseekV4Config(
        hidden_size=32,
        head_dim=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        index_n_heads=2,
        index_head_dim=16,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        compress_rates={"heavily_compressed_attention": 8, "compressed_sparse_attention": 4},
        max_position_embeddings=64,
    )


def compressor(kind: str, config: Any) -> Any:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    torch.manual_seed(0)
    module = getattr(modeling, f"DeepseekV4{kind}Compressor")(config)
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, std=0.5 if "proj" in name else 1.0)
    return module.eval()


def entries_of(module: Any, hidden: torch.Tensor, overlap: bool, **options: Any) -> torch.Tensor:
    """Our entries from the module's weights."""
    positions = torch.arange(64)[None]
    cosine, sine = module.rotary_emb(hidden, position_ids=positions, layer_type="compress")
    return ops.hca_compress(
        module.kv_proj(hidden)[0],
        module.gate_proj(hidden)[0],
        [hidden.shape[1]],
        module.compress_rate,
        position_bias=module.position_bias,
        overlap=overlap,
        norm_weight=module.kv_norm.weight,
        norm_eps=module.kv_norm.variance_epsilon,
        rotary_table=torch.stack((cosine[0], sine[0]), -1),
        rotary_dim=2 * cosine.shape[-1],
        **options,
    )


@pytest.mark.parametrize(("kind", "overlap"), [("HCA", False), ("CSA", True)])
@pytest.mark.parametrize("tokens", [3, 8, 29])
def test_equals_transformers(deepseek: Any, kind: str, overlap: bool, tokens: int) -> None:
    module = compressor(kind, deepseek)
    hidden, residual = torch.randn(1, tokens, 32), torch.randn(1, tokens, 8)
    with torch.no_grad():
        theirs, _ = module(hidden, residual, torch.arange(tokens)[None], None, 0)
        ours = entries_of(module, hidden, overlap)
    assert ours.shape[0] == tokens // module.compress_rate
    assert_within(ours, theirs[0, 0], 2e-6)


@pytest.mark.parametrize("tokens", [4, 29])
def test_equals_transformers_indexer_keys(deepseek: Any, tokens: int) -> None:
    """The indexer's keys are compressed alike; seen through the cache it leaves them in."""
    from transformers.cache_utils import DynamicCache

    indexer = compressor("CSA", deepseek).indexer
    cache = DynamicCache(config=deepseek)
    hidden, residual = torch.randn(1, tokens, 32), torch.randn(1, tokens, 8)
    with torch.no_grad():
        indexer(hidden, residual, torch.arange(tokens)[None], cache, 1)
        ours = entries_of(indexer, hidden, True)
    assert_within(ours, cache.layers[1].compressed_kv["indexer"][0], 2e-6)


@pytest.mark.parametrize(("kind", "layer"), [("HCA", 0), ("CSA", 1)])
def test_equals_transformers_token_by_token(deepseek: Any, kind: str, layer: int) -> None:
    """Their cached state, fed in uneven chunks, against one call of ours."""
    from transformers.cache_utils import DynamicCache

    module, cache = compressor(kind, deepseek), DynamicCache(config=deepseek)
    hidden, residual = torch.randn(1, 29, 32), torch.randn(1, 29, 8)
    with torch.no_grad():
        for low, high in ((0, 10), (10, 11), (11, 24), (24, 29)):
            places = torch.arange(low, high)[None]
            module(hidden[:, low:high], residual[:, low:high], places, cache, layer)
        ours = entries_of(module, hidden, kind == "CSA")
    assert_within(ours, cache.layers[layer].compressed_kv["compressor"][0], 2e-6)
    assert len(ours) == 29 // module.compress_rate


def test_opcheck(opcheck: Any) -> None:
    for overlap in (False, True):
        for first_windows in (None, [0, 5, 2, 0, 1]):
            arguments = draw(dim=4, overlap=overlap, first_windows=first_windows, finish=False)
            arguments |= {"norm_weight": torch.randn(4), "rotary_table": table(50, 1)}
            arguments |= {"rotary_dim": 2, "dtype": torch.bfloat16}
            for name in ("kv", "gate"):
                arguments[name] = arguments[name].nan_to_num()
            if "previous_kv" in arguments:
                arguments["previous_kv"] = arguments["previous_kv"].nan_to_num()
            values = [arguments.pop(name) for name in ("kv", "gate", "lengths", "ratio")]
            opcheck("hca_compress", *values, **arguments)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("kv", {"kv": torch.randn(8, 5, 1)}),
        ("kv", {"kv": torch.randn(8, 5)}),
        ("kv", {"kv": torch.zeros(8, 12, dtype=torch.int8)}),
        ("gate", {"gate": torch.randn(8, 6)}),
        ("gate", {"gate": torch.randn(8, 12).half()}),
        ("lengths", {"lengths": [4, 3]}),
        ("lengths", {"lengths": [9, -1]}),
        ("ratio", {"ratio": 0}),
        ("position_bias", {"position_bias": torch.randn(4, 6)}),
        ("norm_weight", {"norm_weight": torch.randn(12)}),
        ("norm_weight", {"norm_weight": torch.zeros(6, dtype=torch.int32)}),
        ("first_windows", {"first_windows": [0]}),
        ("first_windows", {"first_windows": [0, -1]}),
        ("previous_kv", {"previous_kv": None, "previous_gate": None}),
        ("previous_gate", {"previous_gate": None, "first_windows": None}),
        ("previous_gate", {"previous_gate": torch.randn(2, 3, 6)}),
        ("previous_kv", {"previous_kv": torch.randn(2, 4, 6).half()}),
        ("previous_kv", {"overlap": False}),
        ("rotary_dim", {"rotary_dim": 3}),
        ("rotary_dim", {"rotary_dim": 8}),
        ("rotary_table", {"rotary_dim": 4}),
        ("rotary_table", {"rotary_dim": 4, "rotary_table": torch.randn(8, 2, 2)}),
        ("rotary_table", {"rotary_dim": 4, "rotary_table": torch.randn(9, 4, 2)}),
        ("rotary_table", {"rotary_table": torch.randn(9, 2, 2)}),
        ("dtype", {"dtype": torch.int8}),
    ],
)
def test_mistakes_name_the_argument(field: str, change: dict[str, Any]) -> None:
    legal = {
        "kv": torch.randn(8, 12),
        "gate": torch.randn(8, 12),
        "lengths": [4, 4],
        "ratio": 4,
        "overlap": True,
        "first_windows": [0, 2],
        "previous_kv": torch.randn(2, 4, 6),
        "previous_gate": torch.randn(2, 4, 6),
    }
    ops.hca_compress(**legal)
    ops.hca_compress(**legal, rotary_dim=4, rotary_table=torch.randn(9, 2, 2))
    with pytest.raises(UsageError) as error:
        ops.hca_compress(**{**legal, **change})
    assert error.value.field == field

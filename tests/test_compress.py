"""HCACompressor and CSACompressor: loops in float64, transformers' DeepSeek-V4, cuts anywhere."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle_more
import pytest
import torch
from compare import assert_as_good, assert_rounded, assert_within, largest
from safetensors.torch import save_file

import ascend_kv
from ascend_kv import CSACompressor, HCACompressor
from ascend_kv.compress.hca import level_ratios
from ascend_kv.errors import UsageError

Tensor = torch.Tensor
B, H, D, PAIRS = 2, 3, 20, 3
FREQUENCIES = 0.3 ** torch.arange(PAIRS, dtype=torch.float32)


def weights(ratios: tuple[int, ...], dim: int = D, series: int = 1) -> dict[str, Tensor]:
    """Learned weights of all kinds for both sides."""
    made = {}
    for side in ("key", "value"):
        made[f"{side}.norm"] = torch.randn(dim)
        for number, ratio in enumerate(ratios):
            made[f"{side}.levels.{number}.gate"] = torch.randn(series * dim, dim) / 3
            made[f"{side}.levels.{number}.position_bias"] = torch.randn(ratio, series * dim)
    return made


def rotary_rows(rows: int) -> np.ndarray:
    angles = (torch.arange(rows)[:, None].float() * FREQUENCIES).double()
    return torch.stack((angles.cos(), angles.sin()), -1).numpy()


def truth(
    x: Tensor,
    ratios: tuple[int, ...],
    given: dict[str, Tensor],
    side: str,
    dtype: type = np.float64,
) -> np.ndarray:
    """The oracle, level after level, without rotation: ``[B, H, entries, D]``."""
    out = []
    for sequence in x.double().flatten(0, 1).numpy().astype(dtype):
        rows = sequence
        for number, ratio in enumerate(ratios):
            names = {"gate": None, "position_bias": None}
            for name in names:
                tensor = given.get(f"{side}.levels.{number}.{name}")
                names[name] = None if tensor is None else tensor.double().numpy().astype(dtype)
            gate = rows * 0 if names["gate"] is None else rows @ names["gate"].T
            norm = given.get(f"{side}.norm") if number == len(ratios) - 1 else None
            rows = oracle_more.compress(
                rows,
                gate,
                [len(rows)],
                ratio,
                position_bias=names["position_bias"],
                norm_weight=None if norm is None else norm.double().numpy(),
                dtype=dtype,
            )
        out.append(rows)
    return np.stack(out).reshape(*x.shape[:2], -1, x.shape[3])


def turned(entries: np.ndarray, ratio: int, interleaved: bool) -> np.ndarray:
    """Entries with their last channels turned, pair by pair."""
    rows, out = rotary_rows(ratio * entries.shape[2] + 1), entries.copy()
    for index in np.ndindex(entries.shape[:3]):
        for pair in range(PAIRS):
            cosine, sine = rows[ratio * index[2], pair]
            first = D - 2 * PAIRS + (2 * pair if interleaved else pair)
            second = first + (1 if interleaved else PAIRS)
            a, b = entries[(*index, first)], entries[(*index, second)]
            out[(*index, first)] = a * cosine - b * sine
            out[(*index, second)] = b * cosine + a * sine
    return out


@pytest.mark.parametrize(
    ("ratio", "levels", "expected"),
    [(128, 3, (8, 4, 4)), (128, 1, (128,)), (128, 7, (2,) * 7), (12, 2, (4, 3)), (7, 1, (7,))],
)
def test_levels_multiply_to_the_ratio(ratio: int, levels: int, expected: tuple[int, ...]) -> None:
    assert level_ratios(ratio, levels) == expected
    compressor = HCACompressor(ratio, levels)
    assert compressor.level_ratios == expected
    assert (compressor.compression_ratio, compressor.num_levels) == (ratio, levels)


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("tokens", [0, 7, 8, 45])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("interleaved", [True, False])
def test_hca_is_what_the_formula_says(
    levels: int, tokens: int, learned: bool, interleaved: bool
) -> None:
    ratios = level_ratios(8, levels)
    given = weights(ratios) if learned else {}
    k, v = torch.randn(B, H, tokens, D), torch.randn(B, H, tokens, D)
    compressor = HCACompressor(
        8, levels, weights=given, inverse_frequencies=FREQUENCIES, interleaved=interleaved
    )
    k_c, v_c = compressor.compress(k, v)
    kept = tokens // 8 * 8
    for entries, x, side in ((k_c, k, "key"), (v_c, v, "value")):
        exact, baseline = (
            truth(x[:, :, :kept], ratios, given, side, dtype) for dtype in (np.float64, np.float32)
        )
        if side == "key":
            exact, baseline = (turned(e, 8, interleaved) for e in (exact, baseline))
        assert entries.shape == (B, H, tokens // 8, D)
        assert_as_good(entries, exact, baseline, 4, 8)
    assert torch.equal(compressor.remainder.k, k[:, :, kept:])
    assert torch.equal(compressor.remainder.v, v[:, :, kept:])


def test_without_weights_levels_do_not_matter_and_an_entry_is_the_mean() -> None:
    k, v = torch.randn(1, 2, 256, 6), torch.randn(1, 2, 256, 5)
    for levels in (1, 2, 3):
        k_c, v_c = HCACompressor(128, levels).compress(k, v)
        assert_within(k_c, k.unflatten(2, (2, 128)).double().mean(3), 1e-7)
        assert_within(v_c, v.unflatten(2, (2, 128)).double().mean(3), 1e-7)


@pytest.mark.parametrize("two_vectors", [False, True])
def test_csa_is_what_the_formula_says(two_vectors: bool) -> None:
    tokens, dim = 22, D // 2 if two_vectors else D
    given = weights((4,), dim, series=2)
    if two_vectors:
        for side in ("key", "value"):
            given[f"{side}.levels.0.gate"] = torch.randn(2 * dim, 2 * dim) / 3
    k, v = torch.randn(B, H, tokens, D), torch.randn(B, H, tokens, D)
    k_c, v_c = CSACompressor(two_vectors=two_vectors, weights=given).compress(k, v)
    for entries, x, side in ((k_c, k, "key"), (v_c, v, "value")):
        rows = x.double().flatten(0, 1)
        gate = rows @ given[f"{side}.levels.0.gate"].double().T
        kv = rows if two_vectors else torch.cat((rows, rows), 2)
        shared = {
            "lengths": [tokens] * (B * H),
            "ratio": 4,
            "overlap": True,
            "position_bias": given[f"{side}.levels.0.position_bias"].double().numpy(),
            "norm_weight": given[f"{side}.norm"].double().numpy(),
        }
        flat = kv.flatten(0, 1).numpy(), gate.flatten(0, 1).numpy()
        exact = oracle_more.compress(*flat, **shared, dtype=np.float64)
        baseline = oracle_more.compress(*flat, **shared, dtype=np.float32)
        assert entries.shape == (B, H, 5, dim)
        assert_as_good(entries.reshape(-1, dim), exact, baseline, 4, 8)


MADE: dict[str, Callable[[], Any]] = {
    "uniform": lambda: HCACompressor(8, 3),
    "learned": lambda: HCACompressor(8, 2, weights=weights((4, 2))),
    "turned": lambda: HCACompressor(8, 1, inverse_frequencies=FREQUENCIES, interleaved=False),
    "csa": lambda: CSACompressor(inverse_frequencies=FREQUENCIES),
    "csa learned": lambda: CSACompressor(weights=weights((4,), series=2)),
    "csa two vectors": lambda: CSACompressor(two_vectors=True),
    "csa of single tokens": lambda: CSACompressor(1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "gates"),
    [
        (kind, gates)
        for kind in MADE
        for gates in (False, True)
        if not (gates and "learned" in kind)
    ],
)
def test_streaming_is_one_shot_to_the_bit(kind: str, dtype: torch.dtype, gates: bool) -> None:
    compressor, total = MADE[kind](), 61
    k, v = (torch.randn(B, H, total, D).to(dtype) for _ in range(2))
    options: dict[str, Tensor] = {}
    if gates:
        width = 2 * D if kind.startswith("csa") and "two" not in kind else D
        options = {f"{side}_gate": torch.randn(B, H, total, width) for side in "kv"}
    whole = compressor.compress(k, v, **options)
    rest = compressor.remainder
    assert whole.k.dtype == dtype
    for cuts in ([1] * total, [7, 0, 9, 1, 44], [60, 1]):
        parts, done = [], 0
        compressor.reset()
        for cut in cuts:
            piece = slice(done, done + cut)
            given = {name: x[:, :, piece] for name, x in options.items()}
            parts.append(compressor.append(k[:, :, piece], v[:, :, piece], **given))
            done += cut
            assert compressor.num_tokens == done
        for side in (0, 1):
            assert torch.equal(torch.cat([part[side] for part in parts], 2), whole[side])
            assert torch.equal(compressor.remainder[side], rest[side])


@pytest.mark.parametrize("kind", MADE)
def test_pieces_of_work_do_not_matter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compressor = MADE[kind]()
    k, v = torch.randn(B, H, 61, D), torch.randn(B, H, 61, D)
    whole = compressor.compress(k, v)
    monkeypatch.setattr("ascend_kv.compress.pooling._PIECE_ELEMENTS", 2000)
    for a, b in zip(compressor.compress(k, v), whole, strict=True):
        assert torch.equal(a, b)


def test_compress_begins_anew_and_a_refusal_keeps_what_is_held() -> None:
    compressor = HCACompressor(8, 1)
    k, v = torch.randn(1, 1, 13, 4), torch.randn(1, 1, 13, 4)
    compressor.compress(k, v)
    with pytest.raises(UsageError):
        compressor.compress(k, v[:, :, 1:])
    assert torch.equal(compressor.remainder.k, k[:, :, 8:])
    expected = compressor.compress(k, v)
    assert torch.equal(expected.k, compressor.compress(k, v).k)
    assert compressor.num_tokens == 13


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_entries_are_rounded_once(dtype: torch.dtype) -> None:
    k = torch.randn(1, 2, 64, D).to(dtype)
    given = weights((4, 2))
    entries = HCACompressor(8, 2, weights=given).compress(k, k).k
    exact = truth(k, (4, 2), given, "key")
    assert_rounded(entries, exact, slack=4e-6 * largest(exact))


def test_decompress_gives_every_token_its_entry() -> None:
    k, v = torch.randn(B, H, 21, D), torch.randn(B, H, 21, 5)
    compressor = HCACompressor(8, 2)
    k_c, v_c = compressor.compress(k, v)
    again = compressor.decompress(k_c, v_c)
    assert again.k.shape == (B, H, 16, D) and again.v.shape == (B, H, 16, 5)
    for token in range(16):
        assert torch.equal(again.k[:, :, token], k_c[:, :, token // 8])
        assert torch.equal(again.v[:, :, token], v_c[:, :, token // 8])
    csa = CSACompressor()
    k_c, v_c = csa.compress(k, v)
    assert torch.equal(csa.decompress(k_c, v_c).k[:, :, 19], k_c[:, :, 4])


def test_the_error_of_decompress_is_what_its_docstring_says() -> None:
    compressor = HCACompressor()
    k = torch.randn(1, 4, 128 * 64, 32)
    again = compressor.decompress(*compressor.compress(k, k))
    error = (again.k - k).square().mean().sqrt() / k.square().mean().sqrt()
    assert error == pytest.approx(math.sqrt(1 - 1 / 128), rel=0.005)
    alike = k[:, :, :1].expand(1, 4, 256, 32)
    assert_within(compressor.decompress(*compressor.compress(alike, alike)).k, alike, 1e-6)


def test_weights_from_a_file(tmp_path: Path) -> None:
    given = weights((4, 2))
    save_file(given, tmp_path / "weights.safetensors")
    k = torch.randn(1, 2, 16, D)
    expected = HCACompressor(8, 2, weights=given).compress(k, k)
    for source in (tmp_path / "weights.safetensors", str(tmp_path / "weights.safetensors")):
        assert torch.equal(HCACompressor(8, 2, weights=source).compress(k, k).k, expected.k)


@pytest.fixture(scope="module")
def deepseek() -> Any:
    config_module = pytest.importorskip("transformers.models.deepseek_v4.configuration_deepseek_v4")
    return config_module.DeepseekV4Config(
        hidden_size=32,
        head_dim=24,
        num_attention_heads=2,
        num_hidden_layers=2,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        index_n_heads=2,
        index_head_dim=16,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        max_position_embeddings=512,
    )


@pytest.mark.parametrize(("kind", "ratio"), [("HCA", 128), ("CSA", 4)])
def test_one_learned_level_is_deepseek_v4s(deepseek: Any, kind: str, ratio: int) -> None:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    module = getattr(modeling, f"DeepseekV4{kind}Compressor")(deepseek).eval()
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, std=0.5 if "proj" in name else 1.0)
    learned = {
        "key.levels.0.position_bias": module.position_bias,
        "key.norm": module.kv_norm.weight,
    }
    options = {
        "weights": learned,
        "norm_eps": module.kv_norm.variance_epsilon,
        "inverse_frequencies": module.rotary_emb.compress_inv_freq,
    }
    hidden, residual = torch.randn(1, 300, 32), torch.randn(1, 300, 8)
    compressor: Any = CSACompressor(ratio, two_vectors=True, **options)
    if kind == "HCA":
        compressor = HCACompressor(ratio, 1, **options)
    with torch.no_grad():
        theirs, _ = module(hidden, residual, torch.arange(300)[None], None, 0)
        kv, gate = module.kv_proj(hidden)[:, None], module.gate_proj(hidden)[:, None]
        ours = compressor.compress(kv, kv, k_gate=gate, v_gate=gate)
    assert ours.k.shape[2] == 300 // ratio
    assert_within(ours.k, theirs, 4e-6)


STREAM = """
import resource, sys, torch
from ascend_kv import HCACompressor, CSACompressor
torch.set_num_threads(1)
compressor = {made}
piece = torch.arange(4096 * 128).view(1, 1, 4096, 128).remainder(977).to(torch.bfloat16)
compressor.compress(piece, piece)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
entries = 0
for number in range(255):
    k_c, v_c = compressor.append(piece + number, piece - number)
    entries += k_c.shape[2]
    assert compressor.state_bytes <= 2 * 2 * {ratio} * 2 * 128 * 2, compressor.state_bytes
print(compressor.num_tokens, entries, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
@pytest.mark.parametrize(("made", "ratio"), [("HCACompressor()", 128), ("CSACompressor(128)", 128)])
def test_a_million_tokens_stream_in_bounded_memory(made: str, ratio: int) -> None:
    """512 MiB of keys and values pass; what grows beside the entries is next to nothing."""
    code = STREAM.format(made=made, ratio=ratio)
    root = Path(ascend_kv.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    tokens, entries, grown_kib = map(int, done.stdout.split())
    assert tokens == 2**20 and entries == 255 * 4096 // ratio
    assert grown_kib < 32 * 1024


K = torch.randn(1, 2, 9, 6)
MISTAKES: dict[str, tuple[str, Callable[[], object]]] = {
    "ratio": ("compression_ratio", lambda: HCACompressor(1)),
    "ratio of CSA": ("compression_ratio", lambda: CSACompressor(0)),
    "no number": ("compression_ratio", lambda: HCACompressor("128")),  # type: ignore[arg-type]
    "levels": ("num_levels", lambda: HCACompressor(128, 8)),
    "no level": ("num_levels", lambda: HCACompressor(128, 0)),
    "two vectors": ("two_vectors", lambda: CSACompressor(two_vectors=1)),  # type: ignore[arg-type]
    "interleaved": ("interleaved", lambda: HCACompressor(interleaved=1)),  # type: ignore[arg-type]
    "frequencies": (
        "inverse_frequencies",
        lambda: HCACompressor(inverse_frequencies=torch.ones(2, 2)),
    ),
    "too many pairs": (
        "inverse_frequencies",
        lambda: HCACompressor(inverse_frequencies=torch.ones(4)).compress(K, K),
    ),
    "no file": ("weights", lambda: HCACompressor(weights="nowhere.safetensors")),
    "name": ("weights", lambda: HCACompressor(weights={"keys.norm": torch.ones(6)})),
    "level": (
        "weights",
        lambda: HCACompressor(8, 1, weights={"key.levels.1.gate": torch.ones(6, 6)}),
    ),
    "kind": ("weights: key.norm", lambda: HCACompressor(weights={"key.norm": torch.ones(6).int()})),
    "shape": (
        "weights: value.norm",
        lambda: HCACompressor(weights={"value.norm": torch.ones(5)}).compress(K, K),
    ),
    "shape of a gate": (
        "weights: key.levels.0.gate",
        lambda: CSACompressor(weights={"key.levels.0.gate": torch.ones(6, 6)}).compress(K, K),
    ),
    "shape of a bias": (
        "weights: key.levels.1.position_bias",
        lambda: HCACompressor(
            8, 2, weights={"key.levels.1.position_bias": torch.ones(4, 6)}
        ).compress(K, K),
    ),
    "k": ("k", lambda: HCACompressor().compress(K[0], K[0])),
    "v": ("v", lambda: HCACompressor().compress(K, K[:, :, 1:])),
    "type": ("k", lambda: HCACompressor().compress(K.int(), K)),
    "odd": ("k", lambda: CSACompressor(two_vectors=True).compress(K[..., 1:], K[..., 1:])),
    "gate": ("k_gate", lambda: CSACompressor().compress(K, K, k_gate=K)),
    "two gates": (
        "v_gate",
        lambda: HCACompressor(8, 1, weights={"value.levels.0.gate": torch.ones(6, 6)}).compress(
            K, K, v_gate=K
        ),
    ),
    "remainder": ("remainder", lambda: HCACompressor().remainder),
    "k_c": ("k_c", lambda: HCACompressor().decompress(K[0], K)),
    "v_c": ("v_c", lambda: HCACompressor().decompress(K, K[:, :, 1:])),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_name_the_argument(mistake: str) -> None:
    field, call = MISTAKES[mistake]
    with pytest.raises(UsageError) as error:
        call()
    assert error.value.field == field


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("k", lambda k, v, g: (k[:, :1], v[:, :1], g[:, :1])),
        ("k", lambda k, v, g: (k.half(), v, g)),
        ("v", lambda k, v, g: (k, v[..., 1:], g)),
        ("k_gate", lambda k, v, g: (k, v, None)),
        ("k_gate", lambda k, v, g: (k, v, g.half())),
    ],
)
def test_what_is_appended_must_go_on(field: str, change: Callable[..., Any]) -> None:
    compressor = HCACompressor(8, 1)
    compressor.append(K, K, k_gate=K)
    k, v, gate = change(K, K, K)
    with pytest.raises(UsageError) as error:
        compressor.append(k, v, k_gate=gate)
    assert error.value.field == field
    assert compressor.num_tokens == 9

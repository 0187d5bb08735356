"""The twin's moves, reductions, counters and launcher.

The kernels are those of op_kernels/twin/tests/values.cpp.
"""

from __future__ import annotations

import shlex
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from test_twin_values import TWIN, VALUES, library, run, twin

pytestmark = pytest.mark.skipif(
    twin.find_compiler() is None, reason="no C++ compiler for the twin (g++ or clang++)"
)


def tree_sum(x: np.ndarray) -> np.ndarray:
    """Neighbours, then neighbouring sums, in the array's own type."""
    while len(x) > 1:
        x = x[0::2] + x[1::2]
    return x[0]


@pytest.mark.parametrize("kind", ["half", "float"])
def test_reductions(kind: str) -> None:
    dtype, lanes, block = (np.float16, 128, 16) if kind == "half" else (np.float32, 64, 8)
    index = np.uint16 if kind == "half" else np.uint32
    x = np.random.default_rng(1).integers(-40, 40, 4 * lanes).astype(dtype) / dtype(7)
    rows, blocks = x.reshape(4, lanes), x.reshape(-1, block)

    def reduced(mode: int, number: int, dtype_of_result: type = dtype) -> np.ndarray:
        z = np.zeros(number, dtype_of_result)
        run(f"reductions_{kind}", x, None, z, len(x), mode)
        return z

    pairs = reduced(0, 8).reshape(4, 2)
    np.testing.assert_array_equal(pairs[:, 0], rows.max(1))
    np.testing.assert_array_equal(
        pairs[:, 1].copy().view(index), rows.argmax(1)
    )  # ties: the smallest index
    pairs = reduced(1, 8).reshape(4, 2)
    np.testing.assert_array_equal(pairs[:, 1], rows.min(1))
    np.testing.assert_array_equal(pairs[:, 0].copy().view(index), rows.argmin(1))
    np.testing.assert_array_equal(reduced(2, 4), rows.max(1))
    np.testing.assert_array_equal(reduced(3, 4), [tree_sum(row) for row in rows])
    np.testing.assert_array_equal(reduced(4, 32), blocks.max(1))
    np.testing.assert_array_equal(reduced(5, 32), [tree_sum(b) for b in blocks])
    np.testing.assert_array_equal(reduced(6, 2 * lanes), x[0::2] + x[1::2])
    np.testing.assert_array_equal(reduced(10, 32), blocks.min(1))
    for mode, best in ((7, int(x.argmax())), (8, int(x.argmin()))):
        value, bits = reduced(mode, 2)
        assert value == x[best] and np.array([bits]).view(index)[0] == best
    total = dtype(0)
    for number, row in enumerate(rows):  # the repeats one after another
        total = tree_sum(row) if number == 0 else total + tree_sum(row)
    assert reduced(9, 1)[0] == total
    if kind == "float":
        np.testing.assert_array_equal(reduced(11, 4).view(np.uint32), rows.argmin(1))


def moved(x: np.ndarray, y: np.ndarray, mode: int) -> tuple[np.ndarray, int]:
    z = np.zeros(2049, np.float32)
    run("movements", x, y, z, len(x), mode)
    return z[:2048], int(z[2048])


def test_movements() -> None:
    random = np.random.default_rng(5)
    x, y = random.standard_normal((2, 192)).astype(np.float32)
    n = len(x)
    np.testing.assert_array_equal(moved(x, y, 0)[0][: 8 * n], np.repeat(x, 8))
    places = random.integers(0, n - 1, n).astype(np.uint32)
    np.testing.assert_array_equal(moved(x, (places * 4).view(np.float32), 1)[0][:n], x[places + 1])
    z, kept = moved(x, y, 2)
    assert kept == n // 2
    np.testing.assert_array_equal(z[:kept], x[1::2])
    z, kept = moved(x, y, 3)
    assert kept == n // 4
    np.testing.assert_array_equal(z[:kept], x[2::4])
    np.testing.assert_array_equal(moved(x, y, 4)[0][:n], np.arange(n) + 3)
    np.testing.assert_array_equal(moved(x, y, 5)[0][:n], np.where(x >= 0.25, x, -1))
    mask = np.tile((x < y)[:64], 3)  # this mode takes the same bits in every repeat
    np.testing.assert_array_equal(moved(x, y, 6)[0][:n], np.where(mask, x, y))
    z = moved(x, y, 7)[0]
    np.testing.assert_array_equal(z[8:32], x[:24])
    np.testing.assert_array_equal(z[48:72], x[32:56])
    assert not z[32:48].any()
    z = moved(x, y, 8)[0]
    for repeat in range(3):
        np.testing.assert_array_equal(
            z[repeat * 128 : repeat * 128 + 8], x[repeat * 64 : repeat * 64 + 8] + 1
        )
    np.testing.assert_array_equal(moved(x, y, 9)[0][:n], x * y)
    np.testing.assert_array_equal(moved(x, y, 10)[0][:n], x * np.float32(2.5))


def test_cores_meet_in_any_order() -> None:
    x = np.arange(8, dtype=np.float32)
    orders = set()
    for seed in range(6):
        total, z = np.zeros(8, np.float32), np.zeros((5, 8), np.float32)
        result = library().launch(
            "sum_over_cores", 5, twin.inp(x), twin.out(total), twin.out(z), 8, 0, seed=seed
        )
        np.testing.assert_array_equal(z, np.tile(x * 15, (5, 1)))
        assert sorted(result.order) == list(range(5)) and len(result.cores) == 5
        orders.add(tuple(result.order))
    assert len(orders) > 2
    again = library().launch(
        "sum_over_cores", 5, twin.inp(x), twin.out(total), twin.out(z), 8, 0, seed=5
    )
    assert again.order == result.order


@pytest.mark.parametrize(("length", "gap"), [(32, 0), (20, 12), (33, 7), (64, 100)])
def test_traffic_is_counted_in_bytes_and_sectors(length: int, gap: int) -> None:
    x, z = (
        torch.randint(-99, 99, (3 * 4096,), dtype=torch.int8),
        torch.zeros(3 * 4096, dtype=torch.int8),
    )
    result = library().launch("rows", 3, twin.inp(x), None, twin.out(z), length, gap)
    sectors = sum(
        (r + length - 1) // 32 - r // 32 + 1 for r in range(0, 10 * (length + gap), length + gap)
    )
    for core in result.cores:
        assert (core["read_bytes"], core["read_bursts"]) == (10 * length, 10)
        assert core["read_sectors"] == core["write_sectors"] == sectors
        assert core["mte2_instructions"] == core["mte3_instructions"] == 1
        assert core["vector_instructions"] == 0 and core["ub_high_water"] == 32768
    assert result.total["write_bytes"] == 30 * length and result.total["ub_high_water"] == 32768
    assert result.mean_write_burst == result.mean_read_burst == length
    expected = torch.zeros_like(z)
    for start in range(0, 3 * 4096, 4096):
        for at in range(start, start + 10 * (length + gap), length + gap):
            expected[at : at + length] = x[at : at + length]
            if length % 32:  # then the kernel puts one byte before each row
                expected[at + 1 : at + length] = x[at : at + length - 1]
                expected[at] = 7
    assert torch.equal(z, expected)


def test_vector_work_is_counted() -> None:
    x, z = np.ones(1000, np.float32), np.zeros(1000, np.float32)
    counted = run("arithmetic_float", x, x, z, 1000, 0).cores[0]
    assert (counted["vector_instructions"], counted["vector_repeats"]) == (1, 16)
    assert counted["scalar_instructions"] == 1  # the GetValue
    assert counted["ub_high_water"] == 4 * 32768


def test_tensors_beyond_two_gigabytes() -> None:
    x, z = np.empty(2100 << 20, np.int8), np.zeros(1, np.int8)  # untouched pages cost nothing
    x[-1] = 42
    run("last_of_many", x, None, z, 2100)
    assert z[0] == 42
    with pytest.raises(twin.Violation, match="gm-bounds"):
        run("last_of_many", x[:-1], None, z, 2100)


def test_arguments_of_every_kind() -> None:
    z, words = np.zeros(1, np.float32), struct.pack("<2i", 100, 20)
    by_value = struct.pack("<qfi", 2**40, 2.0**-40, 7)
    library().launch("arguments", 1, twin.out(z), words, by_value, 0.5, -3, None)
    assert z[0] == 120 + 0.5 - 3 + 1 + 7
    with pytest.raises(TypeError, match="6 arguments, given 1"):
        library().launch("arguments", 1, twin.out(z))
    with pytest.raises(TypeError, match="argument 3"):
        library().launch("arguments", 1, twin.out(z), words, by_value, "half", -3, None)
    with pytest.raises(ValueError, match="'argument' is not one of"):
        library().launch("argument", 1)
    with pytest.raises(ValueError, match="contiguous"):
        run("rows", np.zeros((8, 8), np.int8).T, None, z, 8)


def test_memory_off_the_alignment_goes_there_and_back() -> None:
    memory = np.zeros(4097, np.int8)
    x, z = np.arange(100, dtype=np.int8)[3:93], memory[1 : 1 + 100]
    result = run("cast_int8_t_half", x, None, z.view(np.int8)[: 2 * 45].view(np.float16), 45)
    np.testing.assert_array_equal(memory[1:91].view(np.float16), x[:45])
    assert result.total["read_sectors"] == 2  # as if it started on the device's alignment


TENSORS = (
    "LocalTensor<float> f; LocalTensor<half> h; LocalTensor<bfloat16_t> b; "
    "LocalTensor<int8_t> c; LocalTensor<int32_t> i; LocalTensor<uint8_t> m; "
)
REFUSED = {  # what the compiler says: the code
    "has no Cast between": "Cast(c, f, RoundMode::CAST_RINT, 8u);",
    "A2 has no Cast": "Cast(h, b, RoundMode::CAST_NONE, 8u);",
    "no such rounding mode": "Cast(b, f, RoundMode::CAST_NONE, 8u);",
    "Div does not take this type": "Div(i, i, i, 8);",
    "Duplicate does not take": "Duplicate(c, int8_t{0}, 8);",
    "a vector core has barriers": "PipeBarrier<PIPE_S>();",
    "the A2 has CTRL": "SetCtrlSpr<53, 53>(1);",
    "a queue is VECIN or VECOUT": "TQue<TPosition::VECCALC, 1> queue;",
    "no match for": "half one = 1.0f; half two = one + one;",
    "Select takes half and float": "Select(i, m, i, i, SELMODE::VSEL_CMPMASK_SPR, 8u);",
    "half and float only": "WholeReduceSum(i, i, 8, 1, 1, 1, 8);",
}


@pytest.mark.parametrize(("message", "code"), REFUSED.items())
def test_what_the_device_lacks_does_not_compile(message: str, code: str, tmp_path: Path) -> None:
    source = tmp_path / "refused.cpp"
    source.write_text(
        '#include "kernel_operator.h"\nusing namespace AscendC;\n'
        f'extern "C" __global__ __aicore__ void refused(GM_ADDR) {{ {TENSORS}{code} }}\n'
    )
    with pytest.raises(twin.BuildError, match=r"(?i)" + message):
        twin.build(source)


def test_barriers_that_the_compiler_inserts() -> None:
    faults = twin.build(
        TWIN / "tests" / "faults_barrier.cpp", kernels=["fault_vector_reads_vector"]
    )
    buffers = twin.inp(np.ones(16384, np.float32)), twin.out(np.zeros(16384, np.float32))
    faults.launch("fault_vector_reads_vector", 1, *buffers, auto_sync=True)
    with pytest.raises(twin.Violation, match="pipe-barrier"):
        faults.launch("fault_vector_reads_vector", 1, *buffers)


def test_built_again_when_an_included_file_changes(tmp_path: Path) -> None:
    header, source = tmp_path / "value.h", tmp_path / "kernel.cpp"
    source.write_text(
        '#include "kernel_operator.h"\n#include "value.h"\n'
        'extern "C" __global__ __aicore__ void kernel(GM_ADDR) { (void)VALUE; }\n'
    )
    header.write_text("constexpr int VALUE = 1;\n")
    first, same = twin.build(source), twin.build(source)
    header.write_text("constexpr int VALUE = 2;\n")
    assert first.path == same.path != twin.build(source).path


def test_commands_of_the_readme(tmp_path: Path) -> None:
    text = (TWIN / "README.md").read_text()
    block = (
        text.split("```sh\n")[1]
        .split("```")[0]
        .replace("\\\n", " ")
        .replace("-o ", f"-o {tmp_path}/")
    )
    for line in block.splitlines():
        subprocess.run(shlex.split(line), check=True, cwd=TWIN.parents[1])
    assert twin.Library(tmp_path / "copy_cast.so").kernels == {"copy_cast": "ppi"}


def test_readme_names_what_the_headers_offer() -> None:
    text = (TWIN / "README.md").read_text()
    table = text.split("## Supported API")[1].split("\n\n")[1]
    names = {
        name
        for cell in table.split("`")[1::2]
        for name in cell.replace("/", " ").split()
        if name.isidentifier()
    }
    headers = "".join(path.read_text() for path in TWIN.glob("*.h"))
    assert len(names) > 50 and not [name for name in names if name not in headers]
    assert VALUES.exists()

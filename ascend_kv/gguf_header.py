"""Read the header of a GGUF file in milliseconds: metadata and tensor shapes, never the data.

The ``gguf`` package's reader makes an array of every string of the vocabulary, which takes seconds;
here strings in arrays are stepped over and only counted.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from typing import NamedTuple

from ascend_kv.errors import UsageError

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9

Value = int | float | bool | str | tuple[int | float | bool, ...]


class GGUFHeader(NamedTuple):
    """What a GGUF header says.

    ``values`` has scalars, strings and arrays of numbers by key; ``array_lengths`` the length of
    every array, those of strings included; ``tensors`` the shapes by name in PyTorch's order, rows
    first (GGUF writes the contiguous dimension first); ``file_bytes`` where the last tensor ends.
    """

    values: dict[str, Value]
    array_lengths: dict[str, int]
    tensors: dict[str, tuple[int, ...]]
    file_bytes: int


def read_gguf_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Read the header of the GGUF file at ``path``.

    Raises:
        UsageError: the file is not there, not GGUF, cut short in its header, or of a version
            or byte order that is not read.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(data)
    except OSError as error:
        raise UsageError("model", str(path), "a GGUF file that can be read", f"{error}.") from None
    except (ValueError, struct.error, KeyError, IndexError) as error:
        # mmap raises ValueError for an empty file
        hint = f"The file is cut short or damaged ({error})."
        raise UsageError("model", str(path), "a whole GGUF file, version 2 or 3", hint) from None


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    def numbers(self, code: str, count: int = 1) -> tuple[int, ...]:
        layout = f"<{count}{code}"
        found = struct.unpack_from(layout, self.data, self.offset)
        self.offset += struct.calcsize(layout)
        return found

    def string(self) -> str:
        (length,) = self.numbers("Q")
        start = self.offset
        self.skip(length)
        return self.data[start : self.offset].decode("utf-8")

    def skip(self, length: int) -> None:
        self.offset += length
        if self.offset > len(self.data):
            raise ValueError(f"it ends before byte {self.offset}")


def _parse(data: mmap.mmap) -> GGUFHeader:
    if data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    cursor = _Cursor(data)
    cursor.skip(4)
    (version,) = cursor.numbers("I")
    if version not in (2, 3):
        raise ValueError(f"its version reads {version}")
    tensor_count, value_count = cursor.numbers("Q", 2)
    header = GGUFHeader({}, {}, {}, 0)
    for _ in range(value_count):
        _parse_value(cursor, header)
    end = 0
    for _ in range(tensor_count):
        name = cursor.string()
        (dimensions,) = cursor.numbers("I")
        header.tensors[name] = tuple(reversed(cursor.numbers("Q", dimensions)))
        (kind,) = cursor.numbers("I")
        (offset,) = cursor.numbers("Q")
        end = max(end, offset + _tensor_bytes(kind, math.prod(header.tensors[name])))
    alignment = header.values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment reads {alignment}")
    start = -(-cursor.offset // alignment) * alignment
    return header._replace(file_bytes=start + end)


def _tensor_bytes(kind: int, count: int) -> int:
    """Bytes of ``count`` numbers of a GGML type; 0 of a type that is not known."""
    # Imported here: it takes a sixth of a second, which only GGUF files are worth.
    from gguf.constants import GGML_QUANT_SIZES

    sizes: dict[int, tuple[int, int]] = {int(name): each for name, each in GGML_QUANT_SIZES.items()}
    block, block_bytes = sizes.get(kind, (1, 0))
    return count // block * block_bytes


def _parse_value(cursor: _Cursor, header: GGUFHeader) -> None:
    key = cursor.string()
    (kind,) = cursor.numbers("I")
    if kind == _STRING:
        header.values[key] = cursor.string()
    elif kind != _ARRAY:
        header.values[key] = cursor.numbers(_SCALARS[kind])[0]
    else:
        (item,) = cursor.numbers("I")
        (length,) = cursor.numbers("Q")
        header.array_lengths[key] = length
        if item == _STRING:
            for _ in range(length):
                cursor.skip(cursor.numbers("Q")[0])
        else:
            header.values[key] = cursor.numbers(_SCALARS[item], length)

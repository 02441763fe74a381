"""The safetensors format: one file's header, its checks, and its writer.

Format (huggingface/safetensors, "Format"): eight bytes little-endian header length, a JSON header that gives every
tensor its dtype, shape and byte range, then the data without holes. numpy has no bfloat16 and no 8-bit floats;
``ml_dtypes`` names them, so that bytes are never converted on the way.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""Names in a header -> numpy dtypes of the same bytes."""

CODES = {dtype: code for code, dtype in DTYPES.items()}

LONGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. ``start``: absolute byte offset; ``code``: the dtype as the header spells it."""

    name: str
    file: Path
    code: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def dtype(self) -> np.dtype:
        """The numpy dtype of the same bytes."""
        return DTYPES[self.code]


def read_header(file: Path) -> tuple[dict[str, Entry], list[str]]:
    """The tensors of a file, and all that is wrong with it. Reads the header only."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        start = handle.read(8)
        if start == b"version ":
            return {}, [f"{file.name} is a Git LFS pointer, not the file itself; run `git lfs pull` or download it"]
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, LONGEST_HEADER):
            what = f"{size} bytes, with a header said to be {length} long"
            return {}, [f"{file.name}: {what}: it is cut short, or not a safetensors file"]
        try:
            header = json.loads(handle.read(length))
        except ValueError as error:
            return {}, [f"{file.name}: the header is not JSON ({error}); download the file again"]
    header.pop("__metadata__", None)
    entries, problems = {}, []
    for name, spec in header.items():
        try:
            entries[name] = _entry(file, name, spec, 8 + length)
        except (KeyError, TypeError, ValueError) as error:
            problems.append(f"{file.name}: tensor {name!r}: {error}")
    return entries, problems + _check_layout(file, entries, 8 + length, size, complete=not problems)


def _entry(file: Path, name: str, spec: Mapping[str, Any], data: int) -> Entry:
    """A header's entry.

    Raises:
        ValueError: for an unknown dtype, or a byte range that its shape does not fill.
    """
    code, shape = spec["dtype"], tuple(int(size) for size in spec["shape"])
    begin, end = spec["data_offsets"]
    if code not in DTYPES:
        raise ValueError(f"dtype {code} is not supported; known: {', '.join(DTYPES)}")
    expected = math.prod(shape) * DTYPES[code].itemsize
    if end - begin != expected or begin < 0:
        raise ValueError(f"{code} {list(shape)} takes {expected} bytes, its range [{begin}, {end}) has {end - begin}")
    return Entry(name, file, code, shape, data + begin, expected)


def _check_layout(file: Path, entries: dict[str, Entry], data: int, size: int, *, complete: bool) -> list[str]:
    """The file must end where its last tensor does, and tensors must neither overlap nor leave holes."""
    ordered = sorted(entries.values(), key=lambda entry: (entry.start, entry.nbytes))
    end = max((entry.start + entry.nbytes for entry in ordered), default=data)
    if size < end:
        return [f"{file.name} is {size} bytes, its header says {end}: it is cut short; download it again"]
    if size > end and complete:
        return [f"{file.name} is {size} bytes, its header says {end}: {size - end} bytes belong to no tensor"]
    position = data
    for entry in ordered if complete else ():
        if entry.start != position:
            return [f"{file.name}: tensor {entry.name!r} begins at byte {entry.start}, expected {position}"]
        position += entry.nbytes
    return []


def write_file(file: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write tensors in order, under a temporary name that is renamed at the end.

    Raises:
        KeyError: for a dtype that the format does not have.
    """
    tensors = [(name, np.asarray(value)) for name, value in tensors]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, value in tensors:
        end = position + value.nbytes
        header[name] = {"dtype": CODES[value.dtype], "shape": list(value.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64 + 56)  # 8 + header is a multiple of 64: data begins aligned
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        for _, value in tensors:
            handle.write(np.ascontiguousarray(value).view(np.uint8).data if value.ndim else value.tobytes())
    os.replace(partial, file)


def write_text(file: Path, text: str) -> None:
    """Write a text file under a temporary name that is renamed at the end."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text)
    os.replace(partial, file)

"""Lazy reading of a checkpoint folder: headers now, tensors when asked for, and never a file as a whole.

Every fault that can be seen without reading a tensor is found when the folder is opened, before anything is compiled
or allocated, and all of them are reported together. Tensors are views of memory maps; :meth:`Reader.release` gives the
pages of one back, so that a tensor copied to a device is not also held by the host.
"""

import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from checkpoints.errors import raise_if
from checkpoints.safetensors_file import Entry, read_header

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


@dataclass(frozen=True)
class Reader(Mapping):
    """Tensor name -> read-only numpy view of the file, bit-exact in the file's own dtype. Nothing is copied."""

    folder: Path
    entries: dict[str, Entry]
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        if not entry.nbytes:
            return np.empty(entry.shape, entry.dtype)
        count = entry.nbytes // entry.dtype.itemsize
        return np.frombuffer(self._map(entry.file), entry.dtype, count, entry.start).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def release(self, name: str) -> None:
        """Let go of the memory pages that hold a tensor. Views stay valid and read the file again."""
        entry = self.entries[name]
        if entry.file in self._maps and hasattr(mmap, "MADV_DONTNEED"):
            start = entry.start - entry.start % mmap.PAGESIZE
            self._maps[entry.file].madvise(mmap.MADV_DONTNEED, start, entry.start + entry.nbytes - start)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as handle:
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]


def open_checkpoint(folder: Path | str) -> Reader:
    """Open a folder of safetensors files. Only headers are read.

    ``model.safetensors.index.json`` decides which shard owns a tensor. Without it the folder is ``model.safetensors``
    and nothing else, or, without that, all of its ``*.safetensors`` files.

    Raises:
        CheckpointError: with every problem found: no or unreadable files, a file cut short, a missing shard, an index
            and shards that disagree, a tensor in two files.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise_if(folder, ["is not a folder; expected one with config.json and *.safetensors"])
    index = folder / INDEX
    owners, files, problems = _read_index(index) if index.exists() else (None, _files(folder), [])
    if not files and not problems:
        problems = [f"has no *.safetensors file; found {sorted(path.name for path in folder.iterdir())[:10]}"]
    entries: dict[str, Entry] = {}
    unreadable = set()
    for file in files:
        if not file.exists():
            problems.append(f"{file.name}: named by {INDEX} and missing; download it")
            unreadable.add(file.name)
            continue
        found, faults = read_header(file)
        problems += faults
        unreadable |= {file.name} if faults else set()
        problems += _duplicates(entries, found)
        entries |= found
    if owners is not None:
        problems += _disagreements(owners, entries, unreadable)
    raise_if(folder, problems)
    return Reader(folder, entries)


def _files(folder: Path) -> list[Path]:
    whole = folder / WHOLE
    return [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))


def _read_index(index: Path) -> tuple[dict[str, str], list[Path], list[str]]:
    """``(tensor -> shard name, shard files, problems)``."""
    try:
        owners = json.loads(index.read_text())["weight_map"]
        names = sorted(set(owners.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, [], [f"{INDEX}: expected JSON with a 'weight_map' of tensor -> file ({error!r}); download it again"]
    outside = [name for name in names if Path(name).name != name]
    problems = [f"{INDEX} names {name!r}, which is not a file of this folder" for name in outside]
    return owners, [index.with_name(name) for name in names if name not in outside], problems


def _duplicates(entries: dict[str, Entry], found: dict[str, Entry]) -> list[str]:
    return [
        f"tensor {name!r} is in {entries[name].file.name} and in {found[name].file.name}; keep one of the files"
        for name in sorted(entries.keys() & found.keys())
    ]


def _disagreements(owners: dict[str, str], entries: dict[str, Entry], unreadable: set[str]) -> list[str]:
    """Where the index and the readable shards differ."""
    problems = []
    for name, shard in sorted(owners.items()):
        if shard in unreadable or Path(shard).name != shard:
            continue
        if name not in entries:
            problems.append(f"{INDEX} says that {shard} holds {name!r}; it does not: the shard is of another version")
        elif entries[name].file.name != shard:
            problems.append(f"{INDEX} says that {shard} holds {name!r}; it is in {entries[name].file.name}")
    unlisted = sorted(entries.keys() - owners.keys())
    return problems + [f"{entries[name].file.name} holds {name!r}, which {INDEX} does not name" for name in unlisted]

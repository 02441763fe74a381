"""Seeded random tensors, checkpoints in the layout of the releases, and the files of a golden.

Every tensor is drawn from its own stream, named by the tensor, so that adding one never moves another.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
TOLERANCE = 1e-6  # by which a regenerated golden may differ, times max(1, std)


class Spec(NamedTuple):
    """One weight: its shape and the normal distribution that it is drawn from."""

    shape: tuple[int, ...]
    scale: float
    mean: float = 0.0


def matrix(*shape: int, fan_in: int, gain: float = 1.0) -> Spec:
    """A matrix that keeps the variance of its input, times `gain` squared."""
    return Spec(shape, gain / fan_in**0.5)


def norm(width: int) -> Spec:
    """A norm weight, visibly different from one."""
    return Spec((width,), 0.3, 1.0)


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream that belongs to `name`."""
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def draw(seed: int, name: str, spec: Spec) -> torch.Tensor:
    """A float32 tensor whose values are exact in bfloat16, as in the releases."""
    values = spec.mean + spec.scale * stream(seed, name).standard_normal(spec.shape)
    return torch.from_numpy(values).to(torch.bfloat16).to(torch.float32)


def draw_all(seed: int, specs: Mapping[str, Spec]) -> Tensors:
    """All the weights of an inventory, as bfloat16."""
    return {name: draw(seed, name, spec).to(torch.bfloat16) for name, spec in specs.items()}


def draw_ids(seed: int, name: str, vocab: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Random token ids, int64 as torch wants them."""
    return torch.from_numpy(stream(seed, name).integers(0, vocab, shape))


def sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int) -> dict[str, int]:
    """The sizes of a network under the names that `config.json` gives them."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
    }


def check_distinct(dims: Mapping[str, int]) -> None:
    """Raise if two named dimensions are equal: then a swapped axis could pass."""
    by_size: dict[int, list[str]] = {}
    for name, size in dims.items():
        by_size.setdefault(size, []).append(name)
    equal = {size: names for size, names in by_size.items() if len(names) > 1}
    if equal:
        raise ValueError(f"dimensions must be pairwise different: {equal}")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON file in reading order, with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A safetensors file; 64-bit numbers become 32-bit ones, the rest keeps its dtype."""
    narrow = {torch.int64: torch.int32, torch.float64: torch.float32}
    plain = {name: tensor.to(narrow.get(tensor.dtype, tensor.dtype)).contiguous() for name, tensor in tensors.items()}
    save_file(plain, path, metadata={"format": "pt"})


def write_checkpoint(
    folder: Path,
    config: Config,
    tensors: Mapping[str, torch.Tensor],
    shard_of: Callable[[str], int] | None = None,
    shards: int = 2,
) -> None:
    """`config.json` plus one safetensors file, or `shards` of them and their index if `shard_of` is given."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    if shard_of is None:
        write_tensors(folder / "model.safetensors", tensors)
        return
    names = [f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" for shard in range(shards)]
    for shard, file_name in enumerate(names):
        write_tensors(folder / file_name, {name: t for name, t in tensors.items() if shard_of(name) == shard})
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    weight_map = {name: names[shard_of(name)] for name in sorted(tensors)}
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_golden(
    folder: Path, kind: str, about: str, expected: Mapping[str, torch.Tensor], tolerance: float, **details: object
) -> None:
    """What every golden has: the expected tensors, and a description."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "expected.safetensors", expected)
    write_json(folder / "case.json", {"kind": kind, "about": about, "tolerance": tolerance, **details})

"""From parameters to a folder in the layout of the releases, so that any other loader can read it.

Targets as openai/gpt-oss and Qwen3 ship them, drafters as z-lab does; floats in bfloat16, experts as MXFP4 or
bfloat16, shards small enough for any forge, and every file under a temporary name until it is whole.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from checkpoints.errors import raise_if
from checkpoints.family import Family, Rules
from checkpoints.reader import INDEX, WHOLE
from checkpoints.registry import DRAFTER_RULES, family_of
from checkpoints.rules import Assignment, flatten, invert
from checkpoints.safetensors_file import write_file, write_text

SHARD_BYTES = 20 * 2**20

UNPACKED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
MXFP4_CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": UNPACKED}
"""``quantization_config`` of the released gpt-oss files."""


def export_target(
    params: Any, config: dict[str, Any], folder: Path | str, experts: str | None = None, *, overwrite: bool = False
) -> None:
    """Write a target.

    Args:
        params: the module's parameters, experts in any layout.
        config: the ``config.json`` to write (for gpt-oss: :func:`checkpoints.gpt_oss.hf_config` makes one). Its
            ``quantization_config`` follows ``experts``.
        folder: made if need be; other files in it stay.
        experts: how the family's experts are stored, None for its first way. For gpt-oss "mxfp4" rounds to the nearest
            MXFP4 values (exact for values that it can hold), "bfloat16" does not; Qwen3.5 has "fused" and "single".
        overwrite: replace weights that are there already.

    Raises:
        CheckpointError: the folder holds weights already, or the parameters do not fit the family's rules.
        ValueError: unknown ``model_type`` or ``experts``, or packed parameters to be written in bfloat16.
    """
    family = family_of(config.get("model_type"))
    config, rules = dict(config), family.rules
    if family.stores:
        option = experts or next(iter(family.stores))
        if option not in family.stores:
            raise ValueError(f"experts={option!r} is not known; known: {', '.join(family.stores)}")
        rules += family.expert_rules(family.stores[option], layout_of(params))
        config.pop("quantization_config", None)
        config |= {"quantization_config": MXFP4_CONFIG} if option == "mxfp4" else {}
    _write(params, config, Path(folder), rules, overwrite, family)


def export_drafter(params: Any, config: dict[str, Any], folder: Path | str, *, overwrite: bool = False) -> None:
    """Write a drafter in z-lab's layout: no ``model.`` prefix, no embedding, no head.

    Args:
        config: the ``config.json`` to write; :func:`checkpoints.dflash.hf_config` makes one.

    Raises:
        CheckpointError: the folder holds weights already, or the parameters do not fit the rules.
    """
    _write(params, config, Path(folder), DRAFTER_RULES, overwrite, Family(DRAFTER_RULES))


def layout_of(params: Any) -> str:
    """Layout of the experts in a tree of parameters (see :mod:`dflash_jax.moe`)."""
    paths = flatten(params)[0]
    if any(re.search(r"/experts/\d+/", path) for path in paths):
        return "split"
    return "packed" if any(path.endswith("/codes") for path in paths) else "stacked"


def _write(params: Any, config: dict[str, Any], folder: Path, rules: Rules, overwrite: bool, family: Family) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    old = {file.name for file in folder.glob("model*.safetensors")}
    if old and not overwrite:
        raise_if(folder, [f"holds weights already ({', '.join(sorted(old))}); choose another folder or overwrite=True"])
    tensors = dict(_tensors(params, rules, folder, family))
    shards = _shards({name: value.nbytes for name, value in tensors.items()})
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = names if len(shards) > 1 else [WHOLE]
    for file_name, shard in zip(names, shards, strict=True):
        write_file(folder / file_name, [(name, tensors[name]) for name in shard])
    if len(shards) > 1:
        owners = {name: file_name for file_name, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(value.nbytes for value in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(owners.items()))}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    else:
        (folder / INDEX).unlink(missing_ok=True)
    write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    for stale in old - set(names):
        (folder / stale).unlink()


def _tensors(params: Any, rules: Rules, folder: Path, family: Family) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor by its name in the file, in bfloat16 or float32 or as bytes."""
    leaves = flatten(params)[0]
    for assignment in invert(rules, params, folder):
        for name, value in zip(assignment.names, _inverse(assignment, leaves), strict=True):
            dtype = np.float32 if name.endswith(family.float32) else ml_dtypes.bfloat16
            own = family.prefix + name.removeprefix("model.") if name.startswith("model.") else name
            yield own, value if value.dtype == np.uint8 else value.astype(dtype)


def _inverse(assignment: Assignment, leaves: dict[str, jax.Array]) -> tuple[np.ndarray, ...]:
    """The file tensors of one assignment."""
    inverse = assignment.rule.transform.inverse
    if assignment.rule.stacked:
        return tuple(tensor for part in np.asarray(leaves[assignment.paths[0]]) for tensor in inverse(part))
    if not assignment.rule.sliced:
        return inverse(np.asarray(leaves[assignment.paths[0]]))
    parts = [inverse(np.asarray(leaves[path])) for path in assignment.paths]
    return tuple(np.stack(tensors) for tensors in zip(*parts, strict=True))


def _shards(sizes: dict[str, int]) -> list[list[str]]:
    """Names in files of at most :data:`SHARD_BYTES`; a larger tensor has a file of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in sorted(sizes, key=_file_order):
        if shards[-1] and filled + sizes[name] > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += sizes[name]
    return shards


def _file_order(name: str) -> tuple[int, str]:
    """Layer by layer; what belongs to no layer comes first."""
    layer = re.search(r"layers\.(\d+)\.", name)
    return (int(layer[1]) if layer else -1, name)

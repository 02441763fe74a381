"""From parameters to a folder in the layout of the releases, so that any other loader can read it.

Targets as openai/gpt-oss and Qwen3 ship them, drafters as z-lab does; floats in bfloat16, experts as MXFP4,
FP8 or bfloat16, shards small enough for any forge, and every file under a temporary name until it is whole.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from checkpoints import fp8
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

FP8_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [fp8.BLOCK, fp8.BLOCK],
}
"""The same of block-FP8 files, without the list of what is not converted."""


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
            MXFP4 values (exact for values that it can hold), "bfloat16" does not; Qwen3.5 has "fused" and "single"; GLM
            has "bfloat16" and "fp8", which rounds the other matrices of its layers too.
        overwrite: replace weights that are there already.

    Raises:
        CheckpointError: the folder holds weights already, or the parameters do not fit the family's rules.
        ValueError: unknown ``model_type`` or ``experts``, packed parameters to be written as floats, or FP8
            experts with scales per row to be written with scales per block.
    """
    _refuse_to_overwrite(Path(folder), overwrite)
    family = family_of(config.get("model_type"))
    config, rules, option = dict(config), family.rules, experts or next(iter(family.stores), None)
    if option is not None:
        if option not in family.stores:
            raise ValueError(f"experts={option!r} is not known; known: {', '.join(family.stores)}")
        rules += family.expert_rules(family.stores[option], layout_of(params))
        config.pop("quantization_config", None)
        config |= {"quantization_config": MXFP4_CONFIG} if option == "mxfp4" else {}
    quantised = family.fp8 if option == "fp8" else ()
    tensors = dict(_tensors(params, rules, Path(folder), family, quantised))
    if quantised:
        kept = sorted(_modules(tensors) - _modules(name for name in tensors if name.endswith(quantised)))
        config |= {"quantization_config": FP8_CONFIG | {"modules_to_not_convert": kept}}
    _write(tensors, config, Path(folder))


def export_drafter(params: Any, config: dict[str, Any], folder: Path | str, *, overwrite: bool = False) -> None:
    """Write a drafter in z-lab's layout: no ``model.`` prefix, no embedding, no head.

    Args:
        config: the ``config.json`` to write; :func:`checkpoints.dflash.hf_config` makes one.

    Raises:
        CheckpointError: the folder holds weights already, or the parameters do not fit the rules.
    """
    _refuse_to_overwrite(Path(folder), overwrite)
    tensors = dict(_tensors(params, DRAFTER_RULES, Path(folder), Family(DRAFTER_RULES)))
    _write(tensors, config, Path(folder))


def _weights_in(folder: Path) -> set[str]:
    return {file.name for file in folder.glob("model*.safetensors")}


def _refuse_to_overwrite(folder: Path, overwrite: bool) -> None:
    """Before anything is computed."""
    old = sorted(_weights_in(folder))
    if old and not overwrite:
        raise_if(folder, [f"holds weights already ({', '.join(old)}); choose another folder or overwrite=True"])


def _modules(names: Iterable[str]) -> set[str]:
    """Names of the modules that own these tensors."""
    return {name.rsplit(".", 1)[0] for name in names}


def layout_of(params: Any) -> str:
    """Layout of the experts in a tree of parameters (see :mod:`dflash_jax.moe`)."""
    paths = flatten(params)[0]
    if any(re.search(r"/experts/\d+/", path) for path in paths):
        return "split"
    codes = next((leaf for path, leaf in paths.items() if path.endswith("/codes")), None)
    if codes is None:
        return "stacked"
    return "packed" if codes.dtype == np.uint8 else "fp8"


def _write(tensors: dict[str, np.ndarray], config: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    old = _weights_in(folder)
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


def _tensors(
    params: Any, rules: Rules, folder: Path, family: Family, quantised: tuple[str, ...] = ()
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor by its name in the file, in bfloat16 or float32 or as bytes; those whose names end like one of
    ``quantised`` as FP8 codes and scales per block."""
    leaves = flatten(params)[0]
    for assignment in invert(rules, params, folder):
        for name, value in zip(assignment.names, _inverse(assignment, leaves), strict=True):
            own = family.prefix + name.removeprefix("model.") if name.startswith("model.") else name
            if value.dtype.itemsize == 1:
                yield own, value
            elif name.endswith(quantised):
                codes, scales = fp8.pack(value)
                yield own, codes
                yield own + fp8.SUFFIXES[0], scales
            else:
                wide = name.endswith((*family.float32, *fp8.SUFFIXES))
                yield own, value.astype(np.float32 if wide else ml_dtypes.bfloat16)


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

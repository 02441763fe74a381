"""From a folder to a network and its parameters.

Tensors go to the device one by one, in the order of the files: at no time is more on the host than the tensor being
placed, or one layer of experts while they are decoded.
"""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from checkpoints import contract
from checkpoints.config import read_config, read_vocabulary, stop_ids
from checkpoints.errors import raise_if
from checkpoints.family import Experts
from checkpoints.reader import Reader, open_checkpoint
from checkpoints.registry import DRAFTER_RULES, family_of
from checkpoints.rules import Assignment, Plan, flatten, plan
from models import MODELS
from models.dflash import DFlash, DFlashConfig, DFlashDrafter
from models.target import FlaxTarget

__all__ = ["load_drafter", "load_target", "plan_drafter", "plan_target", "read_config", "stop_ids"]

log = logging.getLogger(__name__)

ALIGNMENT = 64
"""Bytes. jax takes over host arrays that begin on such a boundary without a copy when the device is the CPU."""

QUIET_SECONDS = 2.0
"""Loads shorter than this show no progress bar."""


def load_target(
    folder: Path | str, *, dtype: jnp.dtype = jnp.float32, experts: str | None = None, taps: tuple[int, ...] = ()
) -> tuple[FlaxTarget, Any]:
    """Load a target.

    Args:
        folder: with ``config.json`` and safetensors files in the layout of the release.
        dtype: of all parameters but packed or separately chosen experts.
        experts: "packed", "bfloat16", "float32", or None for the family's own choice (logged at INFO).
        taps: layers whose outputs a drafter wants.

    Returns:
        The target and its parameters, on the default device.

    Raises:
        CheckpointError: listing all that is wrong with the folder, before any tensor is read; and during reading, for
            MXFP4 scales or FP8 codes that are NaN.
        ValueError: unknown ``model_type``, or a config key that is missing or unsupported.
    """
    reader = open_checkpoint(folder)
    target, tree, plan, note = plan_target(reader, read_config(folder), dtype=dtype, experts=experts, taps=taps)
    return target, fill(reader, plan, tree, note)


def plan_target(
    reader: Reader,
    config: dict[str, Any],
    *,
    dtype: jnp.dtype = jnp.float32,
    experts: str | None = None,
    taps: tuple[int, ...] = (),
) -> tuple[FlaxTarget, Any, Plan, str]:
    """``(target, abstract parameters, plan, note on the experts)``. Reads no tensor."""
    family, dtype = family_of(config.get("model_type")), jnp.dtype(dtype)
    config_type, module_type = MODELS[config["model_type"]]
    sizes = config_type.from_hf(config)
    if outside := [tap for tap in taps if not 0 <= tap < sizes.layers]:
        raise ValueError(f"taps {outside} are not layers of {reader.folder}: it has {sizes.layers}")
    if family.experts is None:
        if experts is not None:
            raise ValueError(f"experts={experts!r}: {config['model_type']} has no experts")
        choice, module = None, module_type(sizes, taps=tuple(taps), dtype=dtype)
    else:
        choice = family.experts(config, reader, dtype, experts)
        module = module_type(sizes, taps=tuple(taps), dtype=dtype, layout=choice.layout)
    target = FlaxTarget(module, tokens=max(read_vocabulary(reader.folder).values(), default=-1) + 1 or None)
    tree = _expert_dtypes(target.abstract_params(), choice)
    rules = family.rules + (choice.rules if choice else ())
    made = plan(reader, rules, tree, layers=sizes.layers, tied=sizes.tie_word_embeddings)
    return target, tree, made, f"experts {choice.note}" if choice else "no experts"


def load_drafter(
    folder: Path | str, target: Path | str | dict[str, Any], *, dtype: jnp.dtype = jnp.float32
) -> tuple[DFlashDrafter, Any]:
    """Load a DFlash drafter and hold it against its target.

    Args:
        target: the target's folder, or its config dictionary.

    Raises:
        CheckpointError: if the two do not fit (see :mod:`checkpoints.contract`) or a file is faulty.
        ValueError: a config key that is missing or unsupported.
    """
    reader, config = open_checkpoint(folder), read_config(folder)
    contract.check_pair(config, reader, target)
    drafter, tree, plan = plan_drafter(reader, config, dtype=dtype)
    return drafter, fill(reader, plan, tree, "drafter")


def plan_drafter(
    reader: Reader, config: dict[str, Any], *, dtype: jnp.dtype = jnp.float32
) -> tuple[DFlashDrafter, Any, Plan]:
    """``(drafter, abstract parameters, plan)``. Reads no tensor."""
    sizes = DFlashConfig.from_hf(config)
    drafter = DFlashDrafter(DFlash(sizes, dtype=jnp.dtype(dtype)), sizes.block_size)
    tree = drafter.abstract_params()
    return drafter, tree, plan(reader, DRAFTER_RULES, tree)


def _expert_dtypes(tree: Any, choice: Experts | None) -> Any:
    """Abstract parameters with the experts' own dtype on decoded matrices."""
    if choice is None:
        return tree
    paths, treedef = flatten(tree)
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape, choice.dtype)
        if "/experts/" in path and not path.endswith(("_bias", "/codes", "/scales"))
        else leaf
        for path, leaf in paths.items()
    ]
    return jax.tree.unflatten(treedef, leaves)


def fill(reader: Reader, plan: Plan, tree: Any, note: str) -> Any:
    """Read a plan's tensors into parameters shaped like ``tree``.

    Raises:
        CheckpointError: for values that a transform refuses, naming every such tensor.
    """
    wanted, treedef = flatten(tree)
    values: dict[str, jax.Array] = {}
    problems: list[str] = []
    started = time.perf_counter()
    for assignment in _with_progress(reader, plan):
        arrays = tuple(reader[name] for name in assignment.names)
        if problem := assignment.rule.transform.check(arrays):
            problems.append(f"tensor {assignment.names[-1]!r}: {problem}")
        elif not problems:
            values |= _place(assignment, arrays, wanted[assignment.paths[0]].dtype)
        for name in assignment.names:
            reader.release(name)
    raise_if(reader.folder, problems)
    seconds = time.perf_counter() - started
    log.info("%s: %s; %.2f GB in %.1f s", reader.folder, note, reader.nbytes / 1e9, seconds)
    return jax.tree.unflatten(treedef, [values[path] for path in wanted])


def _place(assignment: Assignment, arrays: tuple[np.ndarray, ...], dtype: jnp.dtype) -> dict[str, jax.Array]:
    """The parameters of one assignment, on the device."""
    forward, shape = assignment.rule.transform.forward, assignment.shape
    if assignment.rule.stacked:
        stack = np.empty(shape, dtype)
        for place, each in zip(stack, assignment.by_expert(arrays), strict=True):
            place[...] = aligned_copy(forward(each, shape[1:], dtype), dtype)
        return {assignment.paths[0]: to_device(stack, dtype)}
    if not assignment.rule.sliced:
        return {assignment.paths[0]: to_device(forward(arrays, shape, dtype), dtype)}
    slices = (tuple(array[index] for array in arrays) for index in range(len(assignment.paths)))
    return {
        path: to_device(forward(parts, shape, dtype), dtype)
        for path, parts in zip(assignment.paths, slices, strict=True)
    }


def to_device(array: np.ndarray | jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The array in ``dtype`` on the default device; a numpy view is copied exactly once."""
    if isinstance(array, jax.Array):
        return jax.block_until_ready(array)
    return jax.block_until_ready(jax.device_put(aligned_copy(array, dtype)))


def aligned_copy(view: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A C-ordered copy in ``dtype`` on an aligned buffer. Transposed views are copied tile by tile, which is several
    times faster than element order."""
    dtype = np.dtype(dtype)
    raw = np.empty(view.size * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    copy = raw[start : start + view.size * dtype.itemsize].view(dtype).reshape(view.shape)
    with np.errstate(over="ignore", invalid="ignore"):  # float32 -> bfloat16 of large and non-finite values
        for target, source in _matrices(copy, view):
            for rows, columns in _tiles(source):
                target[rows, columns] = source[rows, columns]
    return copy


def _matrices(copy: np.ndarray, view: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    if view.ndim < 2:
        yield copy.reshape(1, -1), view.reshape(1, -1)
    elif view.ndim == 2:
        yield copy, view
    else:
        for parts in zip(copy, view, strict=True):
            yield from _matrices(*parts)


def _tiles(matrix: np.ndarray, side: int = 128) -> Iterator[tuple[slice, slice]]:
    if matrix.flags.c_contiguous or matrix.size <= side * side:
        yield slice(None), slice(None)
        return
    for row in range(0, matrix.shape[0], side):
        for column in range(0, matrix.shape[1], side):
            yield slice(row, row + side), slice(column, column + side)


def _with_progress(reader: Reader, plan: Plan) -> Iterator[Assignment]:
    """The assignments, with a bar and GB/s on stderr once the load has taken a while."""
    sizes = [sum(reader.entries[name].nbytes for name in assignment.names) for assignment in plan.assignments]
    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress, started = Progress(*columns, console=Console(stderr=True)), time.perf_counter()
    task = progress.add_task(reader.folder.name, total=sum(sizes))
    try:
        for assignment, size in zip(plan.assignments, sizes, strict=True):
            yield assignment
            progress.advance(task, size)
            if not progress.live.is_started and time.perf_counter() - started > QUIET_SECONDS:
                progress.start()
    finally:
        if progress.live.is_started:
            progress.stop()

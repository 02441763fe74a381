"""What a figure depends on besides the code: versions, device, threads, memory."""

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from dflash_jax.generate import bucket, undo_of
from experiments.pair import Pair, expert_leaves

PACKAGES = ("jax", "jaxlib", "flax", "numpy")


@dataclass(frozen=True)
class Machine:
    """Where a run happened.

    Attributes:
        device: as jax names it; of a CPU, which one: ratios too differ between processors.
        threads: CPUs that the process may use.
        commit: of the sources, with ``+changes`` if files differ from it; None without git.
    """

    device: str
    platform: str
    devices: int
    threads: int
    versions: dict[str, str]
    commit: str | None

    @property
    def is_cpu(self) -> bool:
        return self.platform == "cpu"


@dataclass(frozen=True)
class Memory:
    """Bytes.

    Attributes:
        peak: largest resident set of the process so far; ``device_peak``: of the accelerator, None if it does not say.
        target, experts, drafter: parameters; the experts are part of the target.
        caches: keys and values of one batch, target's and drafter's.
    """

    peak: int
    device_peak: int | None
    target: int
    experts: int
    drafter: int
    caches: int


def describe() -> Machine:
    """This machine, as jax sees it."""
    device = jax.devices()[0]
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    versions = {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in PACKAGES}
    return Machine(_name(device), device.platform, jax.device_count(), threads, versions, _commit())


def _name(device: jax.Device) -> str:
    """Names of virtual processors say little; family and model tell which one it is."""
    said = Path("/proc/cpuinfo")
    if device.platform != "cpu" or not said.is_file():
        return device.device_kind
    lines = (line.partition(":") for line in said.read_text().splitlines())
    first = {key.strip(): value.strip() for key, _, value in reversed([*lines])}
    known = {"family": first.get("cpu family"), "model": first.get("model")}
    kind = ", ".join(f"{word} {number}" for word, number in known.items() if number)
    return f"{device.device_kind} {first.get('model name', platform.machine())}{kind and f' ({kind})'}"


def measure_memory(pair: Pair, batch: int, tokens: int) -> Memory:
    """Memory of a loaded pair and of the caches of ``batch`` rows that grow to ``tokens`` tokens."""
    capacity, undo = bucket(tokens + pair.speculative.width), undo_of(pair.speculative.width)
    caches = [
        jax.eval_shape(lambda network=network: network.init_cache(batch, capacity, undo))
        for network in (pair.target, pair.drafter)
    ]
    statistics = jax.devices()[0].memory_stats() or {}
    return Memory(
        peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        device_peak=statistics.get("peak_bytes_in_use"),
        target=_nbytes(pair.params),
        experts=_nbytes([leaf for _, leaf in expert_leaves(pair.params)]),
        drafter=_nbytes(pair.draft_params),
        caches=_nbytes(caches),
    )


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _commit() -> str | None:
    """Commit of the checkout that this file is in."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()

"""How many CPU threads a process computes on: the number of CPUs it may use when jax starts. Standard library only."""

import contextlib
import os
from collections.abc import Iterator, Sequence


def available_cpus() -> list[int]:
    """The CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def first_cpus(threads: int | None) -> list[int]:
    """As many of the available CPUs; None: all.

    Raises:
        ValueError: if there are not so many, or less than one is asked for.
    """
    cpus = available_cpus()
    if threads is None:
        return cpus
    if not 1 <= threads <= len(cpus):
        raise ValueError(f"--threads {threads}: this process may use 1 to {len(cpus)} CPUs")
    return cpus[:threads]


@contextlib.contextmanager
def pinned(cpus: Sequence[int]) -> Iterator[None]:
    """Threads and processes started meanwhile inherit these CPUs. Does nothing where the system cannot pin."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

"""Execute the notebooks, each in a kernel of the running interpreter.

    python -m experiments.notebooks              # all, into a temporary folder
    python -m experiments.notebooks 02 --update  # those whose names begin so, over the committed .ipynb

Fails if a cell raises or warns, if a notebook takes longer than five minutes, or if a committed .ipynb has not the
source of its .py.
"""

import os
import re
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import nbformat
import tyro
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from experiments.notebooks.pairing import FOLDER, faults, output_faults, read_source, sources, stripped
from experiments.refusals import refusals

ROOT = FOLDER.parents[1]
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
CELL_TIMEOUT_S = 900
LONGEST_S = 300
"""Most seconds of a notebook."""


@dataclass(frozen=True)
class Args:
    """Execute the notebooks."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """beginnings of their names, such as 02; none: all"""
    update: bool = False
    """rewrite the committed .ipynb"""


class OwnKernel(AsyncKernelManager):
    """Knows no installed kernels: "python3" is then ipykernel's own, of the running interpreter."""

    def _kernel_spec_manager_default(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


def execute(source: Path) -> NotebookNode:
    """The notebook with outputs.

    Raises:
        CellExecutionError: a cell raised; CellTimeoutError, DeadKernelError: it did not come to an end.
    """
    notebook = read_source(source)
    client = NotebookClient(
        notebook,
        kernel_manager_class=OwnKernel,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(source.parent)}},
        timeout=CELL_TIMEOUT_S,
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute(env=_environment())
    return stripped(notebook)


def _environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def time_faults(source: Path, seconds: float) -> list[str]:
    """What is wrong with the time that a notebook took."""
    if seconds <= LONGEST_S:
        return []
    return [f"{source.name} took {seconds:.0f} s, more than {LONGEST_S}: do less in it, or try a machine that is idle"]


def main(args: Args) -> int:
    with refusals():
        chosen = sources(args.names)
    wrong = [] if args.update else [fault for source in chosen for fault in faults(source)]
    with tempfile.TemporaryDirectory() as folder:
        for source in chosen:
            started, cpu = time.perf_counter(), _cpu_s()
            target = (source.parent if args.update else Path(folder)) / f"{source.stem}.ipynb"
            try:
                notebook = execute(source)
            except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
                wrong.append(f"{source.name} does not run to its end")
                print(ESCAPES.sub("", f"{source.name}\n{error}"), file=sys.stderr, flush=True)
                continue
            seconds = time.perf_counter() - started
            found = output_faults(notebook, target) + time_faults(source, seconds)
            wrong += found
            if not found:
                nbformat.write(notebook, target)
            size = len(nbformat.writes(notebook)) / 1e3
            spent = f"{seconds:.0f} s, {_cpu_s() - cpu:.0f} s of CPU"
            print(f"{source.stem}: {spent}, {size:.0f} KB", flush=True)
    for fault in dict.fromkeys(wrong):
        print(f"FAILED {fault}", file=sys.stderr)
    if wrong and not args.update:
        print("make notebooks UPDATE=1 rewrites the .ipynb from the .py", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))

"""What the screens of the laboratory begin and end with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.definitions import LABEL
from experiments.laboratory.arguments import Common
from experiments.laboratory.study import write_json
from experiments.machine import Machine


def head(name: str, args: Common, machine: Machine) -> list[str]:
    """What the figures hold for, two lines; ``args`` are settled."""
    quick = "   QUICK: a first look, too few texts to tell neighbours apart" if args.quick else ""
    return [
        f"{name:<{LABEL}}{args.dtype}, batch 1   {args.max_new_tokens} tokens each at most   repeats {args.repeats}   "
        f"seed {args.seed}{quick}",
        f"{'device':<{LABEL}}{where(machine)}",
    ]


def where(machine: Machine) -> str:
    """Device, threads and version."""
    note = ": running on CPU, speeds are not comparable with an accelerator's" if machine.is_cpu else ""
    threads = "1 thread" if machine.threads == 1 else f"{machine.threads} threads"
    return f"{machine.device}, {threads}, jax {machine.versions['jax']}{note}"


def ratio(value: tuple[float, float, float]) -> str:
    """A speedup with the least and the largest of its repeats."""
    return f"{value[0]:.2f}x ({value[1]:.2f}-{value[2]:.2f})"


def close(
    console: Console,
    note: str,
    found: dict[str, Any],
    json: Path | None,
    draw: Callable[[], Path] | None = None,
) -> None:
    """Print the note and the command; write ``found``, whose ``command`` it is, and the picture if asked for."""
    console.print(note, markup=False)
    console.print(f"{'reproduce':<{LABEL}}{found['command']}", markup=False, soft_wrap=True)
    if json is not None:
        write_json(found, json)
        print(f"{'written':<{LABEL}}{json}")
    if draw is not None:
        print(f"{'written':<{LABEL}}{draw()}")

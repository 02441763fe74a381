"""What is in a checkpoint, tensor by tensor, and what becomes of each. Headers only: nothing is read or allocated.

python -m checkpoints.inspect DIR            # a target's folder or a drafter's
python -m checkpoints.inspect DIR --json
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from checkpoints.config import read_config
from checkpoints.contract import is_fc, look_alikes, setting
from checkpoints.errors import CheckpointError
from checkpoints.load import plan_drafter, plan_target
from checkpoints.reader import Reader, open_checkpoint
from checkpoints.rules import Assignment, Plan

PIPE_WIDTH = 180
"""Columns of the table where there is no terminal to fit."""


@dataclass(frozen=True)
class Row:
    """One tensor. ``use``: "expert", "resident", "skipped" or "unknown"; ``place``: its parameter, or the reason."""

    tensor: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    use: str
    place: str


@dataclass(frozen=True)
class Inspection:
    """All tensors of a folder, and what would keep it from loading."""

    folder: str
    kind: str
    note: str
    rows: list[Row]
    problems: list[str]

    def totals(self) -> dict[str, dict[str, int]]:
        """Per use, and in all: tensors and bytes."""
        uses = {
            use: [row for row in self.rows if row.use == use] for use in dict.fromkeys(row.use for row in self.rows)
        }
        uses["total"] = self.rows
        return {use: {"tensors": len(rows), "bytes": sum(row.bytes for row in rows)} for use, rows in uses.items()}


def inspect(folder: Path | str) -> Inspection:
    """Look at a folder.

    Raises:
        CheckpointError: if its files cannot be read; whatever else is wrong is in ``problems``.
    """
    reader, config = open_checkpoint(folder), read_config(folder)
    problems = look_alikes(config, reader)
    drafter = bool(problems) or setting(config, "target_layer_ids") is not None or any(map(is_fc, reader))
    plan, note = Plan(()), ""
    try:
        if drafter and not problems:
            plan, note = plan_drafter(reader, config)[2], "every tensor is resident"
        elif not drafter:
            plan, note = plan_target(reader, config)[2:]
    except CheckpointError as error:
        problems += error.problems
    except ValueError as error:
        problems.append(str(error))
    rows = [_row(reader, name, *use) for name, use in _uses(reader, plan).items()]
    return Inspection(str(folder), "drafter" if drafter else "target", note, rows, problems)


def _uses(reader: Reader, plan: Plan) -> dict[str, tuple[str, str]]:
    """Tensor -> (use, place), in the order of the files."""
    uses = dict.fromkeys(reader, ("unknown", ""))
    uses |= {name: ("skipped", reason) for name, reason in plan.skipped.items()}
    for assignment in plan.assignments:
        use = "expert" if assignment.rule.expert else "resident"
        uses |= {name: (use, _place(assignment)) for name in assignment.names}
    return uses


def _place(assignment: Assignment) -> str:
    first, how = assignment.paths[0], assignment.rule.transform.name
    if len(assignment.paths) > 1:
        first = f"{first} and {len(assignment.paths) - 1} more"
    return first if how == "identity" else f"{first} ({how})"


def _row(reader: Reader, name: str, use: str, place: str) -> Row:
    entry = reader.entries[name]
    return Row(name, entry.file.name, entry.code, entry.shape, entry.nbytes, use, place)


def show(found: Inspection, console: Console) -> None:
    """Print the table, the totals and the problems."""
    table = Table(title=found.folder, box=box.SIMPLE)
    for column in ("tensor", "dtype", "shape", "bytes", "use", "parameter, or why skipped"):
        table.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    for row in found.rows:
        table.add_row(row.tensor, row.dtype, str(list(row.shape)), f"{row.bytes:,}", row.use, row.place)
    console.print(table)
    for use, total in found.totals().items():
        console.print(f"{use:>9}: {total['tensors']:5} tensors {total['bytes']:18,} bytes", highlight=False)
    console.print(f"{found.kind}; {found.note or 'not loadable'}", highlight=False)
    for problem in found.problems:
        console.print(f"problem: {problem}", style="red", markup=False, highlight=False)


def as_json(found: Inspection) -> dict[str, Any]:
    """The same, for machines."""
    return asdict(found) | {"totals": found.totals()}


def main(folder: tyro.conf.Positional[Path], machine: Annotated[bool, tyro.conf.arg(name="json")] = False) -> int:
    """Print what is in a checkpoint and what becomes of it.

    Args:
        folder: a target's or a drafter's.
        machine: print JSON.

    Returns:
        The exit status: 0 if it would load.
    """
    try:
        found = inspect(folder)
    except CheckpointError as error:
        print(error)
        return 1
    if machine:
        print(json.dumps(as_json(found), indent=2))
    else:
        show(found, Console(width=None if sys.stdout.isatty() else PIPE_WIDTH))
    return 1 if found.problems else 0


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main))

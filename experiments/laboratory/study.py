"""All findings of one call of ablate_accept, and its machine-readable twins."""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from checkpoints.safetensors_file import write_text
from dflash_jax.rules import ACCEPT
from experiments.laboratory.arguments import Args
from experiments.laboratory.measure import Findings
from experiments.laboratory.ranking import best_lossless, pooled_lossless
from experiments.laboratory.rows import Row
from experiments.machine import Machine
from experiments.report import finite

MAY_MISS = ("proof", "total_variation", "kl", "not_argmax")
"""Fields of a row that are None where they are not measured; other fields that are null were nan."""


@dataclass(frozen=True)
class Study:
    """``args`` are settled, ``command`` repeats them; ``left_out`` says which rules have no row of their own."""

    command: str
    args: Args
    left_out: tuple[str, ...]
    machine: Machine
    findings: tuple[Findings, ...]

    @property
    def rows(self) -> list[Row]:
        return [row for one in self.findings for row in one.rows]


def warnings(study: Study) -> Iterator[str]:
    """What a reader should know before believing the figures."""
    for one in study.findings:
        if one.while_timing:
            yield (
                f"{one.names[0]}, block {one.block_size}: {one.while_timing} programs were compiled while timing: "
                "the speeds are too low"
            )
        if one.crowding:
            yield f"{one.names[0]}, block {one.block_size}: {one.crowding}"
        if any(row.kl_infinite for row in one.rows):
            yield f"{one.names[0]}: KL is infinite where an accepted draft lies outside the filters"


def payload(study: Study) -> dict[str, Any]:
    """The study as JSON values; what is not defined is null."""
    args = study.args
    same = ("max_new_tokens", "repeats", "top_k", "top_p", "min_p", "seed", "dtype", "quick")
    blocks = [{name: value for name, value in asdict(one).items() if name != "rows"} for one in study.findings]
    return finite(
        {
            "command": study.command,
            **{name: getattr(args, name) for name in same},
            "machine": asdict(study.machine),
            "rules": {
                name: dict(lossless=rule.lossless, pathwise=rule.pathwise, parameters=asdict(rule))
                for name, rule in ACCEPT.items()
                if any(row.rule == name for row in study.rows)
            },
            "left_out": list(study.left_out),
            "warnings": list(warnings(study)),
            "blocks": blocks,
            "rows": [_labelled(row) for row in study.rows],
            "best_lossless": [asdict(best) for best in best_lossless(study.rows)],
            "pooled_lossless": [asdict(pooled) for pooled in pooled_lossless(study.rows)],
        }
    )


def _labelled(row: Row) -> dict[str, Any]:
    """Fields of a row; ``label`` is the word that the screen has for ``lossless``, and ``kl_infinite`` tells a KL that
    is infinite, and null because JSON has no such number, from one that was not measured."""
    values = asdict(row)
    said = {name: values[name] for name in ("pair", "rule")} | {"label": row.label} | values
    return said | {"kl_infinite": row.kl_infinite}


def row_from(values: dict[str, Any]) -> Row:
    """A row as :func:`payload` wrote it."""
    known = {field.name: values[field.name] for field in fields(Row)}
    if values.get("kl_infinite"):
        known["kl"] = math.inf
    return Row(**{name: math.nan if value is None and name not in MAY_MISS else value for name, value in known.items()})


def write_json(found: dict[str, Any], path: Path) -> None:
    """Write under a temporary name, then rename: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(found, indent=2) + "\n")


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """A line per row under the names of its fields; what is not defined is empty. Lists are in the JSON only."""
    text = io.StringIO()
    columns = [name for name, value in _labelled(rows[0]).items() if not isinstance(value, list)] if rows else []
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: "" if value is None else value for name, value in finite(_labelled(row)).items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text.getvalue())

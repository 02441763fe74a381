"""Several pairs on one screen: a row each, from the same reports as the summaries."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from checkpoints.safetensors_file import write_text
from experiments.report import Report, payload
from experiments.summary import drawn, warnings

WIDTH = 120
COLUMNS = (
    *("pair", "family", "block", "tok/verify", "verified", "accepted"),
    *("plain", "spec", "speedup", "agreement", "union"),
)


def show(reports: Sequence[Report], console: Console | None = None) -> None:
    """Print the table, what its figures hold for, and every pair's warnings."""
    console = console or Console(width=WIDTH, highlight=False)
    first, facts = reports[0].speculative.conditions, reports[0].pair
    rule = f"rule {facts.rule}{'' if facts.lossless else ' (LOSSY)'}, {drawn(first)}"
    rule = "greedy" if facts.rule == "greedy" else rule
    table = Table(
        title=f"{first.dtype}, batch {first.batch}, {first.device}, {rule}: a row per pair",
        box=None,
    )
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in COLUMNS[:2] else "right", no_wrap=True)
    for report in reports:
        table.add_row(*cells(payload(report)))
    console.print(table)
    console.print(
        "tok/verify: tokens delivered / verifications; plain, spec: median tok/s; union: experts per layer that a "
        "verification reads"
    )
    for report in reports:
        for words in warnings(report):
            console.print(f"{report.pair.names[0]}: {words}", markup=False)


def cells(found: dict[str, Any]) -> list[str]:
    """The row of what run_spec writes of one pair."""
    agreed, texts = found["agreement"], found["prompts"]
    return [
        found["names"][0],
        found["family"],
        f"1-{found['block_size']}" if found.get("adaptive") else str(found["block_size"]),
        _number(found["acceptance_length"], ".2f"),
        f"{found['verified_tokens']:,}/{found['verifies']:,}",
        _number(found["acceptance_ratio"], ".0%"),
        _number(found["plain_tok_s"], ".0f"),
        _number(found["spec_tok_s"], ".0f"),
        _number(found["speedup"], ".2f", "x"),
        "-" if agreed is None else f"{round(agreed * texts)}/{texts}",
        _number(found["union_mean"], ".2f", f"/{found['experts']}"),
    ]


def _number(value: float | None, how: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{how}}{unit}"


def write_json(command: str, reports: Sequence[Report], path: Path) -> None:
    """``{"command", "pairs": {name: what run_spec writes of one}}``, but for the peak memory: the process is shared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {report.pair.names[0]: payload(report) for report in reports}
    for each in found.values():
        each["memory_bytes"]["peak"] = None
    write_text(path, json.dumps({"command": command, "pairs": found}, indent=2) + "\n")

"""The tables of docs/accept_rules.md, made of a committed result.

    python -m experiments.laboratory.markdown experiments/results/ablate_accept.json --into docs/accept_rules.md

prints the tables, or puts them between the two marks of a page.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from checkpoints.safetensors_file import write_text
from experiments.laboratory.rows import Best
from experiments.laboratory.study import row_from
from experiments.laboratory.tables import COLUMNS, cells, in_words

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


@dataclass(frozen=True)
class Args:
    """Where the figures are, and where they go."""

    result: tyro.conf.Positional[Path]
    """what ablate_accept wrote with --json"""
    into: Path | None = None
    """a page with the two marks; none: print"""


def tables(found: dict[str, Any]) -> str:
    """A Markdown table per pair and block size, the command that made them, and which lossless rule accepts most."""
    parts = [_head(found), *(_table(found, block) for block in found["blocks"]), _best(found)]
    return "\n".join(line for part in parts for line in part)


def _head(found: dict[str, Any]) -> Iterator[str]:
    machine, prompts = found["machine"], found["blocks"][0]["prompts"]
    yield f"`{found['command']}`"
    yield ""
    yield (
        f"{found['dtype']}, batch 1, {machine['device']}, {machine['threads']} thread(s), {prompts} prompts of at most "
        f"{found['max_new_tokens']} tokens, {found['repeats']} repeats, seed {found['seed']}."
    )


def _table(found: dict[str, Any], block: dict[str, Any]) -> Iterator[str]:
    pair, size = block["names"][0], block["block_size"]
    yield ""
    yield f"**{pair}**, block {size}"
    yield ""
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "|" + "---|" * len(COLUMNS)
    for row in map(row_from, found["rows"]):
        if (row.pair, row.block_size) == (pair, size):
            words = [f"**{word}**" if word == "LOSSY" else word for word in cells(row)]
            yield "| " + " | ".join([f"{row.temperature:g}", *words]) + " |"


def _best(found: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "The lossless rule that accepts most:"
    yield ""
    for best in found["best_lossless"]:
        yield f"- {in_words(Best(**best))}"


def put(page: str, text: str) -> str:
    """The page with ``text`` between its marks.

    Raises:
        ValueError: if it has not both marks, in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(args: Args) -> None:
    text = tables(json.loads(args.result.read_text(encoding="utf-8")))
    if args.into is None:
        print(text)
    else:
        write_text(args.into, put(args.into.read_text(encoding="utf-8"), text))


if __name__ == "__main__":
    main(tyro.cli(Args, prog="python -m experiments.laboratory.markdown", description=__doc__))

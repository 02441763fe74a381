"""The tables of docs/accept_rules.md, made of committed results.

    python -m experiments.laboratory.markdown experiments/results/ablate_accept.json --into docs/accept_rules.md

prints the tables of what ablate_accept, sweep_tree or ablate_adaptive wrote, or puts them between their two marks of a
page.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from checkpoints.safetensors_file import write_text
from experiments.laboratory.rows import Best
from experiments.laboratory.screen import ratio
from experiments.laboratory.study import row_from
from experiments.laboratory.tables import COLUMNS, cells, in_words
from experiments.refusals import refusals


@dataclass(frozen=True)
class Args:
    """Where the figures are, and where they go."""

    result: tyro.conf.Positional[Path]
    """what ablate_accept, sweep_tree or ablate_adaptive wrote with --json"""
    into: Path | None = None
    """a page with the two marks; none: print"""


def kind_of(found: dict[str, Any]) -> str:
    """Which program wrote it: the name of its marks."""
    return next(word.rpartition(".")[2] for word in found["command"].split() if word.startswith("experiments."))


def tables(found: dict[str, Any]) -> str:
    """Markdown tables, and the command that made them.

    Raises:
        ValueError: for a result of another program.
    """
    made = {"ablate_accept": _accept, "sweep_tree": _trees, "ablate_adaptive": _adaptive}
    kind = kind_of(found)
    if kind not in made:
        raise ValueError(f"a result of {kind}: expected one of {', '.join(made)}")
    return "\n".join(made[kind](found))


def _accept(found: dict[str, Any]) -> Iterator[str]:
    """A table per pair and block size, and which lossless rule accepts most."""
    yield from _head(found, found["blocks"][0]["prompts"])
    for block in found["blocks"]:
        yield from _table(found, block)
    yield from _best(found)


def _trees(found: dict[str, Any]) -> Iterator[str]:
    yield from _head(found, found["pairs"][0]["prompts"])
    yield ""
    yield from _rule("pair", "drafts", "tok/verify", "verified", "round", "verify", "union", "speedup")
    for pair in found["pairs"]:
        for arm in pair["arms"]:
            drafts = f"chain of {arm['width'] - 1}" if arm["budget"] is None else f"tree of {arm['budget']}"
            cells = [pair["names"][0], drafts, f"{arm['acceptance_length']:.2f}"]
            cells += [f"{arm['verified_tokens']}/{arm['verifies']}", f"{arm['break_even']:.2f}"]
            cells += [f"{arm['verify_ratio']:.2f}x", f"{arm['union']:.2f} of {pair['experts']}", ratio(arm["speedup"])]
            yield "| " + " | ".join(cells) + " |"
    yield ""
    for pair in found["pairs"]:
        yield f"- {pair['names'][0]}: {pair['verdict']}."


def _adaptive(found: dict[str, Any]) -> Iterator[str]:
    yield from _head(found, found["outcomes"][0]["prompts"])
    yield ""
    yield from _rule("pair", "drafter", "fixed block", "adaptive", "tok/round", "adaptive rounds by block")
    for each in found["outcomes"]:
        every = sum(each["rounds"].values())
        rounds = ", ".join(f"{size}: {count / every:.0%}" for size, count in each["rounds"].items())
        cells = [
            each["pair"],
            each["drafter"],
            f"{each['block_size']}: {ratio(each['fixed'])}",
            ratio(each["adaptive"]),
        ]
        yield "| " + " | ".join([*cells, f"{each['acceptance_length']:.2f}", rounds]) + " |"


def _rule(*columns: str) -> Iterator[str]:
    """The two lines that begin a table."""
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)


def _head(found: dict[str, Any], prompts: int) -> Iterator[str]:
    machine = found["machine"]
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
    yield from _rule(*COLUMNS)
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


def put(page: str, text: str, kind: str) -> str:
    """The page with ``text`` between its marks.

    Raises:
        ValueError: if it has not both marks, in order.
    """
    first, last = f"<!-- {kind}: begin -->", f"<!-- {kind}: end -->"
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"no {first} ... {last} in the page; add both lines where the tables are to stand")
    return f"{before}{first}\n{text}\n{last}{after}"


def main(args: Args) -> None:
    with refusals():
        found = json.loads(args.result.read_text(encoding="utf-8"))
        text = tables(found)
        if args.into is None:
            print(text)
        else:
            write_text(args.into, put(args.into.read_text(encoding="utf-8"), text, kind_of(found)))


if __name__ == "__main__":
    main(tyro.cli(Args, prog="python -m experiments.laboratory.markdown", description=__doc__))

"""The tables of docs/accept_rules.md, made of committed results.

    python -m experiments.laboratory.markdown experiments/results/ablate_accept.json --into docs/accept_rules.md

prints the tables of what ablate_accept, sweep_block, sweep_tree or ablate_adaptive wrote, or puts them between the
two marks of a page that name the file.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from checkpoints.safetensors_file import write_text
from dflash_jax.settings import SamplingParams
from experiments.arguments import Switch
from experiments.laboratory.ranking import TITLE, lines
from experiments.laboratory.screen import ratio
from experiments.laboratory.study import row_from
from experiments.laboratory.tables import COLUMNS, cells, number
from experiments.refusals import refusals
from experiments.summary import filters

KINDS = ("ablate_accept", "sweep_block", "sweep_tree", "ablate_adaptive")
EXPECTED = f"expected one of {', '.join(KINDS)}: run python -m experiments.NAME --json FILE"


@dataclass(frozen=True)
class Args:
    """Where the figures are, and where they go."""

    result: tyro.conf.Positional[Path]
    """what one of the four wrote with --json"""
    into: Path | None = None
    """a page with the two marks; none: print"""
    summary: Switch = False
    """of ablate_accept only which rule accepts most, without its tables"""


def read(path: Path, expected: str) -> str:
    """The text of a file.

    Raises:
        ValueError: if there is none.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file; {expected}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text; {expected}") from None


def read_result(path: Path) -> dict[str, Any]:
    """What one of the four wrote.

    Raises:
        ValueError: naming the file, what it is and what was expected.
    """
    try:
        found = json.loads(read(path, EXPECTED))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); {EXPECTED}") from None
    try:
        kind_of(found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return found


def kind_of(found: Any) -> str:
    """Which program wrote it.

    Raises:
        ValueError: if it was none of the four.
    """
    command = str(found.get("command", "")) if isinstance(found, dict) else ""
    modules = [word for word in command.split() if word.startswith("experiments.")]
    kind = modules[0].rpartition(".")[2] if modules else ""
    if kind not in KINDS:
        raise ValueError(f"a result of {kind or command or 'no program'}; {EXPECTED}")
    return kind


def tables(found: dict[str, Any], summary: bool = False) -> str:
    """Markdown tables, and the command that made them; ``summary``: see :class:`Args`.

    Raises:
        ValueError: for a result of another program.
    """
    made = dict(zip(KINDS, (_summary if summary else _accept, _blocks, _trees, _adaptive), strict=True))
    return "\n".join(made[kind_of(found)](found))


def _accept(found: dict[str, Any]) -> Iterator[str]:
    """A table per pair and block size, and which lossless rule accepts most."""
    yield from _head(found, found["blocks"][0]["prompts"])
    for block in found["blocks"]:
        yield from _table(found, block)
    yield from _best(found)


def _summary(found: dict[str, Any]) -> Iterator[str]:
    yield from _head(found, found["blocks"][0]["prompts"])
    yield from _best(found)


def _blocks(found: dict[str, Any]) -> Iterator[str]:
    """A line per pair and block size, and the verdicts."""
    yield from _head(found, found["pairs"][0]["prompts"])
    yield ""
    yield from _rule("pair", "block", "tok/verify", "predicted", "verified", "speedup", "predicted", "verify", "union")
    for pair in found["pairs"]:
        for block in pair["blocks"]:
            cells = [pair["names"][0], str(block["size"]), f"{block['acceptance_length']:.2f}"]
            cells += [number(block["predicted_length"], ".2f"), f"{block['verified_tokens']}/{block['verifies']}"]
            cells += [ratio(block["speedup"]), number(block["predicted_speedup"], ".2f", "x")]
            cells += [f"{block['verify_ratio']:.2f}x", f"{block['union']:.2f}"]
            yield "| " + " | ".join(cells) + " |"
    yield ""
    for pair in found["pairs"]:
        yield f"- {pair['names'][0]}: {pair['verdict']}."


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
        for verdict in pair["verdicts"]:
            yield f"- {pair['names'][0]}: {verdict}."


def _adaptive(found: dict[str, Any]) -> Iterator[str]:
    yield from _head(found, found["outcomes"][0]["prompts"])
    yield ""
    yield from _rule("pair", "drafter", "fixed block", "adaptive", "tok/round", "call", "adaptive rounds by block")
    for each in found["outcomes"]:
        every = sum(each["rounds"].values())
        rounds = ", ".join(f"{size}: {count / every:.0%}" for size, count in each["rounds"].items())
        cells = [
            each["pair"],
            each["drafter"],
            f"{each['block_size']}: {ratio(each['fixed'])}",
            ratio(each["adaptive"]),
        ]
        yield "| " + " | ".join([*cells, f"{each['acceptance_length']:.2f}", f"{each['call']:.1f}", rounds]) + " |"


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
        f"{found['max_new_tokens']} tokens, {found['repeats']} repeats, seed {found['seed']}. "
        f"{_rules(found)}Tokens: {_drawn(found)}."
    )


def _laws(found: dict[str, Any]) -> dict[str, bool]:
    """Rule -> whether it is lossless; none where the rule is not among the conditions."""
    if "rules" in found:
        return {name: rule["lossless"] for name, rule in found["rules"].items()}
    return {found["rule"]: found["lossless"]} if "rule" in found else {}


def _rules(found: dict[str, Any]) -> str:
    laws = _laws(found)
    parts = []
    for lossless, word in ((True, "lossless"), (False, "**LOSSY**")):
        if names := [name for name, law in laws.items() if law == lossless]:
            parts.append(f"{', '.join(names)} ({word})")
    return f"Rule{'s' if len(laws) > 1 else ''}: {'; '.join(parts)}. " if parts else ""


def _drawn(found: dict[str, Any]) -> str:
    """How tokens were drawn. Filters cut nothing of a certainty, but for lossy rules: theirs is never one."""
    if "temperature" in found:
        temperatures = [found["temperature"]]
    else:
        temperatures = dict.fromkeys(row["temperature"] for row in found["rows"])
    greedy = {each: SamplingParams(each).greedy for each in temperatures}
    words = ["greedy" if greedy[each] else f"temperature {each:g}" for each in temperatures]
    if not all(greedy.values()) or not all(_laws(found).values()):
        words += filters(found["top_k"], found["top_p"], found["min_p"])
    return ", ".join(words)


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
    yield TITLE
    yield ""
    for words in lines([row_from(row) for row in found["rows"]]):
        yield f"- {words}"


def put(page: str, text: str, name: str) -> str:
    """The page with ``text`` between its marks.

    Raises:
        ValueError: if it has not both marks, in order.
    """
    first, last = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise ValueError(f"no {first} ... {last} in the page; add both lines where the tables are to stand")
    return f"{before}{first}\n{text}\n{last}{after}"


def main(args: Args) -> None:
    with refusals():
        found = read_result(args.result)
        page = args.into and read(args.into, "expected a page with the two marks, such as docs/accept_rules.md")
        try:
            text = tables(found, args.summary)
        except KeyError as missing:
            again = f"another version wrote it; measure again: {found['command']}"
            raise ValueError(f"{args.result} has no {missing}: {again}") from None
        if page is None:
            print(text)
        else:
            write_text(args.into, put(page, text, args.result.stem))


if __name__ == "__main__":
    main(tyro.cli(Args, prog="python -m experiments.laboratory.markdown", description=__doc__))

"""Prompts of an experiment: one text, or rows of a JSON-lines file."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer


@dataclass(frozen=True)
class Row:
    """One prompt: ``where`` it comes from (file and line), its ``split`` if the file says one, and its text."""

    where: str
    split: str | None
    text: str


def read_rows(file: Path) -> list[Row]:
    """The rows of a JSON-lines file: objects with ``text`` and, if they like, ``split``. Blank lines are skipped.

    Raises:
        ValueError: naming file and line of the first row that is not such an object, or whose text is empty.
    """
    if not file.is_file():
        raise ValueError(f'{file} is not a file; expected JSON lines like {{"text": "..."}}')
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            rows.append(_row(line, f"{file} line {number}"))
    if not rows:
        raise ValueError(f"{file} has no rows")
    return rows


def _row(line: str, where: str) -> Row:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds a {type(value).__name__}, expected an object with 'text'")
    text = value.get("text")
    if not isinstance(text, str):
        raise ValueError(f"{where}: expected a string under 'text'; found keys {sorted(value)}")
    if not text:
        raise ValueError(f"{where}: 'text' is empty")
    return Row(where, value.get("split"), text)


def of_split(rows: Sequence[Row], split: str) -> list[Row]:
    """The rows of one split.

    Raises:
        ValueError: naming the splits there are, if none is of this one.
    """
    chosen = [row for row in rows if row.split == split]
    if not chosen:
        known = ", ".join(sorted({row.split for row in rows if row.split})) or "none: its rows have no 'split'"
        raise ValueError(f"no prompt of split {split!r}; splits of the file: {known}")
    return chosen


def encode(rows: Sequence[Row], tokenizer: Tokenizer, room: int | None) -> list[list[int]]:
    """Token ids of every row; the text is taken as it is, without a chat template.

    Args:
        room: the model's context limit in tokens, None if it has none.

    Raises:
        ValueError: naming the row, if it has no tokens or leaves no room for one more.
    """
    prompts = [tokenizer.encode(row.text).ids for row in rows]
    for row, ids in zip(rows, prompts, strict=True):
        if not ids:
            raise ValueError(f"{row.where}: the tokenizer makes no token of it")
        if room is not None and len(ids) >= room:
            raise ValueError(f"{row.where}: {len(ids)} tokens leave no room below the context limit of {room}")
    return prompts


def fingerprint(prompts: Sequence[Sequence[int]]) -> str:
    """16 hex digits that stand for exactly these token ids in this order."""
    return hashlib.sha256(json.dumps([list(map(int, ids)) for ids in prompts]).encode()).hexdigest()[:16]


def batches(prompts: Sequence[list[int]], size: int) -> list[list[list[int]]]:
    """The prompts in order, ``size`` rows at a time; the last batch may be smaller."""
    return [list(prompts[at : at + size]) for at in range(0, len(prompts), size)]

"""The tables of docs/accept_rules.md are those of the committed results."""

import json
from pathlib import Path

import pytest

from experiments.laboratory.markdown import kind_of, put, tables

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["ablate_accept", "sweep_tree", "ablate_adaptive"])
def test_the_page_has_the_committed_figures(name: str) -> None:
    """It is redone with ``python -m experiments.laboratory.markdown``, not by hand."""
    page = (ROOT / "docs" / "accept_rules.md").read_text()
    found = json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text())
    assert kind_of(found) == name
    assert put(page, tables(found), name) == page


def test_a_page_takes_the_tables_between_its_marks() -> None:
    page = "# Rules\n<!-- x: begin -->\nold\n<!-- x: end -->\nmore\n"
    assert put(page, "new", "x") == "# Rules\n<!-- x: begin -->\nnew\n<!-- x: end -->\nmore\n"
    with pytest.raises(ValueError, match="<!-- x: begin -->"):
        put("# Rules", "new", "x")


def test_another_result_is_refused() -> None:
    with pytest.raises(ValueError, match="a result of bench: expected one of ablate_accept"):
        tables({"command": "python -m experiments.bench --json bench.json"})

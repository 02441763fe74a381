"""The tables of docs/accept_rules.md are those of the committed results, and say what they hold for."""

import json
from pathlib import Path

import pytest

from experiments.laboratory.markdown import Args, kind_of, main, put, tables

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["ablate_accept", "default_rule", "sweep_block", "sweep_tree", "ablate_adaptive"])
def test_the_page_has_the_committed_figures(name: str) -> None:
    """It is redone with ``python -m experiments.laboratory.markdown``, not by hand."""
    summary = name == "default_rule"
    page = (ROOT / "docs" / "accept_rules.md").read_text()
    found = json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text())
    assert kind_of(found) == ("ablate_accept" if summary else name)
    assert put(page, tables(found, summary), name) == page


def test_a_page_takes_the_tables_between_its_marks() -> None:
    page = "# Rules\n<!-- x: begin -->\nold\n<!-- x: end -->\nmore\n"
    assert put(page, "new", "x") == "# Rules\n<!-- x: begin -->\nnew\n<!-- x: end -->\nmore\n"
    with pytest.raises(ValueError, match="<!-- x: begin -->"):
        put("# Rules", "new", "x")


def head(**conditions: object) -> str:
    """The sentences about conditions of a result without rows."""
    same = dict(dtype="float32", max_new_tokens=8, repeats=3, seed=4, top_k=0, top_p=1.0, min_p=0.0)
    machine = dict(device="cpu", threads=1)
    found = dict(command="python -m experiments.ablate_accept", machine=machine, blocks=[dict(names="ab", prompts=2)])
    found["blocks"][0]["block_size"] = 5
    return tables(found | dict(rules={}, rows=[], best_lossless=[]) | same | conditions).splitlines()[2]


def test_the_head_says_how_tokens_were_drawn() -> None:
    assert head(temperature=0.0).endswith("3 repeats, seed 4. Tokens: greedy.")
    assert head(temperature=0.7).endswith("Tokens: temperature 0.7.")
    cut = dict(top_k=40, top_p=0.9, min_p=0.05)
    assert head(temperature=1.0, **cut).endswith("Tokens: temperature 1, top-k 40, top-p 0.9, min-p 0.05.")
    assert head(temperature=1.0, top_k=-1).endswith("Tokens: temperature 1."), "-1 keeps all tokens"


def test_the_head_names_the_rules_and_their_law() -> None:
    laws = dict(greedy=dict(lossless=True), tree=dict(lossless=True), typical=dict(lossless=False))
    both = "Rules: greedy, tree (lossless); typical (**LOSSY**). Tokens: greedy"
    assert head(rules=laws, temperature=0.0).endswith(f"{both}.")
    assert head(rules=laws, temperature=0.0, top_k=2).endswith(f"{both}, top-k 2."), "the lossy rule heeds it"
    laws.pop("typical")
    assert head(rules=laws, temperature=0.0, top_k=2).endswith("Rules: greedy, tree (lossless). Tokens: greedy.")


def test_another_result_is_refused() -> None:
    with pytest.raises(ValueError, match="a result of bench; expected one of ablate_accept"):
        tables({"command": "python -m experiments.bench --json bench.json"})


NOT_RESULTS = {
    "of another program": ('{"command": "python tests/x.py --json x.json"}', "a result of python tests/x.py --json"),
    "of no program": ("[1]", "a result of no program"),
    "not JSON": ("# Rules", "is not JSON (Expecting value: line 1"),
    "not text": (b"\xff\xfe", "is not text"),
    "missing": (None, "is not a file"),
}


@pytest.mark.parametrize("name", NOT_RESULTS)
def test_what_is_no_result_is_one_line(name, tmp_path, capsys) -> None:
    content, words = NOT_RESULTS[name]
    file = tmp_path / "x.json"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit) as stopped:
        main(Args(file))
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {file}")
    assert words in line
    assert line.endswith("run python -m experiments.NAME --json FILE")


def test_a_result_of_another_version_is_one_line(tmp_path, capsys) -> None:
    command = "python -m experiments.sweep_tree --json x.json"
    (tmp_path / "x.json").write_text(json.dumps({"command": command}))
    with pytest.raises(SystemExit):
        main(Args(tmp_path / "x.json"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: {tmp_path / 'x.json'} has no 'pairs': another version wrote it; measure again: {command}"


def test_a_page_that_is_not_there_is_one_line(tmp_path, capsys) -> None:
    result = ROOT / "experiments" / "results" / "sweep_tree.json"
    with pytest.raises(SystemExit) as stopped:
        main(Args(result, into=tmp_path / "page.md"))
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / 'page.md'} is not a file; expected a page with the two marks")
    assert not (tmp_path / "page.md").exists()

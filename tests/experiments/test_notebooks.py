"""The committed notebooks: paired, executed, small. Executing them is `make notebooks`."""

import importlib
import json

import jupytext
import nbformat
import pytest

from experiments.notebooks.pairing import FOLDER, METADATA, faults, read_executed, read_source, sources

every = pytest.mark.parametrize("source", sources(), ids=lambda source: source.stem)


def test_there_are_five():
    assert [source.name[:2] for source in sources()] == ["01", "02", "03", "04", "05"]
    assert {file.stem for file in FOLDER.glob("*.ipynb")} == {source.stem for source in sources()}


@every
def test_pair_is_fresh_and_executed(source):
    assert faults(source) == []
    cells = [cell for cell in read_executed(source.with_suffix(".ipynb")).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs) >= 2


@every
def test_opens_with_what_it_decides(source):
    first = read_source(source).cells[0]
    assert first.cell_type == "markdown"
    assert "**After this notebook you can decide:**" in first.source


@every
def test_an_editor_that_saves_both_puts_nothing_of_its_own_into_the_source(source):
    notebook = read_executed(source.with_suffix(".ipynb"))
    saved = jupytext.writes(notebook, fmt="py:percent")
    assert saved.split() == source.read_text(encoding="utf-8").split()  # but for blank lines between cells


def test_the_speeds_of_the_study_are_the_committed_ones():
    """Notebook 03 prints them from the result file, which can be measured anew after it."""
    study = json.loads((FOLDER.parent / "results" / "ablate_accept.json").read_text())
    outputs = [
        each for cell in read_executed(FOLDER / "03_accept_rules.ipynb").cells for each in cell.get("outputs", ())
    ]
    (shown,) = (each.text.splitlines() for each in outputs if study["command"] in each.get("text", ""))
    for row in study["rows"]:
        if row["pair"] == "tiny-glm4-moe" and row["rule"] != "plain":
            (line,) = (line.split()[1:] for line in shown if line.split()[0] == row["rule"])
            assert line[(0.0, 0.7, 1.0).index(row["temperature"])] == f"{row['ratio']:.2f}x"


@pytest.fixture
def pair(tmp_path):
    """A small pair without a fault."""
    source = tmp_path / "01_small.py"
    source.write_text("# %% [markdown]\n# Words\n\n# %%\nprint(1)\n")
    notebook = read_source(source)
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", name="stdout", text="1\n")]
    nbformat.write(notebook, source.with_suffix(".ipynb"))
    return source


def rewrite(source, change):
    executed = source.with_suffix(".ipynb")
    notebook = nbformat.read(executed, as_version=4)
    change(notebook)
    nbformat.write(notebook, executed)


def test_a_pair_without_fault(pair):
    assert faults(pair) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda book: book.cells[1].update(source="print(2)"), "source of cell 2"),
        (lambda book: book.cells.pop(), "has 1 cells"),
        (lambda book: book.cells[1].update(outputs=[]), "no outputs"),
        (lambda book: book.cells[1].outputs[0].update(name="stderr"), "error or a warning"),
        (lambda book: book.cells[1].outputs[0].update(text="/home/someone/file.py"), "path of the machine"),
        (lambda book: book.cells[1].outputs[0].update(text="long " * 100_000), "bytes, more than"),
        (lambda book: book.metadata.update(kernelspec={"name": "other", "display_name": "Other"}), "metadata"),
    ],
)
def test_faults_are_named(pair, change, words):
    rewrite(pair, change)
    assert any(words in fault for fault in faults(pair))


def test_a_missing_half_is_named(pair):
    pair.with_suffix(".ipynb").unlink()
    assert faults(pair) == ["01_small.ipynb is missing"]


def test_unknown_beginnings_are_refused():
    with pytest.raises(ValueError, match="no notebook begins with '9'; there are 01_"):
        sources(("9",))


def test_metadata_names_no_version():
    assert METADATA["language_info"] == {"name": "python"}


@pytest.fixture
def program():
    """The program that executes them."""
    pytest.importorskip("nbclient")
    return importlib.import_module("experiments.notebooks.__main__")


def test_an_unknown_beginning_is_one_line(program, capsys):
    with pytest.raises(SystemExit) as stopped:
        program.main(program.Args(("99",)))
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no notebook begins with '99'; there are 01_block_drafting, ")


@pytest.mark.parametrize(("seconds", "status"), [(300, 0), (301, 1)])
def test_a_notebook_of_more_than_five_minutes_fails(program, pair, monkeypatch, capsys, seconds, status):
    clock = iter([1000.0, 1000.0 + seconds])
    monkeypatch.setattr(program, "sources", lambda names: [pair])
    monkeypatch.setattr(program, "execute", lambda source: read_executed(source.with_suffix(".ipynb")))
    monkeypatch.setattr(program.time, "perf_counter", lambda: next(clock))
    assert program.main(program.Args()) == status
    shown = capsys.readouterr()
    assert f"01_small: {seconds} s" in shown.out
    assert ("FAILED 01_small.py took 301 s, more than 300" in shown.err) == bool(status)

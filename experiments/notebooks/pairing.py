"""Notebooks as pairs of files: `NN_name.py` (jupytext's py:percent) is the source, `NN_name.ipynb` its last execution.

What changes with the machine or the moment and is not shown (times, versions, random cell ids) is not kept, so that
executing again changes outputs only.
"""

import re
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
LARGEST = 400_000
"""Most bytes of a committed notebook."""

METADATA = {
    "jupytext": {"cell_metadata_filter": "-all", "formats": "ipynb,py:percent", "notebook_metadata_filter": "-all"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
PATHS = re.compile(r"(?<![\w.<])/(?:home|root|tmp|work|usr|opt|Users|mnt|var)/[\w./+-]+")


def sources(names: tuple[str, ...] = (), folder: Path = FOLDER) -> list[Path]:
    """The notebooks in order; of them only those whose name begins with one of ``names``, if any are given.

    Raises:
        ValueError: a beginning that fits none.
    """
    every = sorted(folder.glob("[0-9][0-9]_*.py"))
    for name in names:
        if not any(file.name.startswith(name) for file in every):
            raise ValueError(f"no notebook begins with {name!r}; there are {', '.join(file.stem for file in every)}")
    return [file for file in every if not names or file.name.startswith(names)]


def read_source(file: Path) -> NotebookNode:
    """The cells of a ``.py``, without outputs."""
    return stripped(jupytext.reads(file.read_text(encoding="utf-8"), fmt="py:percent"))


def read_executed(file: Path) -> NotebookNode:
    """A committed ``.ipynb``."""
    return nbformat.read(file, as_version=4)


def stripped(notebook: NotebookNode) -> NotebookNode:
    """Without what differs from one execution to the next but is no output."""
    notebook.nbformat, notebook.nbformat_minor, notebook.metadata = 4, 5, nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.metadata, cell["id"] = NotebookNode(), f"cell-{number:02d}"
        for output in cell.get("outputs", ()):
            if "metadata" in output:
                output.metadata = NotebookNode()
    return notebook


def faults(source: Path) -> list[str]:
    """What is wrong with a committed pair; nothing is executed."""
    executed = source.with_suffix(".ipynb")
    if not executed.is_file():
        return [f"{executed.name} is missing"]
    wanted, found = read_source(source), read_executed(executed)
    pairs = zip(wanted.cells, found.cells, strict=False)
    changed = [i for i, (a, b) in enumerate(pairs, start=1) if (a.cell_type, a.source) != (b.cell_type, b.source)]
    wrong = []
    if len(wanted.cells) != len(found.cells):
        wrong.append(f"{executed.name} has {len(found.cells)} cells, {source.name} {len(wanted.cells)}")
    if changed:
        wrong.append(f"{executed.name}: the source of cell {changed[0]} is not that of {source.name}")
    if found.metadata != METADATA:
        wrong.append(f"{executed.name}: metadata of another tool or machine")
    return wrong + output_faults(found, executed)


def output_faults(notebook: NotebookNode, file: Path) -> list[str]:
    """What is wrong with the outputs of an executed notebook."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(f"{output.get('text', '')}{output.get('data', {}).get('text/plain', '')}\n" for output in outputs)
    size = len(nbformat.writes(notebook).encode())
    wrong = []
    if not outputs:
        wrong.append(f"{file.name} has no outputs")
    if any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs):
        wrong.append(f"{file.name} shows an error or a warning")
    if path := PATHS.search(text):
        wrong.append(f"{file.name} shows a path of the machine: {path[0]}")
    if size > LARGEST:
        wrong.append(f"{file.name} has {size:,} bytes, more than {LARGEST:,}")
    return wrong

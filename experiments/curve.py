"""Learning curves from a run's ``log.jsonl``."""

import json
from pathlib import Path

import matplotlib.pyplot as plt


def plot_curve(log: Path, image: Path, *, x: str, lines: dict[str, str]) -> None:
    """One panel per entry of ``lines`` (key in the log -> label with its unit), against the key ``x``.

    Of rows that a resumed run repeats, the last counts.
    """
    rows = {}
    for text in log.read_text().splitlines():
        row = json.loads(text)
        rows[row[x]] = row
    points = [rows[key] for key in sorted(rows)]
    columns = min(len(lines), 2)
    rows_of_panels = -(-len(lines) // columns)
    size = (5 * columns, 3.3 * rows_of_panels)
    figure, panels = plt.subplots(rows_of_panels, columns, figsize=size, squeeze=False, layout="constrained")
    for panel in panels.flat[len(lines) :]:
        panel.set_visible(False)
    for panel, (name, label) in zip(panels.flat, lines.items(), strict=False):
        panel.plot([row[x] for row in points], [row[name] for row in points], marker="o", markersize=3)
        panel.set_xlabel(x)
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
    figure.savefig(image, dpi=120)
    plt.close(figure)

"""Learning curves from a run's ``log.jsonl``."""

import json
from pathlib import Path

import matplotlib.pyplot as plt


def plot_curve(log: Path, image: Path, *, x: str, lines: tuple[str, ...]) -> None:
    """One panel per line of the log, against ``x`` (tokens, blocks); of rows that a resumed run repeats, the last."""
    rows = {}
    for text in log.read_text().splitlines():
        row = json.loads(text)
        rows[row[x]] = row
    points = [rows[key] for key in sorted(rows)]
    figure, panels = plt.subplots(1, len(lines), figsize=(5 * len(lines), 3.5), squeeze=False)
    for panel, name in zip(panels[0], lines, strict=True):
        panel.plot([row[x] for row in points], [row[name] for row in points], marker="o", markersize=3)
        panel.set_xlabel(x)
        panel.set_ylabel(name)
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(image, dpi=120)
    plt.close(figure)

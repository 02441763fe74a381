"""Speedup and acceptance by block size, predicted against measured."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from experiments.laboratory.sweep import BlockSweep


def plot_sweeps(sweeps: Sequence[BlockSweep], caption: str, folder: Path) -> Path:
    """``sweep_block.png``: a column per pair, speedup above acceptance."""
    folder.mkdir(parents=True, exist_ok=True)
    width = max(4.4 * len(sweeps), 7)
    figure, panels = plt.subplots(
        2, len(sweeps), figsize=(width, 7.6), squeeze=False, layout="constrained", sharex="col"
    )
    for (speed, length), found in zip(panels.T, sweeps, strict=True):
        sizes = [block.size for block in found.blocks]
        middles = [block.speedup[0] for block in found.blocks]
        spans = [
            [block.speedup[0] - block.speedup[1] for block in found.blocks],
            [block.speedup[2] - block.speedup[0] for block in found.blocks],
        ]
        speed.errorbar(sizes, middles, yerr=spans, marker="o", capsize=3, color="#4878a8", label="measured (range)")
        length.plot(
            sizes, [block.acceptance_length for block in found.blocks], marker="o", color="#4878a8", label="measured"
        )
        known = [block for block in found.blocks if block.predicted_speedup is not None]
        line = dict(marker="x", linestyle="--", color="#c04030", label="predicted from the trained block")
        speed.plot([block.size for block in known], [block.predicted_speedup for block in known], **line)
        length.plot([block.size for block in known], [block.predicted_length for block in known], **line)
        speed.axhline(1, color="#404040", linestyle=":", linewidth=1)
        speed.set_title(found.names[0])
        length.set_xlabel("block size (anchor and drafts)")
        length.set_xticks(sizes)
        for panel in (speed, length):
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_ylabel("speedup over plain decoding")
    panels[1, 0].set_ylabel("tokens per verification")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    figure.supxlabel(caption, fontsize=8.5)
    path = folder / "sweep_block.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path

"""Speedup and acceptance of draft trees by their number of nodes."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

BLUE, RED, GREY = "#4878a8", "#c04030", "#404040"


def plot_trees(sweeps: Sequence, caption: str, folder: Path) -> Path:
    """``sweep_tree.png``: a column per pair, speedup above acceptance, the chain as a line across.

    Args:
        sweeps: of :class:`experiments.sweep_tree.TreeSweep`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = (max(4.4 * len(sweeps), 7), 7.2)
    figure, panels = plt.subplots(2, len(sweeps), figsize=size, squeeze=False, layout="constrained", sharex="col")
    for (speed, length), found in zip(panels.T, sweeps, strict=True):
        chain, trees = found.arms[0], found.arms[1:]
        budgets, middles = [arm.budget for arm in trees], [arm.speedup[0] for arm in trees]
        spans = [[arm.speedup[0] - arm.speedup[1] for arm in trees], [arm.speedup[2] - arm.speedup[0] for arm in trees]]
        speed.errorbar(budgets, middles, yerr=spans, marker="o", capsize=3, color=BLUE, label="tree (range)")
        length.plot(budgets, [arm.acceptance_length for arm in trees], marker="o", color=BLUE, label="tree")
        for panel, value in ((speed, chain.speedup[0]), (length, chain.acceptance_length)):
            panel.axhline(value, color=RED, linestyle="--", label="chain")
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
        speed.axhline(1, color=GREY, linestyle=":", linewidth=1)
        speed.set_title(f"{found.names[0]}, {chain.width - 1} drafts deep", fontsize=10)
        length.set_xlabel("nodes of the tree")
        length.set_xticks(budgets)
    panels[0, 0].set_ylabel("speedup over plain decoding")
    panels[1, 0].set_ylabel("tokens per verification")
    panels[0, 0].legend(frameon=False)
    figure.supxlabel(caption, fontsize=8.5)
    path = folder / "sweep_tree.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path

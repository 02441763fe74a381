"""Pictures of a run: how far its drafts were accepted."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from experiments.report import Report
from experiments.summary import drawn


def caption(report: Report) -> str:
    """What the figures hold for, two lines."""
    pair, run = report.pair, report.speculative
    law = "lossless" if pair.lossless else "LOSSY: the text is not the target's own"
    return (
        f"{' + '.join(pair.names)}, block {report.block_size}, rule {pair.rule} ({law}), {drawn(run.conditions)}\n"
        f"{run.conditions.dtype}, {len(run.texts)} prompts ({run.conditions.prompts}), {report.verifies:,} verifies; "
        "cut verifies count up to the cut"
    )


def plot_acceptance(report: Report, folder: Path) -> Path:
    """``acceptance.png``: histogram of tokens per verify, and the conditional rate of every draft position."""
    folder.mkdir(parents=True, exist_ok=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), constrained_layout=True)
    sizes = np.arange(1, report.block_size + 1)
    left.bar(sizes, 100 * report.histogram / max(report.verifies, 1), color="#4878a8")
    mean = report.acceptance_length
    left.axvline(mean, color="#c04030", linestyle="--", label=f"mean {mean:.2f} tokens")
    left.set(xlabel="tokens delivered by a verify", ylabel="share of verifies (%)", title="Acceptance length")
    left.legend(frameon=False)
    right.plot(sizes[:-1], report.conditional, marker="o", color="#4878a8")
    right.set(
        xlabel="draft position in the block",
        ylabel="P(accepted | all before it accepted)",
        title="Acceptance by position",
        ylim=(0, 1.05),
    )
    right.grid(alpha=0.3)
    for axis, last in ((left, report.block_size), (right, report.block_size - 1)):
        axis.set_xlim(0.3, last + 0.7)
        axis.set_xticks(range(1, last + 1, max(1, last // 12)))
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(caption(report), fontsize=8.5)
    path = folder / "acceptance.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path

"""Pictures of the accept-rule laboratory: acceptance, speed, and what lossy rules cost."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dflash_jax.rules import ACCEPT
from experiments.laboratory.measure import Findings
from experiments.laboratory.rows import Row
from experiments.laboratory.study import Study

COLOURS = plt.get_cmap("tab10").colors
MARKERS = "osD^vP*X"
ACROSS = 3
"""Most panels side by side."""


def plot_study(study: Study, folder: Path) -> list[Path]:
    """``accept_length.png``, ``accept_speed.png`` and, where a lossy rule has a row, ``accept_lossy.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    length = _figure(study, _bars("acceptance_length", _length_error), "tokens per verification (± standard error)")
    speed = _figure(study, _bars("ratio", _ratio_range, line=1.0), "speed over plain decoding (median and range)")
    made = {"accept_length": length, "accept_speed": speed}
    if any(not row.lossless for row in study.rows):
        made["accept_lossy"] = _figure(study, _scatter, "perplexity of the text against plain decoding's (%)")
    paths = []
    for name, figure in made.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=150)
        plt.close(figure)
    return paths


def _figure(study: Study, draw: Callable[[Axes, Sequence[Row], Sequence[str]], None], label: str) -> Figure:
    """A panel per pair and block size, one legend for all."""
    names = [name for name in ACCEPT if any(row.rule == name for row in study.rows)]
    across = min(len(study.findings), ACROSS)
    down = math.ceil(len(study.findings) / across)
    figure, panels = plt.subplots(
        down, across, figsize=(max(4.6 * across, 7), 4.2 * down + 1.2), squeeze=False, layout="constrained"
    )
    for panel, one in zip(panels.flat, study.findings, strict=False):
        draw(panel, [row for row in one.rows if not row.plain], names)
        panel.set_title(_title(one), fontsize=10.5)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    for panel in panels.flat[len(study.findings) :]:
        panel.set_visible(False)
    for row in panels:
        row[0].set_ylabel(label)
    handles = {
        name: handle for panel in panels.flat for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles, loc="outside upper center", ncols=min(len(handles), 4 * across), frameon=False
    )
    figure.supxlabel(_caption(study), fontsize=8.5)
    return figure


def _title(one: Findings) -> str:
    return f"{one.names[0]}, block {one.block_size}"


def _caption(study: Study) -> str:
    """What the figures hold for."""
    args, first = study.args, study.findings[0]
    return (
        f"{args.dtype}, batch 1, {study.machine.device}, {study.machine.threads} thread(s), {first.prompts} prompts, "
        f"at most {args.max_new_tokens} tokens each, {args.repeats} repeats, seed {args.seed};\n"
        "(LOSSY): the text is not the target's own; at temperature 0 greedy stands for the other lossless rules"
    )


def _named(row: Row) -> str:
    return row.rule if row.lossless else f"{row.rule} (LOSSY)"


def _bars(
    field: str, error: Callable[[Row], tuple[float, float]], line: float | None = None
) -> Callable[[Axes, Sequence[Row], Sequence[str]], None]:
    """Bars in a group per temperature, a colour per rule; lossy ones are hatched."""

    def draw(panel: Axes, rows: Sequence[Row], names: Sequence[str]) -> None:
        temperatures = list(dict.fromkeys(row.temperature for row in rows))
        at = 0.0
        for temperature in temperatures:
            group = [row for row in rows if row.temperature == temperature]
            for place, row in enumerate(group):
                panel.bar(
                    at + place,
                    getattr(row, field),
                    width=0.9,
                    yerr=np.array(error(row))[:, None],
                    capsize=2,
                    color=COLOURS[names.index(row.rule) % len(COLOURS)],
                    hatch=None if row.lossless else "///",
                    edgecolor="white",
                    ecolor="#404040",
                    label=_named(row),
                )
            panel.text(
                at + (len(group) - 1) / 2, -0.02, f"T = {temperature:g}", ha="center", va="top", transform=_below(panel)
            )
            at += len(group) + 1
        panel.set_xticks([])
        if line is not None:
            panel.axhline(line, color="#404040", linestyle="--", linewidth=1)

    return draw


def _below(panel: Axes):
    """Data along, axes fraction up."""
    return panel.get_xaxis_transform()


def _length_error(row: Row) -> tuple[float, float]:
    error = 0.0 if math.isnan(row.acceptance_length_error) else row.acceptance_length_error
    return error, error


def _ratio_range(row: Row) -> tuple[float, float]:
    return row.ratio - row.ratio_least, row.ratio_most - row.ratio


def _scatter(panel: Axes, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Perplexity change against acceptance: a colour per rule, lossless ones hollow, a marker per temperature."""
    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    for row in rows:
        colour = COLOURS[names.index(row.rule) % len(COLOURS)]
        panel.errorbar(
            row.acceptance_length,
            100 * row.perplexity_change,
            yerr=0 if math.isnan(row.perplexity_change_error) else 100 * row.perplexity_change_error,
            marker=MARKERS[temperatures.index(row.temperature) % len(MARKERS)],
            color=colour,
            markerfacecolor="white" if row.lossless else colour,
            linestyle="none",
            elinewidth=0.8,
        )
    for name, row in {row.rule: row for row in rows}.items():
        face = dict(markerfacecolor="white") if row.lossless else {}
        panel.plot([], [], "s", color=COLOURS[names.index(name) % len(COLOURS)], label=_named(row), **face)
    for place, temperature in enumerate(temperatures):
        marker = MARKERS[place % len(MARKERS)]
        panel.plot([], [], marker, color="#404040", label=f"T = {temperature:g}")
    panel.axhline(0, color="#404040", linestyle="--", linewidth=1)
    panel.set_xlabel("tokens per verification")

"""Learning curves: one panel per line of the log that is asked for, however many there are."""

import json
from pathlib import Path

import matplotlib.figure
import pytest

from experiments import train_drafter
from experiments.curve import plot_curve


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_every_line_has_a_panel_and_no_panel_is_empty(count, tmp_path, monkeypatch):
    names = [f"figure_{i}" for i in range(count)]
    rows = [{"update": step} | dict.fromkeys(names, step * 0.5) for step in (1, 2, 3)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *args, **more: (seen.append(self), save(self, *args, **more))
    )
    plot_curve(tmp_path / "log.jsonl", tmp_path / "curve.png", x="update", lines={name: name for name in names})
    shown = [axes for axes in seen[0].axes if axes.get_visible()]
    assert [axes.get_ylabel() for axes in shown] == names
    assert all(axes.lines for axes in shown)
    assert (tmp_path / "curve.png").stat().st_size > 0


def test_the_committed_log_has_every_figure_that_the_drafters_curve_shows():
    log = Path(__file__).parents[2] / "experiments" / "results" / "train_drafter.jsonl"
    for line in log.read_text().splitlines():
        assert set(train_drafter.CURVES) <= set(json.loads(line))

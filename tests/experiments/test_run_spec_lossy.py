"""Every screen and picture of run_spec says of a lossy rule that it is one."""

import contextlib
import io
import json
from dataclasses import replace

import pytest

from experiments import plots, run_spec
from experiments.arguments import Args
from tests.experiments.random_pair import PROMPTS, write_random_pair


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """One whole run under a lossy rule: ``(screen, JSON, text below the picture)``."""
    folder, out, figures = tmp_path_factory.mktemp("pairs"), io.StringIO(), []
    target, draft = write_random_pair(folder)
    args = Args(target=target, draft=draft, rule="typical", temperature=1.0, top_k=40, stream=True, quiet=True)
    args = replace(args, max_samples=1, max_new_tokens=8, json=folder / "run.json", plots=folder / "plots")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(run_spec, "use_compilation_cache", lambda: None)
        patch.setattr(plots.plt, "close", figures.append)
        run_spec.main(args)
    (figure,) = figures
    below = figure.get_supxlabel()
    plots.plt.close(figure)
    return out.getvalue(), json.loads((folder / "run.json").read_text()), below


def test_a_stream_says_so_before_the_text(ran) -> None:
    screen = ran[0]
    assert screen.startswith(f"rule typical: LOSSY, the text is not the target's own\n\n{PROMPTS[0]['text']}")


def test_the_summary_and_the_file_say_so(ran) -> None:
    screen, found, _ = ran
    assert "typical (LOSSY: the text is not the target's own)   temperature 1, top-k 40   seed 0" in screen
    assert found["rule"] == "typical"
    assert found["lossless"] is False


def test_the_picture_says_so(ran) -> None:
    assert "rule typical (LOSSY: the text is not the target's own), temperature 1, top-k 40" in ran[2]

"""run_spec --pair all: every shipped pair, one table."""

import contextlib
import functools
import io
import json

import pytest

from experiments import pair, plan, run_spec, summary
from experiments.arguments import Args
from tests.experiments.random_pair import write_random_pair


@pytest.fixture
def two_pairs(tmp_path, monkeypatch):
    """A folder of two pairs, in the place of the shipped ones."""
    monkeypatch.setattr(run_spec, "use_compilation_cache", lambda: None)
    for name in ("one", "two"):
        write_random_pair(tmp_path / "pairs", name)
    monkeypatch.setattr(run_spec, "known_pairs", functools.partial(pair.known_pairs, tmp_path / "pairs"))
    monkeypatch.setattr(plan, "locate", functools.partial(pair.locate, root=tmp_path / "pairs"))


def test_every_pair_has_its_row_and_its_figures(two_pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(summary, "SUSPICIOUS_ACCEPTANCE", 9)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        args = Args(pair="all", max_samples=2, max_new_tokens=6, quiet=True, json=tmp_path / "all.json")
        reports = run_spec.main(args)
    screen = out.getvalue()
    assert [report.pair.names[0] for report in reports] == ["one", "two"]
    found = json.loads((tmp_path / "all.json").read_text())["pairs"]
    assert all(each["memory_bytes"]["peak"] is None for each in found.values()), "the process is shared"
    for name, report in zip(("one", "two"), reports, strict=True):
        (row,) = (line for line in screen.splitlines() if line.strip().startswith(f"{name} "))
        for words in ("gpt_oss", f"{report.acceptance_length:.2f}", "2/2", f"{found[name]['plain_tok_s']:.0f}"):
            assert words in row
        assert found[name]["family"] == "gpt_oss"
        assert found[name]["command"].endswith(f"--pair {name} --max-samples 2 --max-new-tokens 6 --quiet")
        assert f"{name}: warning" in screen


@pytest.mark.parametrize("more", [dict(stream=True), dict(explain=True)])
def test_what_is_for_one_pair_is_refused(two_pairs, more, capsys):
    with pytest.raises(SystemExit):
        run_spec.main(Args(pair="all", **more))
    assert "--pair all prints one table" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_first(two_pairs, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_spec.main(Args(pair="all", json=tmp_path))
    assert "is a folder; expected a file" in capsys.readouterr().err


def test_one_bad_pair_stops_all_before_any_is_loaded(two_pairs, tmp_path, monkeypatch, capsys):
    (tmp_path / "pairs" / "two-dflash" / "config.json").unlink()
    monkeypatch.setattr(run_spec, "load_pair", lambda *_, **__: pytest.fail("a pair was loaded"))
    with pytest.raises(SystemExit):
        run_spec.main(Args(pair="all"))
    assert "two-dflash has no config.json" in capsys.readouterr().err

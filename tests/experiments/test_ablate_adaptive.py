"""Adaptive decoding measured on a random pair: both drafters, and a file that says what the screen says."""

import json

import pytest

from experiments import ablate_adaptive
from experiments.ablate_adaptive import Args
from tests.experiments.random_pair import write_random_pair


def test_both_drafters_are_measured_and_written(tmp_path, capsys) -> None:
    target, draft = write_random_pair(tmp_path / "pair")
    same = dict(max_samples=1, max_new_tokens=12, block_sizes=(3,), quiet=True, json=tmp_path / "deep" / "found.json")
    found = ablate_adaptive.main(Args(target=target, draft=draft, **same))
    assert [(each.drafter, each.block_size) for each in found] == [("trained", 3), ("wrong", 3)]
    assert all(set(each.rounds) <= {"1", "2", "3"} and each.rounds for each in found)
    written = json.loads((tmp_path / "deep" / "found.json").read_text())
    assert [each["adaptive"] for each in written["outcomes"]] == [list(each.adaptive) for each in found]
    assert written["command"] in capsys.readouterr().out


def test_a_picture_is_refused(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        ablate_adaptive.main(Args(plots=tmp_path, quiet=True))
    assert "--plots" in capsys.readouterr().err

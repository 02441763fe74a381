"""Adaptive decoding measured on a random pair: both drafters, and a file that says what the screen says."""

import json
from pathlib import Path

from experiments import ablate_adaptive, runs
from experiments.ablate_adaptive import Args
from experiments.agreement import Agreement, Divergence
from experiments.threads import available_cpus
from tests.experiments.random_pair import write_random_pair


def test_both_drafters_are_measured_and_written(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(runs, "crowding", lambda found, threads: f"{len(found)} runs were on {threads} threads")
    target, draft = write_random_pair(tmp_path / "pair")
    same = dict(max_samples=1, max_new_tokens=12, block_sizes=(3,), quiet=True, json=tmp_path / "deep" / "found.json")
    found = ablate_adaptive.main(Args(target=target, draft=draft, **same))
    assert [(each.drafter, each.block_size) for each in found] == [("trained", 3), ("wrong", 3)]
    assert all(set(each.rounds) <= {"1", "2", "3"} and each.rounds for each in found)
    written = json.loads((tmp_path / "deep" / "found.json").read_text())
    assert [each["adaptive"] for each in written["outcomes"]] == [list(each.adaptive) for each in found]
    assert [each["agreement"] for each in written["outcomes"]] == [1.0, 1.0]
    screen = capsys.readouterr().out
    assert written["command"] in screen
    for each in written["outcomes"]:
        (words,) = each["warnings"]
        assert f"{each['drafter']} drafter: 3 runs were on {len(available_cpus())} threads" in words
    assert screen.count("3 runs were on") == 2


def test_a_text_that_is_not_the_plain_one_is_named_and_nothing_is_lost() -> None:
    parted = Agreement(8, (Divergence(3, 41, 5, 6, margin=0.9, tie=False), Divergence(4, 2, 1, 2, 0.1, tie=True)))
    (words,) = ablate_adaptive.what_is_wrong("tiny, wrong drafter", {"adaptive": parted}, programs=0, crowding=None)
    assert words.startswith("tiny, wrong drafter, adaptive, prompt 3, token 41: 6 where plain decoding says 5")


def test_threads_that_are_not_jaxs_are_named() -> None:
    assert ablate_adaptive.what_is_wrong("tiny", {}, 0, "1.9 CPUs were busy") == ["tiny: 1.9 CPUs were busy"]


def test_the_useless_drafter_never_cost_more_than_a_twentieth() -> None:
    """By the committed medians, on no pair; single repeats are as noisy as plain decoding."""
    results = Path(ablate_adaptive.__file__).parent / "results" / "ablate_adaptive.json"
    wrong = [each for each in json.loads(results.read_text())["outcomes"] if each["drafter"] == "wrong"]
    assert len(wrong) == 3 and min(each["adaptive"][0] for each in wrong) >= 0.95

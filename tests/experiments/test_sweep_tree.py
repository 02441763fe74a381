"""The sweep of draft trees on a random pair: a screen, a file and a picture that say the same, and refusals."""

import json

import pytest

from experiments import sweep_tree
from experiments.sweep_tree import Args, Arm, TreeSweep, verdict
from tests.experiments.random_pair import write_random_pair


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees")
    target, draft = write_random_pair(folder)
    args = Args(target=target, draft=draft, max_samples=1, max_new_tokens=8, budgets=(3,), quiet=True)
    args = sweep_tree.replace(args, json=folder / "deep" / "tree.json", plots=folder / "plots")
    (found,) = sweep_tree.main(args)
    return found, folder


def test_every_file_is_written_and_says_what_was_measured(ran) -> None:
    found, folder = ran
    written = json.loads((folder / "deep" / "tree.json").read_text())
    assert written["command"].startswith("python -m experiments.sweep_tree")
    (pair,) = written["pairs"]
    assert [arm["budget"] for arm in pair["arms"]] == [None, 3]
    assert [arm["width"] for arm in pair["arms"]] == [found.block_size, 4]
    assert pair["verdict"] == verdict(found)
    assert all(arm.verified_tokens == 7 for arm in found.arms), "the first of 8 tokens is the prompt's"
    assert (folder / "plots" / "sweep_tree.png").stat().st_size > 10_000


def arm(budget: int | None, length: float, speed: float, cost: float) -> Arm:
    same = dict(verified_tokens=10, verifies=5, plain_tok_s=1.0, verify_ratio=1.0, union=3.0, union_one_token=2.0)
    times = dict(tok_s=(speed,) * 3, speedup=(speed,) * 3, break_even=cost, round_s=cost)
    return Arm(budget=budget, width=8 if budget is None else budget + 1, acceptance_length=length, **same, **times)


def test_the_verdict_names_the_reason() -> None:
    chain, tree = arm(None, 2.0, 1.0, 2.0), arm(8, 3.0, 0.9, 3.33)
    words = verdict(TreeSweep(("a", "b"), 8, 4, 1, "greedy", (chain, tree)))
    assert words.startswith("no tree pays") and "1.50x the chain's tokens" in words and "3.00 of 4 experts" in words
    words = verdict(TreeSweep(("a", "b"), 8, 4, 1, "greedy", (chain, arm(16, 3.0, 1.2, 2.5))))
    assert words.startswith("a tree pays: the best tree (16 nodes)")


@pytest.mark.parametrize("budgets", [(), (0,), (8, 127)])
def test_a_budget_out_of_range_is_refused(budgets, capsys) -> None:
    with pytest.raises(SystemExit):
        sweep_tree.main(Args(budgets=budgets, quiet=True))
    assert "--budgets" in capsys.readouterr().err

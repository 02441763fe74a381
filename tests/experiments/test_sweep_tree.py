"""The sweep of draft trees on a random pair: a screen, a file and a picture that say the same, and refusals."""

import json
from pathlib import Path

import pytest

from experiments import summary, sweep_tree
from experiments.laboratory.arguments import settled
from experiments.prompts import fingerprint
from experiments.sweep_tree import Args, Arm, TreeSweep, verdicts
from tests.experiments.random_pair import write_random_pair


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """One whole run with every output and a warning."""
    folder = tmp_path_factory.mktemp("trees")
    target, draft = write_random_pair(folder)
    args = Args(target=target, draft=draft, max_samples=1, max_new_tokens=8, budgets=(3,), quiet=True)
    args = sweep_tree.replace(args, json=folder / "deep" / "tree.json", plots=folder / "plots")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, "SUSPICIOUS_ACCEPTANCE", 9)
        (found,) = sweep_tree.main(args)
    (plan,) = sweep_tree.prepare(settled(args))
    return found, folder, [prompt for batch in plan.batches for prompt in batch]


def test_every_file_is_written_and_says_what_was_measured(ran) -> None:
    found, folder, prompts = ran
    written = json.loads((folder / "deep" / "tree.json").read_text())
    assert written["command"].startswith("python -m experiments.sweep_tree")
    (pair,) = written["pairs"]
    assert [arm["budget"] for arm in pair["arms"]] == [None, 3]
    assert [arm["width"] for arm in pair["arms"]] == [found.block_size, 4]
    assert pair["verdicts"] == verdicts(found) and len(pair["verdicts"]) == 1
    for each in found.arms:
        assert sum(each.parts.values()) == pytest.approx(each.break_even)
    assert pair["prompt_hash"] == fingerprint(prompts)
    assert pair["warnings"] == list(found.warnings)
    assert all(each.startswith("acceptance ") and "\n" not in each for each in pair["warnings"])
    assert pair["warnings"]
    assert all(arm.verified_tokens == 7 for arm in found.arms), "the first of 8 tokens is the prompt's"
    assert (folder / "plots" / "sweep_tree.png").stat().st_size > 10_000


def arm(budget: int | None, length: float, speed: float, parts: dict[str, float], union: float = 3.0) -> Arm:
    same = dict(verified_tokens=10, verifies=5, plain_tok_s=1.0, verify_ratio=1.0, union_one_token=2.0)
    cost = sum(parts.values())
    times = dict(tok_s=(speed,) * 3, speedup=(speed,) * 3, break_even=cost, round_s=cost, parts=parts)
    width = 8 if budget is None else budget + 1
    return Arm(budget=budget, width=width, acceptance_length=length, union=union, **same, **times)


def test_every_tree_has_its_verdict_and_the_reason_is_the_largest_part() -> None:
    chain = arm(None, 2.0, 1.0, dict(verification=1.5, draft=0.4, rest=0.1))
    slow = arm(4, 1.5, 0.9, dict(verification=1.2, draft=0.4, rest=0.1), union=2.5)
    wide = arm(8, 3.0, 0.9, dict(verification=2.6, draft=0.4, rest=0.3), union=3.5)
    fussy = arm(16, 3.0, 0.9, dict(verification=1.6, draft=0.4, rest=1.3), union=2.9)
    good = arm(32, 3.0, 1.2, dict(verification=1.8, draft=0.4, rest=0.3))
    found = verdicts(TreeSweep(("a", "b"), 8, 4, 1, "hash", "greedy", (chain, slow, wide, fussy, good)))
    assert [words.partition(": ")[0] for words in found] == [
        "4 nodes do not pay",
        "8 nodes do not pay",
        "16 nodes do not pay",
        "32 nodes pay",
    ]
    assert found[0].endswith(": 0.90x plain decoding, the chain 1.00x; 0.75x its tokens a round, in 0.85x its time")
    assert found[1].endswith(
        "; 1.50x its tokens a round, in 1.65x its time, of 1.30 plain steps more 1.10 for the verification, which "
        "reads 3.50 of 4 experts per layer (the chain's 3.00, one token 2.00)"
    )
    assert found[2].endswith("of 1.30 plain steps more 1.20 for the rest")
    assert "of 0.50 plain steps more 0.30 for the verification" in found[3]


@pytest.mark.parametrize("budgets", [(), (0,), (8, 127)])
def test_a_budget_out_of_range_is_refused(budgets, capsys) -> None:
    with pytest.raises(SystemExit):
        sweep_tree.main(Args(budgets=budgets, quiet=True))
    assert "--budgets" in capsys.readouterr().err


def test_a_file_and_a_folder_in_one_place_are_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        sweep_tree.main(Args(json=Path("nowhere"), plots=Path("nowhere"), quiet=True))
    assert "--json nowhere and --plots nowhere are one path; expected two" in capsys.readouterr().err

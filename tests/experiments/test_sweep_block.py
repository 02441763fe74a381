"""Block sizes, predicted and measured: the prediction by hand, and a whole run on a random pair."""

import contextlib
import io
import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tyro

from experiments import machine, summary, sweep_block, sweep_tree
from experiments import pair as pairs
from experiments.laboratory.arguments import Common, SweepArgs, settled
from experiments.laboratory.markdown import tables
from experiments.laboratory.sweep import predict, round_of
from experiments.timing import StepCosts
from tests.experiments.random_pair import BLOCK, write_random_pair

COSTS = StepCosts(length=9, width=5, step_s=1.0, verify_s=3.0, draft_s=0.5, ratio=3.0)


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> SweepArgs:
    """A short run with the random pair."""
    target, draft = write_random_pair(tmp_path_factory.mktemp("pairs"))
    return SweepArgs(target=target, draft=draft, max_samples=1, max_new_tokens=8, block_sizes=(3,), quiet=True)


@pytest.fixture(scope="module")
def ran(given, tmp_path_factory):
    """One whole run with every output and a warning: ``(screen, sweep, folder)``."""
    folder, out = tmp_path_factory.mktemp("out"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sweep_block, "use_compilation_cache", lambda: None)
        patch.setattr(summary, "SUSPICIOUS_ACCEPTANCE", 9)
        (found,) = sweep_block.main(replace(given, json=folder / "deep" / "s.json", plots=folder / "plots"))
    return out.getvalue(), found, folder


def test_a_round_is_linear_in_the_width_of_its_verification():
    """A round of 4 whose verification of five tokens takes 3 and of one token 1."""
    assert [round_of(COSTS, 4.0, size) for size in (5, 3, 2)] == [4.0, 3.0, 2.5]


def test_the_prediction_by_hand():
    """Rates 1/2, 1/2: a block of three delivers 1 + 1/2 + 1/4 in 3 seconds, where a plain step takes 2."""
    report = SimpleNamespace(
        block_size=5,
        conditional=np.array([0.5, 0.5, 1.0, np.nan]),
        costs=COSTS,
        round_s=4.0,
        plain=SimpleNamespace(round_s=[1.0, 2.0, 9.0]),
    )
    assert predict(report, 3) == pytest.approx((1.75, 1.75 / 3, 3.5 / 3))
    assert predict(report, 5) == pytest.approx((2.0, 2.0 / 4, 1.0))
    assert predict(report, 6) is None, "nothing is known of the last draft"


def test_the_trained_block_and_the_others_are_measured(ran):
    screen, found, _ = ran
    assert [block.size for block in found.blocks] == [3, BLOCK]
    assert found.trained == BLOCK
    for block in found.blocks:
        assert block.acceptance_length == block.verified_tokens / block.verifies
        assert block.speedup[1] <= block.speedup[0] <= block.speedup[2]
    assert found.blocks[1].predicted_length == pytest.approx(1 + np.cumprod(np.nan_to_num(found.conditional)).sum())
    shown = [" ".join(line.split()) for line in screen.splitlines()]
    for block in found.blocks:
        assert " ".join(sweep_block.cells(block)) in shown


def test_json_says_what_the_screen_says(ran):
    screen, found, folder = ran
    written = json.loads((folder / "deep" / "s.json").read_text())
    (pair,) = written["pairs"]
    assert pair["names"][0] == "random"
    assert pair["verdict"] == sweep_block.verdict(found)
    assert [block["size"] for block in pair["blocks"]] == [3, BLOCK]
    for block, as_json in zip(found.blocks, pair["blocks"], strict=True):
        assert as_json["speedup"] == list(block.speedup)
        assert as_json["predicted_speedup"] == block.predicted_speedup
    assert f"measured block {pair['measured_best']} " in screen
    assert f"predicted block {pair['predicted_best']} " in screen
    assert written["command"] in screen
    assert (folder / "plots" / "sweep_block.png").read_bytes().startswith(b"\x89PNG")
    words = " ".join(screen.split())
    assert [each[:10] for each in pair["warnings"]] == ["acceptance"] * len({b.acceptance_length for b in found.blocks})
    assert all(f"warning {each}" in words for each in pair["warnings"])


def test_the_verdict_names_what_the_prediction_loses(ran):
    found = ran[1]
    small, large = found.blocks
    wrong = replace(
        found,
        blocks=(
            replace(small, speedup=(1.0, 1.0, 1.0), predicted_speedup=2.0),
            replace(large, speedup=(1.25, 1.2, 1.3), predicted_speedup=1.5),
        ),
    )
    assert wrong.loss == pytest.approx(0.2)
    assert sweep_block.verdict(wrong) == (
        "measured block 5 (1.25x), predicted block 3 (2.00x): it measures 1.00x, 20% less"
    )
    unknown = replace(wrong, blocks=tuple(replace(block, predicted_speedup=None) for block in wrong.blocks))
    assert sweep_block.verdict(unknown) == "measured block 5 (1.25x); none was predicted"


def test_which_blocks_are_swept(given):
    def sizes(**more) -> list[int]:
        (plans,) = sweep_block.prepare(settled(replace(given, **more)))
        return [plan.folders.block_size for plan in plans]

    assert sizes() == [BLOCK, 3]
    assert sizes(block_sizes=()) == [BLOCK, 2, 3, 4]
    assert sizes(block_sizes=(), quick=True) == [BLOCK, 2, 4]
    assert sizes(block_sizes=(9, BLOCK)) == [BLOCK, 9]


REFUSALS = {
    "greedy above 0": (dict(rule="greedy", temperature=0.7), ["--rule greedy", "--temperature is 0.7"]),
    "block of one": (dict(block_sizes=(1,)), ["a block of 1 tokens", "2 to 127"]),
    "one token": (dict(max_new_tokens=1), ["--max-new-tokens 1: at least 2"]),
    "unknown pair": (dict(pair="tiny", target=None, draft=None), ["unknown pair 'tiny'"]),
    "min_p": (dict(min_p=2.0), ["min_p 2.0"]),
    "a file and a folder in one place": (
        dict(json=Path("nowhere"), plots=Path("nowhere")),
        ["--json nowhere and --plots nowhere are one path; expected two"],
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_before_any_weight_is_read(name, given, monkeypatch, capsys):
    change, said = REFUSALS[name]
    monkeypatch.setattr(sweep_block, "use_compilation_cache", lambda: None)
    monkeypatch.setattr(pairs, "load_target", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(SystemExit) as stopped:
        sweep_block.main(replace(given, **change))
    assert stopped.value.code == 2
    shown = capsys.readouterr().err
    for words in said:
        assert words in shown


def test_a_lossy_rule_is_called_so(given, ran):
    args = settled(replace(given, rule="typical", temperature=1.0))
    assert sweep_block.rule_label(args) == "typical (LOSSY)"
    found = sweep_block.payload([ran[1]], args, "python -m experiments.sweep_block --rule typical", machine.describe())
    assert found["lossless"] is False
    assert "Rule: typical (**LOSSY**). Tokens: temperature 1." in tables(found)
    assert sweep_block.rule_label(settled(replace(given, rule="match"))) == "match"


def test_a_drafter_that_does_not_fit_is_one_line(given, tmp_path, monkeypatch, capsys):
    """Found while loading, when its weights are held against the target's."""
    monkeypatch.setattr(sweep_block, "use_compilation_cache", lambda: None)
    shutil.copytree(given.draft, tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [99]
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    for program, args in ((sweep_block, given), (sweep_tree, tree_args(given))):
        with pytest.raises(SystemExit) as stopped:
            program.main(replace(args, draft=tmp_path / "draft"))
        assert stopped.value.code == 2
        assert "target_layer_ids" in capsys.readouterr().err


def tree_args(given: SweepArgs) -> sweep_tree.Args:
    known = {field.name: getattr(given, field.name) for field in fields(Common)}
    return sweep_tree.Args(**known, budgets=(3,))


def test_an_output_that_cannot_be_written_is_refused_first(given, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep_block, "use_compilation_cache", lambda: None)
    monkeypatch.setattr(pairs, "load_target", lambda *_, **__: pytest.fail("weights were read"))
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        sweep_block.main(replace(given, json=tmp_path / "file" / "found.json"))
    assert f"--json {tmp_path / 'file' / 'found.json'}: {tmp_path / 'file'} is a file" in capsys.readouterr().err


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(SweepArgs, description=sweep_block.__doc__, args=["--help"])
    assert "sweep_block --pair all" in capsys.readouterr().out

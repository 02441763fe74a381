"""The accept-rule laboratory, from arguments to its screen and files on a random pair."""

import contextlib
import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import tyro
from rich.console import Console

from experiments import ablate_accept, runs
from experiments import pair as pairs
from experiments.arguments import SAMPLED_RULE
from experiments.laboratory import plots
from experiments.laboratory.arguments import QUICK, Args, settled
from experiments.laboratory.markdown import tables
from experiments.laboratory.plan import left_out, prepare_rules, rules_at
from experiments.laboratory.ranking import best_lossless, pooled_lossless
from experiments.laboratory.rows import Row
from experiments.laboratory.study import Study, payload, row_from, write_csv
from experiments.laboratory.tables import WIDTH, cells, show
from experiments.threads import available_cpus
from tests.experiments.random_pair import write_random_pair

ROOT = Path(ablate_accept.__file__).parents[1]
RULES = ("greedy", "match", "typical")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Target and drafter of a random pair."""
    return write_random_pair(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def given(folders) -> Args:
    """A short run with the random pair."""
    return Args(target=folders[0], draft=folders[1], max_samples=2, max_new_tokens=8, rules=RULES, quiet=True)


@pytest.fixture(scope="module")
def crowding() -> Mock:
    """Stands for the question whether too many CPUs were busy; they were not."""
    return Mock(return_value=None)


@pytest.fixture(scope="module")
def ran(given, crowding, tmp_path_factory):
    """One whole run with every output: ``(screen, study, folder)``."""
    folder = tmp_path_factory.mktemp("out")
    outputs = dict(json=folder / "deep" / "a.json", csv=folder / "a.csv", plots=folder / "plots")
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(ablate_accept, "use_compilation_cache", lambda: None)
        patch.setattr(runs, "crowding", crowding)
        study = ablate_accept.main(replace(given, temperatures=(0.0, 1.0), **outputs))
    return out.getvalue(), study, folder


def row_at(study, rule: str, temperature: float) -> Row:
    """The one row of a rule at a temperature."""
    (row,) = (row for row in study.rows if (row.rule, row.temperature) == (rule, temperature))
    return row


def test_every_rule_has_its_row_where_it_applies(ran):
    screen, study, _ = ran
    found = [(row.temperature, row.rule) for row in study.rows]
    assert found == [(0, "plain"), (0, "greedy"), (0, "typical"), (1, "plain"), (1, "match"), (1, "typical")]
    assert "match accept and say what greedy does" in " ".join(screen.split())
    assert "prompts 2 of 3   8 tokens each at most   repeats 3" in screen
    assert "QUICK" not in screen


def test_nothing_is_compiled_while_timing(ran):
    """Temperatures are values: one program per rule, built before the first timed repeat."""
    screen, study, _ = ran
    (one,) = study.findings
    assert one.while_timing == 0
    assert one.programs > 0
    assert "warning" not in screen


def test_the_files_say_what_the_screen_says(ran):
    screen, study, folder = ran
    found = json.loads((folder / "deep" / "a.json").read_text())
    lines = list(csv.DictReader((folder / "a.csv").open()))
    assert len(found["rows"]) == len(lines) == len(study.rows)
    shown = [" ".join(line.split()) for line in screen.splitlines()]
    for row, as_json, as_csv in zip(study.rows, found["rows"], lines, strict=True):
        assert any(line.endswith(" ".join(cells(row))) for line in shown), row
        assert cells(row_from(as_json)) == cells(row)
        assert set(as_csv) == {name for name, value in as_json.items() if not isinstance(value, list)}
        assert sum(as_json["verified_tokens_by_prompt"]) == row.verified_tokens
        for name in as_csv:
            value = as_json[name]
            assert as_csv[name] == ("" if value is None else str(value))
    assert found["command"] == study.command
    assert found["command"] in screen
    assert found["blocks"][0]["while_timing"] == 0
    assert found["rules"]["typical"]["parameters"] == {"epsilon": 0.09, "delta": 0.3}


def test_a_lossy_rule_is_called_so_everywhere(ran, tmp_path):
    screen, study, folder = ran
    found = json.loads((folder / "deep" / "a.json").read_text())
    lines = list(csv.DictReader((folder / "a.csv").open()))
    for rows in (found["rows"], lines):
        labels = {(row["rule"], row["label"]) for row in rows}
        assert labels == {("plain", "-"), ("greedy", "lossless"), ("match", "lossless"), ("typical", "LOSSY")}
    assert screen.count("LOSSY") == 2
    assert "Rules: greedy, match (lossless); typical (**LOSSY**). Tokens: greedy, temperature 1." in tables(found)
    assert tables(found).count("| typical | **LOSSY** |") == 2
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots.plt, "close", drawn.append)
        plots.plot_study(study, tmp_path)
    for figure in drawn:
        (legend,) = figure.legends
        assert {"match", "typical (LOSSY)"} <= {text.get_text() for text in legend.get_texts()}
        plots.plt.close(figure)


def screen_of(study: Study) -> str:
    """What is printed of a study, each run of blanks one."""
    out = io.StringIO()
    show(study, Console(file=out, width=WIDTH, highlight=False))
    return " ".join(out.getvalue().split())


def test_an_infinite_divergence_is_told_from_one_that_is_not_measured(ran, tmp_path):
    """The rule said a token that the filters cut: the screen says inf, and the files that it is infinite."""
    (one,), before = ran[1].findings, row_at(ran[1], "typical", 1)
    rows = tuple(replace(row, kl=math.inf) if row is before else row for row in one.rows)
    study = replace(ran[1], findings=(replace(one, rows=rows),))
    found = json.loads(json.dumps(payload(study), allow_nan=False))
    write_csv(study.rows, tmp_path / "a.csv")
    lines = list(csv.DictReader((tmp_path / "a.csv").open()))
    for row, as_json, as_csv in zip(rows, found["rows"], lines, strict=True):
        infinite = (row.rule, row.temperature) == ("typical", 1)
        assert as_json["kl_infinite"] is infinite
        assert as_csv["kl_infinite"] == str(infinite)
        assert as_json["kl"] is None
        assert as_csv["kl"] == ""
        assert row_from(as_json).kl == row.kl
        assert cells(row_from(as_json)) == cells(row)
    assert cells(row_at(study, "typical", 1))[-3] == "inf"
    words = "random: KL is infinite where an accepted draft lies outside the filters"
    assert found["warnings"] == [words]
    assert f"warning {words}" in screen_of(study)


def test_the_file_has_the_warnings_of_the_screen(ran):
    (one,) = ran[1].findings
    study = replace(ran[1], findings=(replace(one, while_timing=2),))
    assert payload(ran[1])["warnings"] == []
    (words,) = payload(study)["warnings"]
    assert words.startswith("random, block 5: 2 programs were compiled while timing")
    assert f"warning {words}" in screen_of(study)


def test_busy_cpus_are_looked_at_in_every_run(ran, crowding):
    """Six decoders, three repeats each."""
    ((found, threads),) = (call.args for call in crowding.call_args_list)
    assert (len(found), threads) == (6 * 3, len(available_cpus()))
    (one,) = ran[1].findings
    study = replace(ran[1], findings=(replace(one, crowding="7.0 CPUs were busy"),))
    assert payload(study)["warnings"] == ["random, block 5: 7.0 CPUs were busy"]


def test_lossless_rules_have_a_proof_and_lossy_ones_figures(ran):
    study = ran[1]
    for row in study.rows:
        assert (row.proof is None) == (row.label != "lossless")
        assert (row.total_variation is None) == (row.lossless or row.temperature == 0)
        assert (row.not_argmax is None) == (row.lossless or row.temperature > 0)
    assert row_at(study, "match", 1).perplexity == row_at(study, "plain", 1).perplexity
    assert row_at(study, "match", 1).perplexity_change_error == 0
    assert 0 <= row_at(study, "typical", 1).total_variation <= 1


def test_figures_are_those_of_the_texts(ran):
    """Tokens over verifications, pooled over all drawn texts and over one repeat of the greedy ones."""
    study = ran[1]
    for row in study.rows:
        assert row.texts == (2 if row.temperature == 0 else 6)
        assert row.verified_tokens == row.tokens - row.texts
        assert row.acceptance_length == row.verified_tokens / row.verifies
        assert row.tok_s_least <= row.tok_s <= row.tok_s_most
    assert row_at(study, "plain", 1).ratio == 1
    assert row_at(study, "plain", 1).acceptance_length == 1


def test_pictures_are_drawn(ran):
    names = sorted(path.name for path in (ran[2] / "plots").iterdir())
    assert names == ["accept_length.png", "accept_lossy.png", "accept_speed.png"]
    assert all((ran[2] / "plots" / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_the_best_lossless_rule_is_named(ran):
    screen, study, _ = ran
    assert [(best.rule, best.second) for best in best_lossless(study.rows)] == [("greedy", None), ("match", None)]
    assert "random, block 5, temperature 1: match" in screen


def test_the_best_rule_is_clear_only_beyond_two_errors_of_the_difference(ran):
    """Prompts differ much among themselves: what counts is by how much the rules differ on each."""

    def at(rule: str, tokens: list[int], lossless: bool = True) -> Row:
        same = dict(verified_tokens_by_prompt=tokens, verifies_by_prompt=[10] * len(tokens))
        return replace(row, rule=rule, lossless=lossless, acceptance_length=sum(tokens) / 10 / len(tokens), **same)

    row = row_at(ran[1], "match", 1)
    lossy, first = at("typical", [90, 90, 90], lossless=False), at("block", [10, 20, 30])
    (best,) = best_lossless([at("match", [9, 19, 28]), first, lossy])
    assert (best.rule, best.second, best.clear) == ("block", "match", True)
    (best,) = best_lossless([at("match", [14, 15, 28]), first])
    assert (best.rule, best.clear) == ("block", False)
    assert not best_lossless([at("match", [9]), at("block", [10])])[0].clear, "one prompt has no error"


def test_chains_are_pooled_over_all_drawn_text(ran):
    def at(rule: str, temperature: float, tokens: int, verifies: int) -> Row:
        same = dict(rule=rule, temperature=temperature, verified_tokens=tokens, verifies=verifies)
        return replace(row_at(ran[1], "match", 1), lossless=rule != "typical", **same)

    drawn = [at("match", 0.7, 30, 10), at("block", 0.7, 40, 10), at("match", 1.0, 10, 10), at("block", 1.0, 10, 10)]
    others = [at("greedy", 0.0, 90, 10), at("tree", 1.0, 90, 10), at("typical", 1.0, 90, 10)]
    found = pooled_lossless([*drawn, *others])
    assert [each.rule for each in found] == ["block", "match"]
    assert [(each.verified_tokens, each.verifies, each.acceptance_length) for each in found] == [
        (50, 20, 2.5),
        (40, 20, 2.0),
    ]


def test_the_default_is_the_chain_that_accepts_most_on_the_shipped_pairs():
    rows = json.loads((ROOT / "experiments" / "results" / "default_rule.json").read_text())["rows"]
    assert pooled_lossless([row_from(row) for row in rows])[0].rule == SAMPLED_RULE


def test_greedy_stands_for_the_rules_that_say_the_same():
    names = ["greedy", "match", "block", "typical"]
    assert rules_at(names, 0.0) == ["greedy", "typical"]
    assert rules_at(["rejection"], 0.0) == ["greedy"]
    assert rules_at(names, 0.5) == ["match", "block", "typical"]
    assert len(left_out(names, [0.0, 1.0])) == 2
    assert left_out(["typical"], [0.0, 1.0]) == []
    assert left_out(names, [1.0]) == ["greedy knows only the argmax and has no row at temperatures above 0"]


REFUSALS = {
    "greedy above 0": (dict(rules=("greedy",), temperatures=(0.0, 0.7)), ["--rules greedy", "0.7", "match"]),
    "no temperature": (dict(temperatures=()), ["--temperatures needs at least one"]),
    "a negative temperature": (dict(temperatures=(-1.0,)), ["temperature -1.0", "a number from 0"]),
    "top_p": (dict(top_p=1.5), ["top_p 1.5"]),
    "block of one": (dict(block_sizes=(1,)), ["a block of 1 tokens", "2 to 127"]),
    "one token": (dict(max_new_tokens=1), ["--max-new-tokens 1: at least 2"]),
    "repeats": (dict(repeats=2), ["--repeats 2: at least 3"]),
    "a file and a folder in one place": (
        dict(json=Path("nowhere"), plots=Path("nowhere")),
        ["--json nowhere and --plots nowhere are one path", "expected two"],
    ),
    "two files in one": (dict(json=Path("x/../a"), csv=Path("a")), ["--json x/../a and --csv a are one path"]),
    "a file in place of a folder": (
        dict(csv=Path("nowhere"), plots=Path("nowhere/plots")),
        ["--csv nowhere is a file, and --plots nowhere/plots needs it as a folder"],
    ),
    "all pairs and a folder": (dict(pair="all"), ["--pair names both"]),
    "unknown pair": (dict(pair="tiny", target=None, draft=None), ["unknown pair 'tiny'", "all"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_before_any_weight_is_read(name, given, monkeypatch, capsys):
    change, said = REFUSALS[name]
    monkeypatch.setattr(ablate_accept, "use_compilation_cache", lambda: None)
    monkeypatch.setattr(pairs, "load_target", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(SystemExit) as stopped:
        ablate_accept.main(replace(given, **change))
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert not shown.out
    for words in said:
        assert words in shown.err


def test_outputs_that_cannot_be_written(given, tmp_path):
    with pytest.raises(ValueError, match=r"--csv .* is a folder"):
        prepare_rules(settled(replace(given, csv=tmp_path)))
    with pytest.raises(ValueError, match=r"--json .* is a folder"):
        prepare_rules(settled(replace(given, json=tmp_path)))


def test_quick_changes_only_what_is_not_given(given):
    assert settled(Args(quick=True, max_samples=5)) == Args(quick=True, **QUICK | dict(max_samples=5))
    assert settled(replace(given, quick=True)).pair is None
    assert settled(Args()).pair == "tiny-gpt-oss"


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as stopped:
        tyro.cli(Args, description=ablate_accept.__doc__, args=["--help"])
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "ablate_accept --quick" in shown
    assert "--block-sizes" in shown

"""The accept-rule laboratory, from arguments to its screen and files on a random pair, and its figures by hand."""

import contextlib
import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro

from dflash_jax.generate import Decoder
from dflash_jax.settings import SamplingParams
from experiments import ablate_accept
from experiments import pair as pairs
from experiments.laboratory.arguments import QUICK, Args, settled
from experiments.laboratory.judge import drafted, opinion_of, straying_of
from experiments.laboratory.markdown import tables
from experiments.laboratory.plan import left_out, prepare_rules, rules_at
from experiments.laboratory.rows import Row, best_lossless, perplexity_change, quotient
from experiments.laboratory.study import row_from
from experiments.laboratory.tables import cells
from experiments.pair import Pair, load_pair
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
def ran(given, tmp_path_factory):
    """One whole run with every output: ``(screen, study, folder)``."""
    folder = tmp_path_factory.mktemp("out")
    outputs = dict(json=folder / "deep" / "a.json", csv=folder / "a.csv", plots=folder / "plots")
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(ablate_accept, "use_compilation_cache", lambda: None)
        study = ablate_accept.main(replace(given, temperatures=(0.0, 1.0), **outputs))
    return out.getvalue(), study, folder


@pytest.fixture(scope="module")
def pair(given) -> Pair:
    ((plan,),) = prepare_rules(settled(given))
    return load_pair(plan.folders, plan.tokenizer, dtype="float32", experts=None)


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


def test_a_lossy_rule_is_called_so_everywhere(ran):
    screen, _, folder = ran
    found = json.loads((folder / "deep" / "a.json").read_text())
    lines = list(csv.DictReader((folder / "a.csv").open()))
    for rows in (found["rows"], lines):
        labels = {(row["rule"], row["label"]) for row in rows}
        assert labels == {("plain", "-"), ("greedy", "lossless"), ("match", "lossless"), ("typical", "LOSSY")}
    assert screen.count("LOSSY") == 2
    assert "**LOSSY**" in tables(found)


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


def test_which_tokens_are_drafts():
    """Rounds of two drafts and the own token; of none; of four drafts cut after three; and a row that is done."""
    counts, accepted = np.array([3, 1, 3, 0]), np.array([2, 0, 4, -1])
    marks = [False, True, True, False, False, True, True, True]
    assert drafted(counts, accepted).tolist() == marks


def test_total_variation_and_divergence_by_hand():
    """Drafts of p 1/2 and 1/4 among five tokens: TV 1/2 + 3/4, KL log 2 + log 4."""
    p = np.array([0.9, 0.5, 0.1, 0.25, 0.3])
    found = straying_of(p, np.array([False, True, False, True, False]))
    assert found.total_variation == pytest.approx(1.25)
    assert found.kl == pytest.approx(math.log(8))
    assert straying_of(p, np.zeros(5, bool)).kl == 0
    assert straying_of(np.array([0.0]), np.array([True])).kl == math.inf


def test_those_figures_are_the_distances_of_the_two_laws():
    """Half the sum of absolute differences, and the divergence, between certainty of d and p."""
    p, d = np.array([0.2, 0.5, 0.3]), 2
    said = np.eye(3)[d]
    found = straying_of(p[[d]], np.array([True]))
    assert found.total_variation == pytest.approx(0.5 * np.abs(said - p).sum())
    assert found.kl == pytest.approx((said[d] * np.log(said[d] / p[d])).sum())


def test_an_opinion_is_the_target_s(pair):
    """Probabilities and surprise of a long text, against one forward pass over all of it."""
    prompt, text = [3, 250, 7], np.random.default_rng(0).integers(0, 250, 150).tolist()
    setting = SamplingParams(temperature=0.7, top_k=40, seed=1)
    found = opinion_of(pair.plain, prompt, text, setting)
    row = jnp.array([[*prompt, *text[:-1]]])
    cache = pair.target.init_cache(1, 256, row.shape[1] + 1)
    whole = jax.jit(lambda params, row, cache: pair.target.unembed(params, pair.target.step(params, row, cache).hidden))
    logits = whole(pair.params, row, cache)[0, len(prompt) - 1 :]
    logits = np.asarray(logits, float)
    direct = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(text)), text]
    np.testing.assert_allclose(found.surprise, direct, rtol=2e-4, atol=2e-4)
    sharp = logits / 0.7
    for place in (0, 127, 149):
        kept = np.sort(sharp[place])[-40:]
        wanted = np.exp(sharp[place, text[place]]) / np.exp(kept).sum() * (sharp[place, text[place]] >= kept[0])
        assert found.p[place] == pytest.approx(wanted, rel=1e-3, abs=1e-9)


def test_greedy_texts_are_certain(pair):
    """Every token of plain greedy text has probability 1, any other 0."""
    plain = Decoder(pair.target, pair.params)
    (text,) = plain.generate([[5, 6]], 12).tokens
    assert opinion_of(plain, [5, 6], text, SamplingParams()).p.tolist() == [1.0] * 12
    other = [*text[:-1], (text[-1] + 1) % 250]
    assert opinion_of(plain, [5, 6], other, SamplingParams()).p[-1] == 0


def test_a_quotient_and_its_error():
    """Texts of 4/2, 6/2 and 5/2: 2.5, and deviations -1, 1, 0 over 6."""
    value, error = quotient(np.array([4.0, 6.0, 5.0]), np.array([2.0, 2.0, 2.0]))
    assert value == 2.5
    assert error == pytest.approx(math.sqrt(3 / 2 * 2) / 6)
    assert np.isnan(quotient(np.array([4.0]), np.array([2.0]))[1])
    assert np.isnan(quotient(np.zeros(2), np.zeros(2))).all()


def test_perplexity_change_by_hand():
    """Mean surprise log 2 against log 4: half the perplexity; equal texts leave no error."""

    class Told:
        def __init__(self, *surprise: float):
            self.surprise, self.lengths = surprise, np.array([2, 2])

        def by_prompt(self, values):
            return np.array(values, float)

    change, _ = perplexity_change(Told(2 * math.log(2), 2 * math.log(2)), Told(math.log(4), 3 * math.log(4)))
    assert change == pytest.approx(-0.5)
    assert perplexity_change(Told(1.0, 3.0), Told(1.0, 3.0)) == (0, 0)


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

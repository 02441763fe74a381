"""The benchmark's arithmetic, order of play, JSON, tables and refusals, with players that only pretend."""

import json
import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from experiments import bench
from experiments.benchmark.contest import (
    PLAIN,
    RATIOS,
    SPEC,
    Contest,
    Duel,
    closing,
    entry,
    first_divergence,
    opening,
    sample_of,
)
from experiments.benchmark.pipe import Refused
from experiments.benchmark.report import KEYS, Result, payload, spread, write_json
from experiments.benchmark.tables import show, verdict
from experiments.prompts import Row
from tests.experiments.random_pair import write_random_pair

ROOT = Path(__file__).resolve().parents[2]
LATER = math.inf


@dataclass
class Pretender:
    """Decodes ``tokens_per_s``; ``log`` collects who was asked."""

    tokens_per_s: dict[str, float]
    log: list[str] = field(default_factory=list)

    def ask(self, command: str, *, method: str, prompt: list[int], tokens: int, **variant) -> dict:
        name = ", ".join([method, *map(str, variant.values())])
        self.log.append(f"{name} {prompt[0]} {tokens}")
        if name not in self.tokens_per_s:
            raise Refused(f"{name} cannot")
        seconds = 0.5 + (tokens - 1) / self.tokens_per_s[name]
        said = [prompt[0]] * tokens
        return {"tokens": said, "seconds": seconds, "cpu_seconds": seconds, "rounds": (tokens - 1) // 2 or None}


def contest(rates: dict[str, float], prompts: int = 2) -> tuple[Contest, Pretender]:
    player = Pretender(rates)
    names = dict.fromkeys(name for pair in RATIOS.values() for name in pair)
    return Contest({(name, 1): player for name in names}, [[index] for index in range(prompts)], 11), player


def test_a_rate_leaves_the_prompt_out():
    one = {"tokens": [7], "seconds": 0.5}
    many = {"tokens": [7] * 11, "seconds": 2.5, "cpu_seconds": 2.0, "rounds": 4}
    sample = sample_of(3, one, many, threads=2)
    assert sample.rate == pytest.approx(10 / 2.0)
    assert sample.tokens_per_round == 2.5
    assert sample.cpu_share == pytest.approx(2.0 / 5.0)
    assert (sample.prompt, sample.first_s) == (3, 0.5)
    assert math.isnan(sample_of(0, {"tokens": [7], "seconds": 3.0}, many, 1).rate)


def test_spread_ignores_what_is_not_a_number():
    assert spread([3.0, math.nan, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "runs": 3}
    assert spread([math.nan])["median"] is None


def test_first_divergence():
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 9, 3], [1, 2, 3]) == 1
    assert first_divergence([1, 2], [1, 2, 3]) == 2


def test_duels_alternate_and_give_ratios_of_neighbours():
    game, player = contest({"plain, form": 20.0, "transformers": 5.0})
    duel = Duel("plain_over_transformers", entry(PLAIN, 1, {"form": "form"}), entry("transformers", 1, {}))
    assert game.run([duel], LATER, 3, lambda note: None) == 3
    assert game.ratios[duel] == pytest.approx([4.0] * 3)
    asked = [line.split()[0].rstrip(",") for line in player.log if line.endswith(" 11")]
    assert asked == ["plain", "transformers", "transformers", "plain", "plain", "transformers"]
    assert [sample.prompt for sample in game.samples[duel.first]] == [0, 1, 0]


def test_a_duel_is_fought_once_even_after_the_deadline():
    game, _ = contest({"plain, form": 20.0, "transformers": 5.0})
    duel = Duel("plain_over_transformers", entry(PLAIN, 1, {"form": "form"}), entry("transformers", 1, {}))
    assert game.run([duel], time.monotonic() - 1, 5, lambda note: None) == 1
    assert len(game.ratios[duel]) == 1


def test_who_cannot_decode_is_left_out_with_its_words():
    game, _ = contest({"plain, form": 20.0})
    duel = Duel("plain_over_transformers", entry(PLAIN, 1, {"form": "form"}), entry("transformers", 1, {}))
    game.run([duel], LATER, 2, lambda note: None)
    assert game.failures == {duel.second: "transformers cannot"}
    assert duel not in game.ratios


def test_calibration_walks_one_option_at_a_time():
    rates = {f"zlab_dflash, {b}, {e}": b + (10 if e == "y" else 0) for b in (2, 4, 8) for e in ("x", "y")}
    game, _ = contest(rates)
    best, seen = game.calibrate("zlab_dflash", 1, {"block": (2, 4, 8), "experts": ("x", "y")}, tokens=5, runs=1)
    assert dict(best.variant) == {"block": 8, "experts": "y"}
    assert len(seen) == 4
    assert not game.samples, "calibration is not a result"
    best, seen = game.calibrate("zlab_dflash", 1, {"block": (2, 4), "experts": ("x",)}, tokens=5, runs=1, until=0.0)
    assert len(seen) == 1


def test_duels_cover_every_setting_and_the_better_ones():
    names = (PLAIN, SPEC, "transformers", "zlab_dflash")
    chosen = {(name, threads): entry(name, threads, {}) for name in names for threads in (1, 2)}
    blocks = {threads: [entry(SPEC, threads, {"block": block}) for block in (2, 4)] for threads in (1, 2)}
    first = opening(chosen, blocks)
    assert sum(duel.ratio == "spec_over_plain" for duel in first) == 4
    assert sum(duel.ratio == "plain_over_transformers" for duel in first) == 2
    last = closing(chosen, {PLAIN: 1, SPEC: 2, "transformers": 1, "zlab_dflash": 2})
    assert len(set(last)) == len(last)
    crossing = Duel("spec_over_plain", chosen[SPEC, 2], chosen[PLAIN, 1])
    assert crossing in last
    assert not any(duel.ratio == "spec_over_llamacpp" for duel in last)


def result_of(game: Contest) -> Result:
    chosen = {
        (PLAIN, 1): entry(PLAIN, 1, {"form": "form"}),
        (SPEC, 1): entry(SPEC, 1, {"block": 4}),
        ("transformers", 1): entry("transformers", 1, {}),
    }
    spec = {1: [entry(SPEC, 1, {"block": block}) for block in (2, 4)]}
    game.run(opening(chosen, spec), LATER, 2, lambda note: None)
    parts = {"plain_step_s": 1.0, "verify_s": 1.5, "draft_s": 0.5, "verify_ratio": 1.5, "round_s": 2.1}
    parts |= {"overhead": 1.05, "overhead_spread": [1.0, 1.1]}
    probes = {1: {"cache_copies": {"value": 0}, "loop_overhead": {"value": 1.05}, "flatness": {"value": 1.02}}}
    return Result(
        game,
        (1,),
        chosen,
        {PLAIN: 1, SPEC: 1, "transformers": 1},
        probes=probes,
        blocks={1: {2: parts, 4: parts}},
        reasons={"spec_over_zlab_dflash": "no environment"},
        about={"command": "python -m experiments.bench"},
    )


def test_json_has_every_key_and_says_why_one_is_null(tmp_path):
    game, _ = contest({"plain, form": 20.0, "transformers": 5.0, "spec, 2": 30.0, "spec, 4": 40.0})
    result = result_of(game)
    write_json(result, tmp_path / "new" / "bench.json")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["bench.json"]
    found = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert set(KEYS) <= set(found)
    assert set(KEYS) <= set(found["threads"]["1"])
    assert found["plain_over_transformers"] == pytest.approx(4.0)
    assert found["spec_over_plain"] == pytest.approx(2.0)
    assert found["cache_copies"] == 0
    assert found["why_null"]["spec_over_zlab_dflash"] == "no environment"
    assert set(found["why_null"]) == {key for key in KEYS if found[key] is None}
    rows = {(row["contestant"], tuple(row["variant"].values())): row for row in found["contestants"]}
    assert rows[SPEC, (2,)]["tok_s"]["median"] == pytest.approx(30.0)
    assert rows[SPEC, (2,)]["prompts_equal"] == 2
    assert found["threads"]["1"]["blocks"]["2"]["spec_over_plain"]["median"] == pytest.approx(1.5)


def test_differing_ids_are_reported_with_their_place():
    game, _ = contest({"plain, form": 20.0, "transformers": 5.0, "spec, 2": 30.0, "spec, 4": 40.0})
    result = result_of(game)
    who = entry(SPEC, 1, {"block": 2})
    said = result.contest.samples[who][0].tokens
    wrong = (*said[:5], 99, *said[6:])
    result.contest.samples[who][0] = replace(result.contest.samples[who][0], tokens=wrong)
    row = next(r for r in payload(result)["contestants"] if r["variant"] == {"block": 2})
    assert (row["prompts_equal"], row["first_divergence"]) == (1, {"0": 5})


def test_the_tables_print(capsys):
    game, _ = contest({"plain, form": 20.0, "transformers": 5.0, "spec, 2": 30.0, "spec, 4": 40.0})
    show(result_of(game))
    out = capsys.readouterr().out
    assert "plain_over_transformers" in out
    assert "spec_over_zlab_dflash: null, no environment" in out
    assert "disturbed" not in out


def test_a_run_beside_others_is_marked():
    game, _ = contest({"plain, form": 20.0, "transformers": 5.0, "spec, 2": 30.0, "spec, 4": 40.0})
    result = result_of(game)
    who = entry(PLAIN, 1, {"form": "form"})
    result.contest.samples[who] = [replace(sample, cpu_share=0.5) for sample in result.contest.samples[who]]
    assert payload(result)["disturbed"] == ["plain [form] threads 1"]


def test_the_verdict_names_what_a_round_brings_and_costs():
    row = {"spec_over_plain": {"median": 0.5}, "tokens_per_round": 1.25, "round_in_plain_steps": 2.5}
    assert verdict(row) == "loses: brings 1.25 < costs 2.50"
    assert verdict(row | {"spec_over_plain": {"median": None}}) == "not measured"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target, draft = write_random_pair(tmp_path_factory.mktemp("pair"))
    return bench.Args(target=target, draft=draft, threads=(1,))


REFUSALS = (
    ({"threads": (0,)}, r"--threads 0: from 1 to \d+, the CPUs there are"),
    ({"threads": (10_000,)}, "--threads 10000"),
    ({"blocks": (1, 4)}, "--blocks 1 4: the anchor and drafts, 2 to 127"),
    ({"new_tokens": 1}, "--new-tokens 1 --samples 12: at least 2 tokens of 1 prompt"),
    ({"llama_cpp": Path("bin")}, "llama.cpp needs all of --llama-cpp DIR"),
    ({"split": "library"}, "no prompt of split 'library'; splits of the file: modeling, stdlib"),
    ({"draft": Path("nowhere")}, "drafter folder nowhere does not exist"),
    ({"json": ROOT}, "is a folder; expected a file"),
)


@pytest.mark.parametrize(("change", "words"), REFUSALS, ids=[next(iter(change)) for change, _ in REFUSALS])
def test_what_cannot_be_run_is_refused_before_anything_starts(pair, change, words):
    with pytest.raises(ValueError, match=words):
        bench.check(replace(pair, **change))


def test_prompts_are_taken_from_the_splits_in_turn(pair):
    rows = [Row(str(index), split, "x") for index, split in enumerate("aaab")]
    assert [row.where for row in bench.in_turn(rows, 3)] == ["0", "3", "1"]
    file = pair.target / "prompts.jsonl"
    assert len(bench.check(pair)) == 3, "modeling rows by default"
    assert len(bench.check(replace(pair, split="stdlib"))) == 1
    assert len(bench.check(replace(pair, prompts=file))) == 4, "a file that was asked for is taken whole"
    assert len(bench.check(replace(pair, prompts=file, samples=2))) == 2


def test_quick_is_short(pair):
    quick = bench.settled(replace(pair, quick=True))
    assert (quick.samples, quick.new_tokens) == (3, 64)
    assert bench.settled(pair) == pair


def test_thread_settings_stop_at_the_cpus(pair, monkeypatch):
    monkeypatch.setattr(bench, "available_cpus", lambda: [3])
    assert bench.settled(replace(pair, threads=())).threads == (1,)

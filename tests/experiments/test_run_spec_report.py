"""Figures and lines of reports made by hand: comparability, warnings, block sizes, files."""

import dataclasses
import json

import numpy as np
import pytest

from dflash_jax.generation import Generation
from experiments import report as reports
from experiments.agreement import Agreement, Divergence
from experiments.machine import Machine, Memory
from experiments.pair import Facts
from experiments.report import Compiled, Report, payload, write_json
from experiments.runs import Conditions, NotComparable, Run, differences, speedups
from experiments.summary import best_block_size, lines, warnings
from experiments.timing import StepCosts

CONDITIONS = Conditions("float32", "packed", 1, "0123456789abcdef", 13, (0,), "cpu")
OTHER = dict(
    **dict(dtype="bfloat16", expert_format="float32", batch=2, prompts="fedc", max_new_tokens=7, stop=(), device="gpu"),
    **dict(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=1, stop_strings=("x",)),
)


def generation(counts: list[int], accepted: list[int], decode_s: float, union: float = 2.0) -> Generation:
    """One row whose rounds went like this; two mixture layers."""
    return Generation(
        tokens=[list(range(1 + sum(counts)))],
        finish=["length"],
        seeds=[0],
        counts=np.array([counts]),
        accepted=np.array([accepted]),
        union=np.array([union, union + 1]),
        logprobs=None,
        ttft_s=0.1,
        decode_s=decode_s,
    )


def run(name: str, counts: list[int], accepted: list[int], seconds: list[float], union: float = 2.0, **changed) -> Run:
    """A run of one prompt with as many repeats as ``seconds``."""
    repeats = tuple((generation(counts, accepted, each, union),) for each in seconds)
    return Run(name, dataclasses.replace(CONDITIONS, **changed), repeats)


PLAIN = run("baseline", [1] * 12, [0] * 12, [1.2, 2.4, 1.2])
SPECULATIVE = run("speculative", [4, 8], [3, 7], [0.4, 0.6, 0.5], union=5.0)


def report(**changed) -> Report:
    """Two rounds of 4 and 8 tokens against twelve plain steps."""
    plain = dict(
        command="python -m experiments.run_spec",
        pair=Facts(("target", "drafter"), "gpt_oss", "greedy", True, True, 8, 8, False, 16, 2),
        prompts_known=64,
        machine=Machine("cpu", "cpu", 1, 2, {"python": "3", "jax": "1"}, None),
        compiled=Compiled(41.2, 14, 0, 3.0, 0),
        memory=Memory(2_000_000_000, None, 50_000_000, 30_000_000, 9_000_000, 1_000_000),
        speculative=SPECULATIVE,
        plain=PLAIN,
        costs=StepCosts(20, 8, step_s=0.1, verify_s=0.15, draft_s=0.05, ratio=1.5),
        agreement=Agreement(1, ()),
    )
    return Report(**plain | changed)


def line(report: Report, label: str) -> str:
    """The text of one line of the summary, the lines below it joined to it."""
    found = "\n".join(lines(report)).replace("\n" + " " * 19, " ").splitlines()
    return next((each[19:].strip() for each in found if each[:19].strip() == label), "")


def test_every_figure_of_a_run_made_by_hand():
    made = report()
    assert line(made, "baseline") == "10.0 tok/s (5.0-10.0)   TTFT 100.0 ms   ITL 100.0 ms"
    assert line(made, "speculative") == "24.0 tok/s (20.0-30.0)   TTFT 100.0 ms   ITL 41.7 ms"
    # neighbouring repeats: 30/10, 20/5, 24/10; a round takes 0.25 s, a plain step 0.1 s
    assert line(made, "speedup") == (
        "3.00x (2.40-4.00)   upper bound at this acceptance 6.00x   break-even acceptance 2.00"
    )
    assert line(made, "acceptance") == "6.00 tokens/verify (12/2)   drafts accepted 71%"
    assert line(made, "histogram") == "4:50% 8:50%"
    assert line(made, "conditional") == "1.00 1.00 1.00 .50 1.00 1.00 1.00"
    assert line(made, "where time goes") == "draft 20%   verify 60%   accept and rest 20%   of a round of 250.0 ms"
    assert line(made, "verify") == "width 8 costs 1.50x width 1   (150.0 ms and 100.0 ms at 20 tokens)"
    assert line(made, "experts") == (
        "verify union 5.50/16 per layer (2.20x the 2.50 of a plain step)   uniform estimate 10.50"
    )
    assert line(made, "memory").startswith("process peak 2.00 GB   target 50.0 MB (experts 30.0 MB)   drafter 9.0 MB")
    assert line(made, "why not faster?") == (
        "a round costs 2.00 plain steps (verify 1.20, draft 0.40, rest 0.40) and delivers 6.00 tokens"
    )
    assert warnings(made) == []


def test_parts_that_cost_more_apart_are_shares_of_their_sum():
    made = report(costs=StepCosts(20, 8, step_s=0.1, verify_s=0.3, draft_s=0.1, ratio=3.0))
    wanted = "draft 25%   verify 75%   accept and rest below noise   of a round of 250.0 ms"
    assert line(made, "where time goes") == wanted
    assert "(verify 1.50, draft 0.50, rest below noise)" in line(made, "why not faster?")


def test_speedup_is_bound_over_break_even():
    made = report()
    assert made.speedup[0] == pytest.approx(made.speculative.bound / made.break_even)


@pytest.mark.parametrize("condition", OTHER)
def test_unequal_runs_have_no_speedup(condition):
    other = dataclasses.replace(PLAIN, conditions=dataclasses.replace(CONDITIONS, **{condition: OTHER[condition]}))
    with pytest.raises(NotComparable) as refused:
        speedups(other, SPECULATIVE)
    assert len(refused.value.reasons) == 1
    assert condition.replace("_", " ") in str(refused.value)
    made = report(plain=other)
    assert made.speedup is None
    assert line(made, "speedup").startswith(f"not printed: the runs differ in {condition.replace('_', ' ')}")
    assert "x (" not in line(made, "speedup")
    assert line(made, "why not faster?") == ""
    found = payload(made)
    assert found["speedup"] is None
    assert found["break_even"] is None
    assert len(found["not_comparable"]) == 1


def test_unequal_repeats_have_no_speedup():
    fewer = dataclasses.replace(PLAIN, repeats=PLAIN.repeats[:2])
    assert differences(fewer, SPECULATIVE) == ["repeats: 2 (baseline) and 3 (speculative)"]
    assert differences(PLAIN, SPECULATIVE) == []


def test_the_conditions_cover_what_the_user_may_change():
    assert {field.name for field in dataclasses.fields(Conditions)} == set(OTHER)


def test_divergences_are_told_apart():
    tie = Divergence(0, 5, 7, 8, margin=2e-4, tie=True)
    real = Divergence(2, 0, 7, None, margin=1.3, tie=False)
    made = report(agreement=Agreement(4, (tie, real)))
    assert "0.500 (2 of 4 prompts" in line(made, "agreement")
    assert "prompt 0 parts at token 5: top-2 logit margin 0.0002 (tie)" in line(made, "agreement")
    assert "prompt 2 parts at token 0: top-2 logit margin 1.3 (REAL)" in line(made, "agreement")
    assert "rounding cannot explain" in warnings(made)[0]
    assert warnings(report(agreement=Agreement(4, (tie,)))) == []
    assert payload(made)["divergences"][1]["speculative"] is None
    many = line(report(agreement=Agreement(9, (tie,) * 5)), "agreement")
    assert many.endswith("and 2 more (--json lists all)")


def test_compiling_while_timing_is_not_kept_quiet():
    made = report(compiled=Compiled(1.0, 14, 0, 3.0, while_timing=2))
    assert "2 programs were compiled while timing" in warnings(made)[0]


@pytest.mark.parametrize("which", ["plain", "speculative"])
def test_more_busy_cpus_than_threads_are_a_warning(which: str) -> None:
    """The made report is of two threads."""
    run = {"plain": PLAIN, "speculative": SPECULATIVE}[which]
    (words,) = warnings(report(**{which: dataclasses.replace(run, cpus_busy=(2.0, 2.9, 2.0))}))
    assert "2.9 CPUs were busy while 2 should compute" in words
    assert warnings(report(**{which: dataclasses.replace(run, cpus_busy=(2.0, 2.1))})) == []


def test_next_to_no_acceptance_is_suspicious():
    slow = run("speculative", [1] * 12, [0] * 12, [3.0, 3.0, 3.0])
    made = report(speculative=slow)
    assert "acceptance 1.00 is next to none" in warnings(made)[0]
    assert line(made, "why not faster?").endswith("no block size is predicted to reach 1x")


def test_a_dense_target_has_no_expert_line():
    silent = [dataclasses.replace(g, union=np.zeros(0)) for (g,) in SPECULATIVE.repeats]
    dense = dataclasses.replace(SPECULATIVE, repeats=tuple((g,) for g in silent))
    made = report(speculative=dense, pair=Facts(("a", "b"), "qwen3", "greedy", True, True, 8, 8, False, 0, 0))
    assert line(made, "experts") == ""
    assert payload(made)["union_mean"] is None


def test_batches_weigh_by_their_rounds():
    repeat = (generation([4, 8], [3, 7], 0.4, union=5.0), generation([2], [1], 0.1, union=2.0))
    both = Run("speculative", CONDITIONS, (repeat,) * 3)
    assert both.rounds == 3
    assert both.tokens == 16
    assert both.union == pytest.approx((2 * 5.5 + 2.5) / 3)
    assert both.rates == pytest.approx([14 / 0.5] * 3)
    assert both.end_to_end_rates == pytest.approx([16 / 0.7] * 3)
    assert both.bound == pytest.approx(14 / 3)


def test_the_best_block_size():
    """Only the first draft ever stands: two tokens a round at any block size, and block 2 is the cheapest."""
    conditional = np.array([1.0, 0.0, np.nan])
    assert best_block_size(conditional, total=3.0, verify=2.0, ratio=2.0) == (2, pytest.approx(3.0 / (1 + 4 / 3)))
    # every draft stands: the present block is best
    assert best_block_size(np.ones(3), total=3.0, verify=2.0, ratio=2.0) == (4, 1.0)
    first_only = run("speculative", [2] * 6, [1] * 6, [0.4, 0.4, 0.4])
    assert "try --block-size 2 (predicted" in line(report(speculative=first_only), "why not faster?")


def test_lines_fit_the_screen():
    tie = Divergence(0, 5, 7, 8, margin=2e-4, tie=True)
    for made in (report(), report(agreement=Agreement(9, (tie,) * 5)), report(compiled=Compiled(1, 1, 1, 1, 1))):
        shown = "\n".join(lines(made) + warnings(made)).splitlines()
        assert len(shown) <= 24
        assert max(map(len, shown)) <= 118


def test_json_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_json(report(), path)
    first = json.loads(path.read_text())
    assert first["acceptance_length"] == 6.0
    assert first["acceptance_ratio"] == pytest.approx(10 / 14)
    assert first["acceptance_histogram"] == [0, 0, 0, 1, 0, 0, 0, 1]

    def unwritable(report):
        return {"figure": object()}

    monkeypatch.setattr(reports, "payload", unwritable)
    with pytest.raises(TypeError):
        write_json(report(), path)
    assert json.loads(path.read_text()) == first
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]

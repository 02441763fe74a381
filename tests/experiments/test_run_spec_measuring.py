"""The measuring programs measure what they say: steps of the real text, margins of the real logits, programs built."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.accept import argmax_draft
from dflash_jax.draft_tree import TreeMatch
from experiments import compilation
from experiments.agreement import TIE, compare, first_difference
from experiments.arguments import Args
from experiments.compilation import CompileWatch, use_compilation_cache
from experiments.machine import describe, measure_memory
from experiments.pair import Pair, load_pair
from experiments.plan import prepare
from experiments.progress import Waiting
from experiments.timing import StepTimer
from tests.experiments.random_pair import BLOCK, write_random_pair

NEW = 20


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """One prompt for the random pair."""
    target, draft = write_random_pair(tmp_path_factory.mktemp("pairs"))
    return prepare(Args(target=target, draft=draft, max_samples=1))


@pytest.fixture(scope="module")
def pair(plan) -> Pair:
    return load_pair(plan.folders, plan.tokenizer, dtype="float32", experts=None)


@pytest.fixture(scope="module")
def prompt(plan) -> list[int]:
    return plan.batches[0][0]


@pytest.fixture(scope="module")
def text(pair, prompt) -> list[int]:
    """Plain greedy text."""
    return pair.plain.generate([prompt], NEW).tokens[0]


@pytest.fixture(scope="module")
def timer(pair, prompt, text) -> StepTimer:
    return StepTimer(pair.speculative, [prompt], [text], NEW, steps=4)


def test_timed_steps_say_the_text(timer, prompt, text):
    """Steps begin half-way; each says the token that greedy decoding said there, at either width."""
    half = len(text) // 2
    assert timer.length == len(prompt) + half
    follows = text[half + 1 : half + 5]
    for width in (1, BLOCK):
        said = np.asarray(timer._step(width))
        assert said.shape == (4, 1, width)
        assert said[:, 0, 0].tolist() == follows
    assert np.asarray(timer.cache.length).tolist() == [timer.length]


def test_timed_drafts_are_the_drafter_s(timer, pair, prompt, text):
    """Each proposal is what the drafter proposes after hearing exactly the text before its anchor."""
    half = len(text) // 2
    propose = jax.jit(pair.drafter.propose, static_argnums=(1, 5))
    for step in (0, 3):
        heard = [*prompt, *text[: half + step]]
        state = pair.speculative.start([heard], 1)
        anchor = jnp.array([text[half + step]], jnp.int32)
        draft = propose(pair.draft_params, pair.target, pair.params, anchor, state.draft_cache, argmax_draft)
        block = np.asarray(timer.blocks[step, 0])
        assert block.tolist() == [text[half + step], *np.asarray(draft.tokens)[0].tolist()]
    assert np.asarray(timer.draft_cache.length).tolist() == [timer.length]


def test_a_tree_s_verification_is_timed_at_its_own_width(pair, prompt, text):
    wide = StepTimer(replace(pair, rule=TreeMatch(11)).speculative, [prompt], [text], NEW, steps=2)
    wide.turn()
    assert wide.costs().width == 12 == wide.blocks.shape[-1]
    assert wide._step(12).shape == (2, 1, 12)


def test_turns_are_medians(timer):
    timer.seconds[:] = [[1.0, 3.0, 0.5], [2.0, 8.0, 0.7], [1.5, 3.0, 0.1]]
    costs = timer.costs()
    assert (costs.step_s, costs.verify_s, costs.draft_s, costs.ratio) == (1.5, 3.0, 0.5, 3.0)
    timer.seconds.clear()
    timer.turn()
    assert all(seconds > 0 for seconds in timer.seconds[0])


def test_the_margin_is_the_target_s(pair, prompt, text):
    """A text changed at token 6: the margin there is that of the logits after prompt and six tokens."""
    place = 6
    wrong = [*text[:place], text[place] + 1, *text[place + 1 :]]
    found = compare(pair.plain, [prompt, prompt], [text, text], [text, wrong], "float32")
    assert found.share == 0.5
    (only,) = found.divergences
    heard = jnp.array([[*prompt, *text[:place]]], jnp.int32)

    @jax.jit
    def logits(params):
        out = pair.target.step(params, heard, pair.target.init_cache(1, 128, 128))
        return pair.target.unembed(params, out.hidden)

    best = np.sort(np.asarray(logits(pair.params))[0, -1])[::-1]
    assert only.margin == pytest.approx(best[0] - best[1], rel=1e-3)
    assert (only.prompt, only.place, only.plain, only.speculative) == (1, place, text[place], text[place] + 1)
    assert only.tie == (only.margin < TIE["float32"])


def test_what_counts_as_a_tie_depends_on_the_dtype(pair, prompt, text, monkeypatch):
    monkeypatch.setattr("experiments.agreement.margin_after", lambda *_: 0.1)
    shorter = text[:-1]
    for dtype, tie in (("float32", False), ("bfloat16", True)):
        (found,) = compare(pair.plain, [prompt], [text], [shorter], dtype).divergences
        assert found.tie is tie
        assert (found.place, found.speculative) == (len(shorter), None)


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0


def test_a_watch_counts_programs_once():
    @jax.jit
    def double(x):
        return x * 2 + len("fresh program")

    x = jnp.arange(7.0)
    with CompileWatch() as first:
        double(x)
    with CompileWatch() as second:
        double(x)
    assert (first.programs, second.programs) == (1, 0)
    assert first.seconds > 0
    assert second.seconds == 0


def test_the_cache_is_where_the_variable_says(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(compilation.jax.config, "update", asked.__setitem__)
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path))
    assert use_compilation_cache() == tmp_path / "xla"
    assert asked["jax_compilation_cache_dir"] == str(tmp_path / "xla")
    monkeypatch.delenv("DFLASH_JAX_CACHE")
    monkeypatch.setenv("HOME", "/somebody")
    assert str(use_compilation_cache()) == "/somebody/.cache/dflash_jax/xla"


def test_memory_counts_every_byte_once(pair):
    memory = measure_memory(pair, batch=2, tokens=60)
    leaves = jax.tree.leaves(pair.params)
    assert memory.target == sum(leaf.nbytes for leaf in leaves)
    assert 0 < memory.experts < memory.target
    assert memory.drafter == sum(leaf.nbytes for leaf in jax.tree.leaves(pair.draft_params))
    real = pair.speculative.start([[1] * 40, [2] * 40], 20)
    assert memory.caches == sum(leaf.nbytes for leaf in jax.tree.leaves((real.cache, real.draft_cache)))
    assert memory.peak > memory.target


def test_the_machine_is_described():
    machine = describe()
    assert machine.threads >= 1
    assert machine.versions["jax"] == jax.__version__
    assert machine.is_cpu == (jax.default_backend() == "cpu")


def test_waiting_is_said_on_stderr_only(capsys):
    for quiet in (False, True):
        with Waiting(quiet).on("compiling"), Waiting(quiet).through("generating", 3) as step:
            step("speculative 100 tok/s")
        shown = capsys.readouterr()
        assert not shown.out
        assert [line.split()[0] for line in shown.err.splitlines()] == ([] if quiet else ["compiling", "generating"])

"""The switch of widths: what it chooses, what it costs a useless drafter, and that no token depends on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import adaptive as adaptive_module
from dflash_jax.adaptive import PENDING, AdaptiveDecoder, _Run
from dflash_jax.controller import FIRST_REST, LONGEST_REST, PROBE, SOON, Controller
from dflash_jax.generate import Decoder
from dflash_jax.rules import ACCEPT
from dflash_jax.sampling import distribution
from dflash_jax.settings import SamplingParams, packed
from tests.support.drafters import tiny_drafter
from tests.support.families import family
from tests.support.mass import chance, mass_of
from tests.support.texts import random_prompts

COSTS = {1: 1.0, 2: 1.5, 4: 1.9, 8: 2.5}
"""Rounds in plain steps, as on the shipped pairs."""


def simulate(
    rates: list[float],
    tokens: int,
    seed: int = 0,
    controller: Controller | None = None,
    costs: dict[int, float] = COSTS,
    call: float = 0.0,
    budget: int | None = None,
) -> tuple[float, dict[int, int], Controller]:
    """Speed against plain decoding, rounds by block size: every draft stands with its place's rate.

    Args:
        call: plain steps that a segment costs besides its rounds, and plain decoding once.
        budget: tokens that the text could have had; it stops at ``tokens``.
    """
    rng, controller = np.random.default_rng(seed), controller or Controller(dict(costs), call)
    said, seconds, used = 0, 0.0, dict.fromkeys(costs, 0)
    while said < tokens:
        left = (budget or tokens) - said
        size, rounds = controller.next(left)
        rounds = min(rounds if size == 1 and rounds >= left else min(rounds, PENDING), tokens - said)
        stands = rng.random((rounds, size - 1)) < np.array(rates[: size - 1])
        accepted = np.cumprod(stands, axis=1).sum(1)[None]
        took = costs[size] * rounds + call * costs[1]
        controller.saw(size, accepted + 1, accepted, took, first=said == 0)
        said, seconds, used[size] = said + int(accepted.sum()) + rounds, seconds + took, used[size] + rounds
    return (said + call) * costs[1] / seconds, used, controller


class TestTheController:
    @pytest.mark.parametrize("known", [False, True])
    @pytest.mark.parametrize("call", [0.0, 1.0, 5.0, 20.0])
    @pytest.mark.parametrize("dearer", [1.0, 1.5, 3.0])
    def test_a_drafter_that_is_always_wrong_costs_at_most_a_twentieth(
        self, dearer: float, call: float, known: bool
    ) -> None:
        """Of any text, the first ones too, whatever drafted rounds and calls cost, and wherever the text stops."""
        costs = {size: cost if size == 1 else cost * dearer for size, cost in COSTS.items()}
        for tokens in (8, 16, 32, 64, 128, 132, 140, 300, 512, 4096, 32768):
            for budget in (tokens, 2 * tokens, 40_000):
                controller = Controller(dict(costs), call)
                if known:
                    controller.learn(8, np.full((1, 12), 1), np.full((1, 12), 0))
                speed, _, _ = simulate([0.0] * 7, tokens, controller=controller, costs=costs, call=call, budget=budget)
                assert speed >= 0.95, (tokens, budget)
        if call == 0:
            assert controller.pause == LONGEST_REST, "it is tried nevertheless"

    @pytest.mark.parametrize("call", [0.0, 5.0, 20.0])
    @pytest.mark.parametrize("tokens", [24, 128, 700])
    def test_texts_together_lose_no_more_than_one(self, tokens: int, call: float) -> None:
        controller = Controller(dict(COSTS), call)
        speeds = [
            simulate([0.0] * 7, tokens, controller=controller, call=call, budget=2048)[0]
            for _ in range(200_000 // tokens)
        ]
        for texts in range(1, len(speeds) + 1):
            assert 1 / np.mean([1 / speed for speed in speeds[:texts]]) >= 0.95, texts
        assert min(speeds) < 1, "it is tried nevertheless"

    @pytest.mark.parametrize("rate", [0.95, 0.85])
    def test_it_finds_the_widest_block_of_a_good_drafter(self, rate: float) -> None:
        """Whatever its first rounds happened to be."""
        for seed in range(30):
            speed, used, _ = simulate([rate] * 7, 4000, seed=seed)
            assert speed > (2.0 if rate == 0.95 else 1.6) and max(used, key=used.get) == 8, seed

    def test_it_widens_when_later_drafts_grow_good(self) -> None:
        _, used, controller = simulate([0.9, 0.8, 0.6, 0.05, 0.0, 0.0, 0.0], 2000)
        assert max(used, key=used.get) == 4
        _, used, _ = simulate([0.97] * 7, 6000, controller=controller)
        assert used[8] > used[4]

    def test_one_slow_segment_bans_no_block(self) -> None:
        """Nor do several for good."""
        _, _, controller = simulate([0.97] * 7, 1000)
        controller.saw(8, np.full((1, 12), 7), np.full((1, 12), 6), seconds=12 * 20 * 2.5)
        assert controller.best() == 8
        for _ in range(6):
            controller.saw(8, np.full((1, 12), 7), np.full((1, 12), 6), seconds=12 * 20 * 2.5)
        assert controller.best() < 8
        simulate([0.97] * 7, 12000, controller=controller)
        assert controller.best() == 8

    def test_it_finds_a_narrow_block_where_only_the_first_drafts_stand(self) -> None:
        speed, used, _ = simulate([0.9, 0.8, 0.6, 0.05, 0.0, 0.0, 0.0], 4000)
        assert speed > 1.0 and max(used, key=used.get) == 4

    def test_it_comes_back_when_the_drafter_grows_good(self) -> None:
        _, _, controller = simulate([0.0] * 7, 300)
        for _ in range(20):
            size, rounds = controller.next(1000)
            accepted = np.full((1, rounds), size - 1)
            controller.saw(size, accepted + 1, accepted, COSTS[size] * rounds)
        assert controller.best() == 8 and controller.next(1000)[0] == 8

    def test_costs_follow_the_clock(self) -> None:
        controller = Controller(dict(COSTS))
        for _ in range(90):
            controller.saw(8, np.full((1, 5), 4), np.full((1, 5), 3), seconds=5 * 9.0)
        assert controller.costs[8] == pytest.approx(9.0, rel=0.01)
        assert controller.best() != 8

    def test_an_unknown_time_changes_no_cost(self) -> None:
        controller = Controller(dict(COSTS))
        controller.saw(8, np.full((1, 4), 4), np.full((1, 4), 3), seconds=None)
        assert controller.costs == COSTS

    def test_without_another_size_it_decodes_plainly(self) -> None:
        assert Controller({1: 1.0}).next(70) == (1, 70)

    def test_what_a_probe_may_lose_is_counted_before_it_is_made(self) -> None:
        """A twenty-fifth of the tokens so far: four vain rounds of two tokens lose two plain steps, which may be lost
        after 50 tokens, and after fewer only if something was saved; two calls, there and back, count too."""
        controller = Controller(dict(COSTS))
        assert [controller.next(left) for left in (51, 50, 49)] == [(1, 50), (1, 50), (1, 49)]
        controller.said = 49
        assert controller.next(51) == (1, 1)
        controller.said = 50
        assert controller.next(51) == (2, PROBE)
        controller.call = 1.0
        assert controller.next(500) == (1, 75), "four steps and the call until then are a hundred and twenty-five's"
        controller.said = 100
        assert controller.next(500) == (2, PROBE)
        controller.said, controller.saved = 50, 2.0
        assert controller.next(50) == (2, PROBE)
        controller.rested, controller.saved = False, -100.0
        assert controller.next(50) == (8, PROBE), "a promising probe is followed up"

    def test_where_waiting_costs_too_much_the_text_goes_on_plainly(self) -> None:
        """Features that wait are absorbed every 128 tokens, by a call each time."""
        controller = Controller(dict(COSTS), call=6.0)
        controller.said = 200
        assert controller.next(4000) == (1, 4000), "a twenty-fifth of 128 tokens pays for no call of six steps"
        controller.said = 350
        assert controller.next(4000) == (2, PROBE)

    def test_a_drafter_that_is_of_some_use_need_not_save_first(self) -> None:
        controller = Controller(dict(COSTS), saved=-100.0)
        for stood, size in ((1, 1), (2, 2)):
            controller.stood_ever, controller.tried_ever = stood, 4
            assert controller.next(50)[0] == size

    def test_what_the_warm_up_saw_is_known(self) -> None:
        controller = Controller(dict(COSTS))
        controller.learn(8, np.full((1, 12), 7), np.full((1, 12), 6))
        assert (controller.next(50)[0], controller.said, controller.saved) == (8, 0, 0)
        controller = Controller(dict(COSTS))
        controller.learn(8, np.full((1, 12), 1), np.full((1, 12), 0))
        assert controller.next(500) == (1, FIRST_REST)

    def test_calls_cost_what_the_clock_says(self) -> None:
        controller = Controller(dict(COSTS))
        for _ in range(30):
            controller.saw(2, np.full((1, PROBE), 1), np.full((1, PROBE), 0), seconds=PROBE * 1.5 + 3.0)
        assert controller.call == pytest.approx(3.0, rel=0.01)
        assert controller.saved == pytest.approx(30 * (PROBE - PROBE * 1.5 - 3.0))

    @pytest.mark.parametrize("call", [0.0, 5.0])
    def test_a_controller_that_counts_no_loss_would_fail(self, monkeypatch: pytest.MonkeyPatch, call: float) -> None:
        monkeypatch.setattr(Controller, "patience", lambda self, size, left: self.rest)
        assert simulate([0.0] * 7, 32, call=call)[0] < 0.95

    def test_nor_would_one_that_knows_nothing_of_calls_do(self) -> None:
        controller = Controller(dict(COSTS))
        assert simulate([0.0] * 7, 300, controller=controller, call=20.0)[0] < 0.95

    def test_a_call_is_in_no_rounds_cost(self) -> None:
        controller = Controller(dict(COSTS), call=5.0)
        for _ in range(50):
            controller.saw(1, np.full((1, 128), 1), np.full((1, 128), 0), seconds=128 + 5.0)
            controller.saw(8, np.full((1, 24), 4), np.full((1, 24), 3), seconds=24 * 2.5 + 5.0)
        assert controller.costs == pytest.approx(COSTS) and controller.call == 5.0
        assert controller.saved == pytest.approx(50 * (24 * 4 - 24 * 2.5 - 2 * 5.0))

    def test_a_drafter_that_has_paid_is_asked_again_sooner(self) -> None:
        vain = np.full((1, PROBE), 1), np.full((1, PROBE), 0), None
        for saved, rest in ((0.0, FIRST_REST), (50.0, SOON)):
            controller = Controller(dict(COSTS))
            controller.saved = saved
            controller.saw(2, *vain)
            assert controller.rest == rest
            controller.saw(2, *vain)
            assert controller.rest == 4 * FIRST_REST

    def test_where_width_is_free_nothing_can_be_lost(self) -> None:
        controller = Controller({1: 1.0, 2: 1.0, 8: 1.0})
        assert controller.next(1) == (2, PROBE)
        controller.call = 1.0
        assert controller.next(1) == (1, 1)


SCHEDULE = [(8, 2), (1, 5), (3, 4), (1, PENDING), (8, 1), (3, 2), (8, 50)]


class Scripted(Controller):
    """Chooses by a list, over and over."""

    def __init__(self, costs: dict[int, float], schedule=SCHEDULE) -> None:
        super().__init__(costs)
        self.schedule, self.turn = schedule, -1

    def next(self, left: int) -> tuple[int, int]:
        self.turn += 1
        return self.schedule[self.turn % len(self.schedule)]


def adaptive(chosen, drafter, params, rule) -> AdaptiveDecoder:
    decoder = Decoder(chosen.target, chosen.params, drafter, params, rule=rule)
    return AdaptiveDecoder(decoder, (3,), {2: Scripted({1: 1.0, 3: 1.0, 8: 1.0})})


@pytest.mark.parametrize(("name", "rule"), [("gpt_oss-split", "greedy"), ("qwen3_5_moe-solve", "match")])
def test_no_token_depends_on_the_widths(name: str, rule: str) -> None:
    """Through every change of width, plain segments included, the text is the plain one."""
    chosen = family(name)
    prompts = random_prompts(chosen, (5, 17))
    sampling = SamplingParams(temperature=0.9 if rule == "match" else 0.0, seed=3)
    drafter, params = tiny_drafter("mixed", name)
    decoder = adaptive(chosen, drafter, params, ACCEPT[rule])
    undrafted = Decoder(chosen.target, chosen.params, rule=ACCEPT[rule])
    one, other = undrafted.generate(prompts, 90, sampling=sampling).tokens
    stop = [token for place, token in enumerate(one) if place > 40 and token not in one[:place] + other][:1]
    options = dict(stop=stop, sampling=sampling, logprobs=2)
    found, plain = (each.generate(prompts, 90, **options) for each in (decoder, undrafted))
    assert found.tokens == plain.tokens and found.finish == plain.finish
    for mine, theirs in zip(found.logprobs, plain.logprobs, strict=True):
        np.testing.assert_allclose(mine.values, theirs.values, rtol=0, atol=1e-9)
    assert set(found.widths.tolist()) == {1, 3, 8} and len(found.widths) == found.rounds
    assert ((found.counts >= 1) & (found.counts <= found.widths) | (found.counts == 0)).all()


def test_the_law_does_not_depend_on_the_widths() -> None:
    """Under a rule whose text does: every token is a draw from the target's own distribution."""
    chosen, rows = family("qwen3-untied"), 512
    (prompt,) = random_prompts(chosen, (5,))
    decoder = Decoder(chosen.target, chosen.params, *tiny_drafter("mixed", "qwen3-untied"), rule=ACCEPT["block"])
    switch = Scripted({1: 1.0, 3: 1.0, 8: 1.0}, schedule=((8, 1), (1, 1), (3, 2), (1, 3), (8, 9)))
    sampling = [SamplingParams(1.5, seed=row) for row in range(rows)]
    found = AdaptiveDecoder(decoder, (3,), {rows: switch}).generate([prompt] * rows, 9, sampling=sampling)
    assert set(found.widths.tolist()) == {1, 3, 8} and found.accepted.max() > 1
    said = np.array(found.tokens)
    whole = np.concatenate([np.tile(prompt, (rows, 1)), said[:, :-1]], axis=1).astype(np.int32)
    step = jax.jit(chosen.target.step)
    hidden = step(chosen.params, whole, chosen.target.init_cache(*whole.shape, whole.shape[1])).hidden
    settings = jax.tree.map(jnp.asarray, packed(sampling)[0])
    p = np.asarray(distribution(chosen.target.unembed(chosen.params, hidden), settings))[:, 4:]
    assert chance(mass_of(p, said, np.random.default_rng(0))[:, 1:], 40) > 1e-3


def drafted_after(chosen, weights, drafter, prompt: list[int]) -> np.ndarray:
    """The drafter's logits after a wide segment, a plain one and a wide one, and the text so far."""
    decoder = AdaptiveDecoder(Decoder(chosen.target, chosen.params, drafter, weights), (2,))
    run = _Run(decoder, decoder.start([prompt], 90))
    for size, until in ((8, 2), (1, 32), (2, 33)):
        run.segment(size, until)
    return run.state, block_logits(chosen, drafter, weights, run.state)


def block_logits(chosen, drafter, weights, state) -> np.ndarray:
    tokens = jnp.pad(state.anchor[:, None], ((0, 0), (0, 7)), constant_values=3)
    args = (weights, chosen.target, chosen.params, tokens, state.draft_cache)
    return np.asarray(jax.jit(drafter.logits, static_argnums=1)(*args))


def check_context(name: str) -> None:
    """The drafter proposes what it would propose had it heard prompt and text at once."""
    chosen = family(name)
    (prompt,) = random_prompts(chosen, (17,))
    drafter, weights = tiny_drafter("mixed", name)
    state, found = drafted_after(chosen, weights, drafter, prompt)
    said = np.asarray(state.tokens)[0, : int(state.delivered[0])].tolist()
    whole = Decoder(chosen.target, chosen.params, drafter, weights).start([[*prompt, *said[:-1]]], 20)
    assert whole.anchor.tolist() == state.anchor.tolist() == said[-1:]
    np.testing.assert_allclose(found, block_logits(chosen, drafter, weights, whole), rtol=1e-9, atol=1e-9)


def test_the_drafter_has_heard_what_plain_segments_said() -> None:
    check_context("gpt_oss-split")


def test_a_drafter_that_missed_a_plain_segment_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive_module, "catch_up", lambda drafter, params, cache, pending: cache)
    with pytest.raises(AssertionError):
        check_context("gpt_oss-split")

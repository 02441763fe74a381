"""Seeds: what a row says is its own, whatever slot it sits in, whoever its neighbours are and however many."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import pytest

from dflash_jax import speculate
from dflash_jax.accept import Block, Match, OneHot, Rejection
from dflash_jax.generate import Decoder
from dflash_jax.generation import Generation
from dflash_jax.plain import NoDrafter
from dflash_jax.protocols import AcceptRule
from dflash_jax.settings import GREEDY, SamplingParams
from tests.support.drafters import tiny_drafter
from tests.support.families import Family, family
from tests.support.loop import trace_anew
from tests.support.oracle import ALL, script
from tests.support.texts import cut_at, greedy, random_prompts, scripted

LENGTHS, BLOCK, TOKENS = (5, 29, 17, 1), 8, 24
SEVEN, UNSEEDED = SamplingParams(1.2, seed=7), SamplingParams(1.2)
ROWS = (SEVEN, UNSEEDED, SEVEN, GREEDY)
ACCEPT = ([7, 0, 3], [0], [1, 7, 1], [4, 4, 2, ALL])
ORDERS = ((3, 2, 1, 0), (1, 0, 3, 2))


@dataclass(frozen=True)
class Case:
    """Four prompts, a rule and who proposes: a DFlash drafter, a script, or nobody."""

    name: str
    proposes: str
    rule: AcceptRule = Match()  # noqa: RUF009  (a rule is a value)
    block: int = BLOCK

    def __str__(self) -> str:
        return f"{self.name}, {self.rule.name}, {self.proposes}"

    @property
    def family(self) -> Family:
        return family(self.name)

    @cached_property
    def prompts(self) -> list[list[int]]:
        return random_prompts(self.family, LENGTHS)

    @cached_property
    def truth(self) -> list[list[int]]:
        return greedy(self.family, self.prompts, 48)

    def decode(
        self, rows: Sequence[int], sampling, max_new_tokens=TOKENS, stop=(), prompts=None, accept=ACCEPT
    ) -> Generation:
        """The given rows as a batch, in the order given."""
        prompts = prompts or self.prompts
        pick = lambda items: [items[row] for row in rows]  # noqa: E731
        if self.proposes == "script":
            known = script(pick(self.truth), pick(prompts), pick(accept))
            drafter = scripted(self.family, self.block)
        elif self.proposes == "nobody":
            drafter, known = NoDrafter(), None
        else:
            drafter, known = tiny_drafter("one_full", self.name, block_size=self.block)
        decoder = Decoder(self.family.target, self.family.params, drafter, known, rule=self.rule)
        budgets = pick(max_new_tokens) if isinstance(max_new_tokens, list) else max_new_tokens
        return decoder.generate(pick(prompts), budgets, stop=stop, sampling=pick(sampling))


def same_row(out: Generation, place: int, other: Generation, row: int) -> None:
    """The same text by the same rounds."""
    assert out.tokens[place] == other.tokens[row]
    assert out.seeds[place] == other.seeds[row]
    for name in ("accepted", "counts"):
        mine, theirs = (getattr(g, name)[at][g.accepted[at] >= 0] for g, at in ((out, place), (other, row)))
        assert mine.tolist() == theirs.tolist(), name


def check_rows(case: Case, sizes: Sequence[int] = (4,)) -> Generation:
    """Again, in other orders, beside rows that end early, and in smaller batches. Returns the first run."""
    first = case.decode(range(4), ROWS)
    assert first.seeds[0] == first.seeds[2] == 7 and first.logprobs is None
    again = case.decode(range(4), ROWS)
    assert [again.tokens[row] for row in (0, 2, 3)] == [first.tokens[row] for row in (0, 2, 3)]
    assert again.seeds[1] != first.seeds[1] and again.tokens[1] != first.tokens[1]
    kept = [SamplingParams(setting.temperature, seed=seed) for setting, seed in zip(ROWS, first.seeds, strict=True)]
    for order in ORDERS:
        out = case.decode(order, kept)
        for place, row in enumerate(order):
            same_row(out, place, first, row)
    for ending in ((0, 1, 2), (1, 3)):
        out = case.decode(range(4), kept, [1 + row if row in ending else TOKENS for row in range(4)])
        for row in range(4):
            if row in ending:
                assert out.tokens[row] == first.tokens[row][: 1 + row]
            else:
                same_row(out, row, first, row)
    for size in set(sizes) - {4}:
        for rows in [range(at, at + size) for at in range(0, 4, size)]:
            out = case.decode(rows, kept)
            for place, row in enumerate(rows):
                same_row(out, place, first, row)
    return first


GO, Q3 = "gpt_oss-split", "qwen3-untied"
CASES = [  # a script's drafts are certain: under rejection they are what they are under one_hot
    (Case(GO, "script"), (1, 2, 4)),
    (Case(GO, "dflash"), (4,)),
    (Case(Q3, "script", OneHot()), (1, 4)),
    (Case(GO, "dflash", OneHot()), (4,)),
    (Case(GO, "dflash", Rejection()), (1, 4)),
    (Case(Q3, "script", Block()), (4,)),
    (Case(Q3, "dflash", Block()), (1, 4)),
]


@pytest.mark.parametrize(("case", "sizes"), CASES, ids=[str(case) for case, _ in CASES])
def test_B13_a_seed_gives_its_row_its_text(case: Case, sizes) -> None:
    truth = greedy(case.family, case.prompts, TOKENS)
    different = check_rows(case, sizes)
    assert different.tokens[3] == truth[3]
    assert different.tokens[0] != truth[0]
    equal = case.decode(range(4), ROWS, prompts=[case.prompts[0]] * 4, accept=ACCEPT[:1] * 4)
    same_row(equal, 2, equal, 0)
    same_row(equal, 0, different, 0)
    assert equal.tokens[1] != equal.tokens[0]
    assert equal.tokens[3] == truth[0]


class TestUnseeded:
    CASE = Case(GO, "script")

    def test_B13_runs_without_a_seed_differ(self) -> None:
        texts = [self.CASE.decode([0], [UNSEEDED]).tokens[0] for _ in range(8)]
        assert len({tuple(text) for text in texts}) > 1

    def test_B13_rows_without_a_seed_differ(self) -> None:
        out = self.CASE.decode(range(4), [UNSEEDED] * 4, prompts=[self.CASE.prompts[0]] * 4)
        assert len({tuple(text) for text in out.tokens}) == 4 and len(set(out.seeds)) == 4

    def test_B15_a_temperature_alone_samples(self) -> None:
        texts = set()
        for at in range(0, 64, 4):
            rows = [SamplingParams(1.5, seed=seed) for seed in range(at, at + 4)]
            texts |= {
                tuple(text) for text in self.CASE.decode(range(4), rows, prompts=[self.CASE.prompts[0]] * 4).tokens
            }
        assert len(texts) == 64

    def test_B15_a_filter_holds_at_every_verified_position(self) -> None:
        rows = [SamplingParams(5, top_k=1), SamplingParams(5, top_p=0), SamplingParams(5, min_p=1), GREEDY]
        out = self.CASE.decode(range(4), rows, accept=[[ALL], [3], [0], [5]])
        assert out.tokens == greedy(self.CASE.family, self.CASE.prompts, TOKENS)
        assert out.rounds > 0 and (out.accepted[0] == BLOCK - 1).any()

    def test_B15_a_greedy_row_beside_one_with_top_k(self) -> None:
        rows = [GREEDY, SamplingParams(1, top_k=5, seed=3), GREEDY, SamplingParams(1, top_k=5, seed=3)]
        out = self.CASE.decode(range(4), rows)
        truth = greedy(self.CASE.family, self.CASE.prompts, TOKENS)
        assert out.tokens[::2] == truth[::2] and out.tokens[1] != truth[1]


class TestB25RowsOfAllLengths:
    """B24, B25 and B28 with dice: mixed settings, prompts shorter and longer than windows and chunks, other orders."""

    LENGTHS = (5, 61, 17, 1)
    ROWS = (SEVEN, SamplingParams(0.8, top_k=9, top_p=0.9, min_p=0.02, seed=2**40), GREEDY, SamplingParams(5, seed=1))
    BUDGETS = (TOKENS, TOKENS, 11, TOKENS)

    def test_B24_B25_B28_every_row_is_its_solo_run(self) -> None:
        case = Case(GO, "script")
        decode = partial(
            case.decode,
            sampling=self.ROWS,
            max_new_tokens=list(self.BUDGETS),
            prompts=random_prompts(case.family, self.LENGTHS),
        )
        solo = [decode([row]) for row in range(4)]
        assert [len(out.tokens[0]) for out in solo] == list(self.BUDGETS)
        for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1)):
            out = decode(order)
            for place, row in enumerate(order):
                if self.ROWS[row].seed is not None:
                    same_row(out, place, solo[row], 0)
                assert out.tokens[place] == solo[row].tokens[0]


SEEDED = [SamplingParams(1.2, seed=seed) for seed in (7, 8, 7)] + [GREEDY]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What plain decoding says for the seeds."""
    return Case(GO, "nobody").decode(range(4), SEEDED, 40).tokens


class TestSampledTextIsCutWherePlainTextIs:
    """Stops and budgets of sampled rows: what plain decoding says for the seed, cut at the same place."""

    def decode(self, text, **options) -> Generation:
        case = Case(GO, "script")
        vars(case)["truth"] = text
        return case.decode(range(4), SEEDED, **options)

    def test_B13_match_is_plain_decoding(self, alone) -> None:
        for accept in ([[ALL]] * 4, [[0]] * 4, ACCEPT):
            assert self.decode(alone, max_new_tokens=40, accept=accept).tokens == alone
        assert Case(GO, "dflash").decode(range(4), SEEDED, 40).tokens == alone

    def test_B03_exactly_the_budget(self, alone) -> None:
        for budget in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, [1, 9, 40, 16]):
            out = self.decode(alone, max_new_tokens=budget, accept=[[ALL], [3], [0], [ALL]])
            budgets = budget if isinstance(budget, list) else [budget] * 4
            assert out.tokens == [row[:most] for row, most in zip(alone, budgets, strict=True)]
            assert (out.counts.sum(1) + 1).tolist() == budgets and out.finish == ["length"] * 4

    def test_B01_a_stop_id_at_every_offset_of_a_block(self, alone) -> None:
        offsets = set()
        for row in range(3):
            for place in range(17):
                stop = alone[row][place]
                if stop in alone[row][:place] or (place - 1) % BLOCK in offsets:
                    continue
                out = self.decode(alone, max_new_tokens=40, stop=[stop], accept=[[ALL], [ALL], [ALL], [2]])
                assert out.tokens == [cut_at(each, [stop], 40) for each in alone]
                assert out.finish == ["stop" if each[-1] == stop else "length" for each in out.tokens]
                offsets.add((place - 1) % BLOCK)
        assert offsets == set(range(BLOCK))

    def test_B01_a_rule_that_is_not_pathwise_is_cut_too(self) -> None:
        case = Case(Q3, "dflash", Block())
        whole = case.decode(range(4), SEEDED).tokens
        for stop in (whole[0][5], whole[1][12]):
            out = case.decode(range(4), SEEDED, stop=[stop])
            assert out.tokens == [cut_at(text, [stop]) for text in whole]
        budgets = [1, 9, 16, 23]
        cut = case.decode(range(4), SEEDED, budgets).tokens
        assert cut == [text[:budget] for text, budget in zip(whole, budgets, strict=True)]


def the_slot_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    right = speculate.Dice
    slots = lambda keys: jax.vmap(jax.random.fold_in)(keys, jnp.arange(keys.shape[0]))  # noqa: E731
    monkeypatch.setattr(speculate, "Dice", lambda key, position: right(slots(key), position))


def the_neighbours_progress_is_in_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    right = speculate.Dice
    monkeypatch.setattr(speculate, "Dice", lambda key, position: right(key, jnp.broadcast_to(position.max(), (4,))))


@pytest.mark.parametrize("mutate", [the_slot_is_in_the_key, the_neighbours_progress_is_in_the_position])
def test_these_tests_can_fail(mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(Q3, "script", block=3)
    assert case.truth
    mutate(monkeypatch)
    trace_anew(monkeypatch)
    with pytest.raises(AssertionError):
        check_rows(case)

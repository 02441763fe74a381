"""The shipped pairs' sampled text, by every rule, against the target's own distribution after every prefix of it.

Rows of one batch have rules and settings of their own, greedy ones among them, and one rule of each batch is wrong.
Each token said is a draw from a known distribution: a chi-square test over all texts and positions of a rule. Fixed
seeds.
"""

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.load import load_drafter, load_target
from dflash_jax.accept import Chain, Rejection
from dflash_jax.draft_tree import TreeMatch
from dflash_jax.generate import Decoder
from dflash_jax.protocols import AcceptRule, Draft, Verdict
from dflash_jax.rules import ACCEPT
from dflash_jax.sampling import distribution
from dflash_jax.settings import SamplingParams, packed
from experiments.corpus import load_tokenizer
from experiments.pair import PAIRS
from experiments.prompts import read_rows
from tests.support.mass import chance, mass_of

PROMPT, ROWS, TOKENS, CALLS, PARTS = 12, 96, 5, 3, 6
"""CALLS: per rule that shares the batch."""

SETTINGS = (
    SamplingParams(2.0),
    SamplingParams(1.5, top_p=0.95),
    SamplingParams(3.0, top_k=8),
    SamplingParams(),
)
"""Hot: what the tiny targets say of a text they know is all but certain at 1, and no error could show."""


@dataclass(frozen=True)
class WrongQ(Rejection):
    """Drafts are judged as if every token had been as likely as any other."""

    name: ClassVar[str] = "wrong q"

    def choose(self, dice, logits, sampling) -> Draft:
        draft = super().choose(dice, logits, sampling)
        return draft.replace(q=jnp.full_like(draft.q, 1 / draft.q.shape[-1]))


@dataclass(frozen=True)
class WrongTemperature(TreeMatch):
    """The target's own tokens are drawn at temperature 1, whatever the row's."""

    name: ClassVar[str] = "wrong temperature"

    def __call__(self, dice, draft, logits, sampling) -> Verdict:
        return super().__call__(dice, draft, logits, sampling.replace(temperature=jnp.ones_like(sampling.temperature)))


@dataclass(frozen=True)
class RuleOfEachRow(Chain):
    """Row r is decoded by rule r modulo their number: all of them in one compiled loop, of one width."""

    rules: tuple[AcceptRule, ...]
    name: ClassVar[str] = "rule of each row"
    lossless: ClassVar[bool] = True
    pathwise: ClassVar[bool] = False
    samples: ClassVar[bool] = True

    def __post_init__(self) -> None:
        assert ROWS % len(self.rules) == 0 and len({rule.budget for rule in self.rules}) == 1

    @property
    def budget(self) -> int:
        return self.rules[0].budget

    def width(self, block_size: int) -> int:
        return self.rules[0].width(block_size)

    def choose(self, dice, logits, sampling) -> Draft:
        def with_q(draft: Draft) -> Draft:
            return draft if draft.q is not None else draft.replace(q=jax.nn.one_hot(draft.tokens, logits.shape[-1]))

        return _each_row([with_q(rule.choose(dice, logits, sampling)) for rule in self.rules])

    def __call__(self, dice, draft, logits, sampling) -> Verdict:
        return _each_row([rule(dice, draft, logits, sampling) for rule in self.rules])


def _each_row(found: list):
    def pick(*leaves: jax.Array) -> jax.Array:
        rows = jnp.arange(leaves[0].shape[0])
        return jnp.stack(leaves)[rows % len(leaves), rows]

    return jax.tree.map(pick, *found)


LOSSLESS = [rule for rule in ACCEPT.values() if rule.lossless and rule.samples]

DECODED_BY = {
    "tiny-gpt-oss": ("block", "match"),
    "tiny-qwen3.5-moe": ("rejection", "one_hot"),
    "tiny-glm4-moe": ("tree",),
}
"""pair -> the rules that decode with it: to compile all rules for all pairs takes minutes. A tree is as wide as its
budget and cannot share a batch with chains."""

WRONG = {pair: WrongTemperature() if "tree" in names else WrongQ() for pair, names in DECODED_BY.items()}
GROUPS = {pair: (*(ACCEPT[name] for name in names), WRONG[pair]) for pair, names in DECODED_BY.items()}


def rows_of(rules: int, call: int) -> list[SamplingParams]:
    """Every setting for every rule."""
    return [replace(SETTINGS[row // rules % len(SETTINGS)], seed=ROWS * call + row) for row in range(ROWS)]


@functools.partial(jax.jit, static_argnames="target")
def teacher_forced(target, params, tokens, sampling):
    """``[B T V]`` what is drawn from after every prefix, in one forward of the whole text."""
    out = target.step(params, tokens, target.init_cache(*tokens.shape, tokens.shape[1]))
    return distribution(target.unembed(params, out.hidden), sampling)


@dataclass(frozen=True)
class Texts:
    """What the rows of one rule said, in all calls, after the first token, for which there is no draft: of sampled rows
    the mass ``[texts TOKENS-1]``, of greedy ones whether it was the argmax; drafts accepted in the first round."""

    mass: np.ndarray
    argmax: np.ndarray
    accepted: np.ndarray

    @property
    def chance(self) -> float:
        return chance(self.mass, PARTS)


@functools.cache
def texts_of(pair: str) -> dict[AcceptRule, Texts]:
    """The texts of all rules that decode with a pair."""
    rules = GROUPS[pair]
    folder, kind = PAIRS / pair, jnp.dtype("float32")
    drafter, draft_params = load_drafter(f"{folder}-dflash", folder, dtype=kind)
    target, params = load_target(folder, dtype=kind, taps=drafter.config.taps)
    decoder = Decoder(target, params, drafter, draft_params, RuleOfEachRow(rules))
    first = next(iter(read_rows(PAIRS / "tiny-gpt-oss" / "prompts.jsonl")))
    prompt = load_tokenizer(folder).encode(first.text).ids[:PROMPT]
    rng, calls = np.random.default_rng(0), []
    for call in range(CALLS * len(rules)):
        rows = rows_of(len(rules), call)
        out = decoder.generate([prompt] * ROWS, TOKENS, sampling=rows)
        said = np.array(out.tokens)
        whole = np.concatenate([np.tile(prompt, (ROWS, 1)), said[:, :-1]], axis=1).astype(np.int32)
        p = np.asarray(teacher_forced(target, params, whole, packed(rows)[0]), np.float64)[:, PROMPT - 1 :]
        sure = np.take_along_axis(p, said[..., None], axis=-1)[..., 0] == 1
        greedy = np.array([row.greedy for row in rows])
        calls.append((mass_of(p, said, rng), sure, out.accepted[:, 0], greedy))
    mass, argmax, accepted, greedy = map(np.concatenate, zip(*calls, strict=True))
    mine = [np.arange(len(mass)) % len(rules) == at for at in range(len(rules))]
    return {
        rule: Texts(mass[rows & ~greedy, 1:], argmax[rows & greedy], accepted[rows])
        for rule, rows in zip(rules, mine, strict=True)
    }


@pytest.mark.parametrize("rule", LOSSLESS, ids=lambda rule: rule.name)
def test_sampled_text_has_the_targets_law(rule) -> None:
    (pair,) = (pair for pair, rules in GROUPS.items() if rule in rules)
    texts = texts_of(pair)[rule]
    assert texts.mass.size >= 350
    assert texts.chance > 1e-3
    assert texts.argmax.all()
    assert texts.accepted.mean() > 0.1


@pytest.mark.parametrize("pair", GROUPS)
def test_a_wrong_rule_is_noticed(pair: str) -> None:
    assert texts_of(pair)[WRONG[pair]].chance < 1e-4

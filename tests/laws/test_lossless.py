"""Lossless law: whatever a drafter proposes, the greedy text is the target's own, token for token."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import speculate
from dflash_jax.accept import Block, Greedy, Match, Rejection
from dflash_jax.draft_tree import TreeMatch
from dflash_jax.generate import Decoder
from dflash_jax.protocols import Verdict
from dflash_jax.sampling import Dice, seed_keys
from dflash_jax.settings import SamplingParams, packed, per_row
from tests.support.drafters import tiny_drafter
from tests.support.families import STEPS, Family, family
from tests.support.loop import trace_anew
from tests.support.oracle import ALL, MaliciousDrafter, script
from tests.support.texts import greedy, plain, random_prompts, scripted

LENGTHS, TOKENS = (5, 29, 17, 1), 40

SCRIPTS: dict[str, list[list[int]]] = {
    "always right": [[ALL]],
    "always wrong": [[0]],
    "each row its own script": [[7, 0, 3], [0], [1, 7, 1], [4, 4, 2, ALL]],
    "random": np.random.default_rng(5).integers(0, 8, (4, 16)).tolist(),
}


def check_lossless(family: Family, drafter, params, *, rule=None, tokens: int = TOKENS, lengths=LENGTHS):
    """Decode and compare with the text that forwards over the whole text give. Returns what was decoded."""
    prompts = random_prompts(family, lengths)
    decoder = Decoder(family.target, family.params, drafter, params, rule=rule or Greedy())
    out = decoder.generate(prompts, tokens)
    assert out.tokens == greedy(family, prompts, tokens)
    assert out.finish == ["length"] * len(prompts)
    return out


def scripted_case(family: Family, accept, lie: int = -1):
    prompts = random_prompts(family, LENGTHS)
    return script(greedy(family, prompts, TOKENS + 8), prompts, accept, lie)


def follows_its_script(out, accept: list[list[int]], block: int) -> None:
    """Every round but a row's last, which the budget may cut, accepted what the script said."""
    for row, found in enumerate(out.accepted):
        wanted, live = accept[row % len(accept)], found[found >= 0]
        assert live[:-1].tolist() == [min(wanted[r % len(wanted)], block - 1) for r in range(len(live) - 1)], row


@pytest.mark.parametrize("accept", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("name", STEPS)
def test_scripted_drafters(name: str, accept) -> None:
    chosen = family(name)
    out = check_lossless(chosen, scripted(chosen, 8), scripted_case(chosen, accept))
    follows_its_script(out, accept, 8)


@pytest.mark.parametrize(("name", "block"), [("qwen3-untied", 2), ("gpt_oss-split", 3)])
def test_short_blocks(name: str, block: int) -> None:
    chosen = family(name)
    for accept in SCRIPTS.values():
        out = check_lossless(chosen, scripted(chosen, block), scripted_case(chosen, accept))
        follows_its_script(out, accept, block)


@pytest.mark.parametrize(("name", "block"), [("qwen3-untied", 3), ("gpt_oss-split", 8)])
def test_the_dflash_drafter(name: str, block: int) -> None:
    drafter, params = tiny_drafter("mixed", name, block_size=block)
    check_lossless(family(name), drafter, params)


@pytest.mark.parametrize("name", ["gpt_oss-split", "qwen3-untied"])
class TestBothFamilies:
    def test_plain_decoding_says_the_same(self, name: str) -> None:
        chosen = family(name)
        prompts = random_prompts(chosen, LENGTHS)
        assert plain(chosen, prompts, max_new_tokens=TOKENS).tokens == greedy(chosen, prompts, TOKENS)

    def test_a_lie_that_is_a_token_of_the_text(self, name: str) -> None:
        chosen = family(name)
        for lie in set(greedy(chosen, random_prompts(chosen, LENGTHS), 8)[0]):
            check_lossless(chosen, scripted(chosen, 8), scripted_case(chosen, [[2, 0, 5]], lie))

    def test_a_malicious_drafter(self, name: str) -> None:
        chosen = family(name)
        text = greedy(chosen, random_prompts(chosen, LENGTHS), TOKENS)
        dealt = jnp.asarray([-1, -2, 0, chosen.target.config.vocab_size - 1, *np.ravel(text)[:28]], jnp.int32)
        out = check_lossless(chosen, MaliciousDrafter(3), dealt)
        assert (out.accepted > 0).any()


@dataclass(frozen=True)
class Mutant(Greedy):
    """Greedy with one thing wrong: its token from the row before, one draft too many, or matches after a mismatch."""

    fault: str = ""

    def __call__(self, dice, draft, logits, sampling) -> Verdict:
        own = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        verdict = super().__call__(dice, draft, logits, sampling)
        accepted, row = verdict.accepted, verdict.accepted
        if self.fault == "bonus of the row before":
            row = jnp.maximum(accepted - 1, 0)
        elif self.fault == "one draft too many":
            accepted = row = jnp.minimum(accepted + 1, draft.tokens.shape[1])
        elif self.fault == "counts matches after a mismatch":
            accepted = row = (draft.tokens == own[:, :-1]).sum(1, dtype=jnp.int32)
        return Verdict(accepted=accepted, token=jnp.take_along_axis(own, row[:, None], axis=1)[:, 0])


@pytest.mark.parametrize("fault", ["bonus of the row before", "one draft too many", "counts matches after a mismatch"])
def test_the_law_can_fail_by_the_rule(fault: str) -> None:
    chosen = family("qwen3-untied")
    with pytest.raises(AssertionError):
        check_lossless(chosen, scripted(chosen, 3), scripted_case(chosen, [[1, 0, 2]]), rule=Mutant(fault=fault))


def test_a_mutant_without_a_fault_is_lossless() -> None:
    chosen = family("qwen3-untied")
    check_lossless(chosen, scripted(chosen, 3), scripted_case(chosen, [[1, 0, 2]]), rule=Mutant())


@pytest.mark.parametrize("off", [-1, 1])
def test_the_law_can_fail_by_the_rollback(off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, right = family("qwen3-untied"), speculate.rollback
    case = scripted_case(chosen, [[1, 0, 2]])
    monkeypatch.setattr(speculate, "rollback", lambda cache, length: right(cache, length + off))
    trace_anew(monkeypatch)
    with pytest.raises(AssertionError):
        check_lossless(chosen, scripted(chosen, 3), case)


@pytest.mark.parametrize("name", ["gpt_oss-split", "qwen3-untied"])
def test_B54_padding_rows_of_the_head_are_neither_proposed_nor_emitted(name: str) -> None:
    """Loud padding rows win often; a target that knows its tokenizer never says them, and losslessness holds."""
    chosen, padding = family(name), 9
    tokens = chosen.target.config.vocab_size - padding
    loud = chosen.params["head"].at[:, -padding:].multiply(4.0)
    padded = chosen._replace(name=f"{name}, loud padding", params=chosen.params | {"head": loud})
    heard = check_lossless(padded, scripted(padded, 8), scripted_case(padded, [[2, 0, 7]]))
    assert (np.array(heard.tokens) >= tokens).any(), "the padding is not loud enough to test anything"
    masked = padded._replace(target=replace(padded.target, tokens=tokens))
    said = check_lossless(masked, scripted(masked, 8), scripted_case(masked, [[2, 0, 7]]))
    assert (np.array(said.tokens) < tokens).all()
    hidden = jnp.ones((2, 3, padded.target.config.hidden_size))
    assert jnp.isneginf(masked.target.unembed(masked.params, hidden)[..., tokens:]).all()


@pytest.mark.parametrize("temperature", [0.0, 5.0])
@pytest.mark.parametrize("rule", [Match(), Rejection(), Block(), TreeMatch(24)], ids=lambda rule: rule.name)
def test_B54_nor_is_padding_proposed_below_a_soft_cap(rule, temperature: float) -> None:
    """A cap is finite, -inf is not: of two places 4 tokens each are left to draft, and 4 + 16 nodes of a tree."""
    chosen, tokens, rows = family("qwen3-untied"), 4, 32
    drafter, params = tiny_drafter("mixed", "qwen3-untied", block_size=3)
    assert drafter.config.final_logit_softcapping, "nothing is capped"
    sampling, seeds = jax.tree.map(jnp.asarray, packed(per_row(SamplingParams(temperature, seed=1), rows)))
    dice, anchor = Dice(seed_keys(seeds), jnp.ones(rows, jnp.int32)), jnp.arange(rows, dtype=jnp.int32) % tokens
    choose, cache = partial(rule.choose, dice, sampling=sampling), drafter.init_cache(rows, 8, 4)
    draft = drafter.propose(params, replace(chosen.target, tokens=tokens), chosen.params, anchor, cache, choose)
    assert (draft.tokens < tokens).all() and jnp.unique(draft.tokens).size > 1
    assert draft.tree is None or ((draft.tokens >= 0).sum(1) == 20).all()
    if draft.q is not None:
        assert (draft.q[..., tokens:] == 0).all() and jnp.allclose(draft.q[..., :tokens].sum(-1), 1)
        assert ((draft.q[..., :tokens] > 0).sum(-1) == (4 if temperature else 1)).all()

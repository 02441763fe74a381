"""What a target says, computed without the loop, the caches' history or a drafter: one forward over the whole text."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.generate import Decoder
from dflash_jax.generation import Generation
from dflash_jax.plain import NoDrafter
from tests.support.families import Family
from tests.support.oracle import ScriptedDrafter, script

LONGEST = 128


@functools.partial(jax.jit, static_argnames="target")
def next_tokens(target, params, tokens):
    """The target's argmax after every prefix of ``tokens``, heard at once by an empty cache that holds them all."""
    rows, width = tokens.shape
    out = target.step(params, tokens, target.init_cache(rows, width, width))
    return jnp.argmax(target.unembed(params, out.hidden), axis=-1)


def greedy(family: Family, prompts: Sequence[Sequence[int]], count: int, longest: int = LONGEST) -> list[list[int]]:
    """The true greedy text of every prompt: ``count`` tokens by repeated forwards over everything said so far."""
    frozen = tuple(tuple(prompt) for prompt in prompts)
    known = _TEXTS.setdefault((family.name, family.target, frozen), [[] for _ in frozen])
    if len(known[0]) < count:
        known[:] = _greedy(family, prompts, count, longest)
    return [text[:count] for text in known]


_TEXTS: dict[tuple, list[list[int]]] = {}


def _greedy(family: Family, prompts, count: int, longest: int) -> list[list[int]]:
    lengths = np.array([len(prompt) for prompt in prompts])
    rows = np.arange(len(prompts))
    tokens = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    for end in range(count):
        said = np.asarray(next_tokens(family.target, family.params, tokens))
        tokens[rows, lengths + end] = said[rows, lengths + end - 1]
    return [tokens[row, length : length + count].tolist() for row, length in enumerate(lengths)]


def random_prompts(family: Family, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random ids of the target's vocabulary."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, family.target.config.vocab_size, length).tolist() for length in lengths]


LIVELY = {"glm4_moe": 9}
"""Family -> seed of prompts after which its greedy text still says new tokens late; 0 serves for all others."""


def lively_prompts(family: Family, lengths: Sequence[int]) -> list[list[int]]:
    """Random prompts for tests that need a token's first appearance at many places."""
    return random_prompts(family, lengths, LIVELY.get(family.name, 0))


def cut_at(text: Sequence[int], stop: Sequence[int], budget: int | None = None) -> list[int]:
    """The text up to and with its first stop id, at most ``budget`` tokens."""
    text = list(text)[:budget]
    ends = [place for place, token in enumerate(text) if token in stop]
    return text[: ends[0] + 1] if ends else text


def scripted(family: Family, block: int) -> ScriptedDrafter:
    """The scripted drafter for a target."""
    return ScriptedDrafter(block, family.target.config.vocab_size)


def speculate(family: Family, prompts, truth, accept, *, block: int = 8, lie: int = -1, **options) -> Generation:
    """Decode with a scripted drafter; ``options`` as :meth:`Decoder.generate`."""
    drafter = scripted(family, block)
    decoder = Decoder(family.target, family.params, drafter, script(truth, prompts, accept, lie))
    return decoder.generate(prompts, **options)


def plain(family: Family, prompts, *, width: int = 1, **options) -> Generation:
    """Decode without a drafter, ``width`` tokens wide."""
    return Decoder(family.target, family.params, NoDrafter(width)).generate(prompts, **options)

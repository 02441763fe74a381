"""How far a text strays from the target's own law: the target hears it again and says what it thinks of every token.

A lossy rule of :mod:`dflash_jax.relaxed` says an accepted draft d for certain where the target would have drawn from p,
and a draw from p everywhere else. So, given the text before, the law of what is said is known at every position:

* at an accepted draft its total variation to p is ``1 - p(d)`` and its divergence ``KL(said || p) = -log p(d)``;
* at a token of the target's own both are 0.

p is the row's own distribution, temperature and filters included. The mean over delivered tokens is what a token
costs; times the tokens of a text it is, for KL, the divergence of the law of whole texts (chain rule: which tokens are
drafts follows from the text). At temperature 0 p is a certainty, the total variation is 1 wherever the token is not the
argmax, and its mean is the share of such tokens.

Perplexity is asked of the target alone, at temperature 1 and without filters: ``exp(mean of -log softmax(logits))``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.cache import Cache
from dflash_jax.generate import CHUNKS, Decoder, bucket, undo_of
from dflash_jax.nn import accumulation_dtype
from dflash_jax.protocols import Params, Target
from dflash_jax.sampling import Sampling, distribution
from dflash_jax.settings import SamplingParams, packed, per_row
from dflash_jax.shapes import Array, Float, Int


@dataclass(frozen=True)
class Opinion:
    """What the target thinks of a text's tokens, each ``[tokens]``.

    Attributes:
        p: probability of the token under the row's own distribution.
        surprise: ``-log softmax(logits)`` of it, at temperature 1 and without filters.
    """

    p: np.ndarray
    surprise: np.ndarray


@dataclass(frozen=True)
class Straying:
    """Sums over delivered tokens of one text.

    Attributes:
        total_variation: 1 - p of every accepted draft.
        kl: -log p of every accepted draft, nats; infinite if one lies outside the filters.
    """

    total_variation: float
    kl: float


@partial(jax.jit, static_argnames="target", donate_argnames="cache")
def hear_and_judge(
    target: Target,
    params: Params,
    tokens: Int[Array, "B T"],
    follows: Int[Array, "B T"],
    cache: Cache,
    sampling: Sampling,
) -> tuple[Cache, Float[Array, "B T"], Float[Array, "B T"]]:
    """Hear T more tokens; of the token that follows each: its p, and its surprise."""
    out = target.step(params, tokens, cache)
    logits = target.unembed(params, out.hidden)
    wide = jax.nn.log_softmax(logits.astype(accumulation_dtype(logits.dtype)), axis=-1)
    own, surprise = (
        jnp.take_along_axis(scores, follows[..., None], axis=-1)[..., 0]
        for scores in (distribution(logits, sampling), -wide)
    )
    return out.cache, own, surprise


def opinion_of(decoder: Decoder, prompt: Sequence[int], text: Sequence[int], setting: SamplingParams) -> Opinion:
    """What the target thinks of ``text`` after ``prompt``, token by token."""
    row, chunk = np.array([*prompt, *text], np.int32), CHUNKS[-1]
    heard = -(-(len(row) - 1) // chunk) * chunk
    padded = np.zeros(heard + 1, np.int32)
    padded[: len(row)] = row
    sampling, _ = packed(per_row([setting], 1))
    cache = decoder.target.init_cache(1, bucket(heard), undo_of(1))
    p, surprise = [], []
    for at in range(0, heard, chunk):
        tokens, follows = padded[None, at : at + chunk], padded[None, at + 1 : at + chunk + 1]
        cache, *found = hear_and_judge(decoder.target, decoder.params, tokens, follows, cache, sampling)
        p.append(found[0][0])
        surprise.append(found[1][0])
    of_text = slice(len(prompt) - 1, len(row) - 1)
    return Opinion(np.concatenate(p)[of_text], np.concatenate(surprise)[of_text])


def drafted(counts: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """bool ``[tokens]``: which delivered tokens of a row are accepted drafts. Its first is the target's own.

    Args:
        counts, accepted: the row's ledger, ``[rounds]``.
    """
    rounds = [np.arange(count) < kept for count, kept in zip(counts, accepted, strict=True) if count > 0]
    return np.concatenate([[False], *rounds]).astype(bool)


def straying_of(p: np.ndarray, drafts: np.ndarray) -> Straying:
    """How far the accepted drafts of a text stray, ``p`` being the target's probability of every token."""
    with np.errstate(divide="ignore"):
        surprise = -np.log(p[drafts])
    return Straying(float((1 - p[drafts]).sum()), float(surprise.sum()) + 0.0)

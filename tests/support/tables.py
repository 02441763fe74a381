"""Targets given as a table: logits after every prefix of a few tokens, so that the law of a text is a finite sum."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dflash_jax.sampling import Sampling


@struct.dataclass
class Cases:
    """C targets with drafters and settings; V tokens, n drafts.

    Attributes:
        table: ``[C prefixes V]`` the target's logits after every prefix of 0 to n tokens, in the order of
            :func:`prefix_id`.
        drafter: ``[C n V]`` its logits.
        sampling: of each case.
        drafts: int32 ``[C n]`` what a drafter without distributions proposes; None: the rule proposes.
    """

    table: jax.Array
    drafter: jax.Array
    sampling: Sampling
    drafts: jax.Array | None = None

    def __getitem__(self, chosen) -> "Cases":
        return jax.tree.map(lambda leaf: leaf[chosen], self)


def prefix_id(tokens, length: int, vocabulary: int):
    """The place of a prefix in a table: shorter ones first, those of one length in the order of their digits."""
    value = sum(vocabulary**shorter for shorter in range(length))
    return value + sum(tokens[..., at] * vocabulary ** (length - 1 - at) for at in range(length))


def conditionals(cases: Cases) -> list[np.ndarray]:
    """The target's own distribution after every prefix, by length ``[C V^length V]``, straight from the definition: by
    sorting, independent of :mod:`dflash_jax.sampling`."""
    logits = np.asarray(cases.table, np.float64)
    names = ("temperature", "top_k", "top_p", "min_p")
    temperature, top_k, top_p, min_p = (np.asarray(getattr(cases.sampling, name))[:, None, None] for name in names)
    order = np.argsort(-logits, axis=-1, kind="stable")
    scores, place, vocabulary = np.take_along_axis(logits, order, axis=-1), np.arange(logits.shape[-1]), len(logits.T)
    greedy = temperature <= 1e-6
    mass = np.exp((scores - scores[..., :1]) / np.where(greedy, 1, temperature))
    mass *= place < np.where((top_k >= 1) & (top_k < vocabulary), top_k, vocabulary)
    share = mass / mass.sum(-1, keepdims=True)
    before = np.cumsum(share, axis=-1) - share
    stays = ((before < top_p) | (top_p >= 1)) & (mass >= min_p) & ~greedy | (place == 0)
    mass = np.where(stays, mass, 0)
    every = np.empty_like(mass)
    np.put_along_axis(every, order, mass / mass.sum(-1, keepdims=True), axis=-1)
    ends = np.cumsum([0] + [vocabulary**length for length in range(cases.drafter.shape[1] + 1)])
    return [every[:, start:end] for start, end in itertools.pairwise(ends)]


def joint(firsts: list[np.ndarray], conditional: list[np.ndarray]) -> np.ndarray:
    """The law ``[C V^(n+1)]`` of n+1 tokens, of a round that says the first m of them with mass ``firsts[m-1]``
    ``[C V^m]`` and of plain decoding that goes on from there."""
    whole = firsts[0]
    for first, next_token in zip(firsts[1:], conditional[1:], strict=True):
        whole = first + (whole[:, :, None] * next_token).reshape(first.shape)
    return whole


def target_joint(conditional: list[np.ndarray]) -> np.ndarray:
    """The law of n+1 tokens of the target itself."""
    nothing = [np.zeros((after.shape[0], after.shape[1] * after.shape[2])) for after in conditional[1:]]
    return joint([conditional[0][:, 0], *nothing], conditional)


SETTINGS: dict[str, tuple[float, int, float, float]] = {
    "plain": (1.0, 0, 1.0, 0.0),
    "cool": (0.7, -1, 1.0, 0.0),
    "hot": (2.5, 0, 1.0, 0.0),
    "nearly greedy": (1e-3, 0, 1.0, 0.0),
    "greedy": (0.0, 2, 0.8, 0.1),
    "top-k": (1.0, 2, 1.0, 0.0),
    "top-k of all": (1.3, 9, 1.0, 0.0),
    "top-p": (1.0, 0, 0.8, 0.0),
    "top-p of nothing": (1.3, 0, 0.0, 0.0),
    "min-p": (1.0, 0, 1.0, 0.3),
    "top-k and top-p": (1.4, 3, 0.7, 0.0),
    "all": (1.8, 3, 0.93, 0.12),
}
"""temperature, top-k, top-p, min-p."""


def sampling_of(settings) -> Sampling:
    """One row per setting."""
    temperature, top_k, top_p, min_p = zip(*settings, strict=True)
    return Sampling(
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.asarray(top_k, jnp.int32),
        top_p=jnp.asarray(top_p, jnp.float32),
        min_p=jnp.asarray(min_p, jnp.float32),
    )


Shape = tuple[int, int]
"""Vocabulary and drafts."""

Make = Callable[[np.random.Generator, int, int, int], tuple[np.ndarray, np.ndarray]]
"""From V, n and the number of prefixes to a table ``[prefixes V]`` and a drafter's logits ``[n V]``."""


def _random(rng, vocabulary, count, prefixes):
    return 1.5 * rng.standard_normal((prefixes, vocabulary)), 1.5 * rng.standard_normal((count, vocabulary))


def _ties(rng, vocabulary, count, prefixes):
    return rng.integers(0, 2, (prefixes, vocabulary)) * 1.0, rng.integers(0, 3, (count, vocabulary)) * 1.0


def _zeros(rng, vocabulary, count, prefixes):
    p, q = _random(rng, vocabulary, count, prefixes)
    for rows in (p, q):
        gone = rng.random(rows.shape) < 0.5
        gone[np.arange(len(rows)), rng.integers(0, vocabulary, len(rows))] = False
        rows[gone] = -np.inf
    return p, q


def _only(rng, rows: np.ndarray) -> np.ndarray:
    """One token per row has it all."""
    return np.where(np.arange(rows.shape[1]) == rng.integers(0, rows.shape[1], (len(rows), 1)), rows, -np.inf)


def _sure_target(rng, vocabulary, count, prefixes):
    p, q = _random(rng, vocabulary, count, prefixes)
    return _only(rng, p), q


def _sure_drafter(rng, vocabulary, count, prefixes):
    p, q = _random(rng, vocabulary, count, prefixes)
    return p, _only(rng, q)


def _both_sure(rng, vocabulary, count, prefixes):
    p, q = _random(rng, vocabulary, count, prefixes)
    return _only(rng, p), _only(rng, q)


def _equal(rng, vocabulary, count, prefixes):
    """A target whose next token does not depend on the last ones, and a drafter that knows it."""
    q = 1.5 * rng.standard_normal((count + 1, vocabulary))
    lengths = np.repeat(np.arange(count + 1), vocabulary ** np.arange(count + 1))
    return q[lengths], q[:count] + 0.0


def _nearly_equal(rng, vocabulary, count, prefixes):
    """Apart by a rounding error."""
    p, q = _equal(rng, vocabulary, count, prefixes)
    return p * (1 + 2.0**-52), q


def _disjoint(rng, vocabulary, count, prefixes):
    p, q = _random(rng, vocabulary, count, prefixes)
    even = np.arange(vocabulary) % 2 == 0
    return np.where(even, p, -np.inf), np.where(even, -np.inf, q)


def _steep(rng, vocabulary, count, prefixes):
    return 40 * rng.standard_normal((prefixes, vocabulary)), 40 * rng.standard_normal((count, vocabulary))


def _all_alike(rng, vocabulary, count, prefixes):
    return np.zeros((prefixes, vocabulary)), rng.integers(0, 2, (count, vocabulary)) * 1.0


KINDS: dict[str, tuple[Make, int]] = {
    "random": (_random, 5),
    "ties": (_ties, 1),
    "zeros": (_zeros, 2),
    "sure target": (_sure_target, 1),
    "sure drafter": (_sure_drafter, 1),
    "both sure": (_both_sure, 1),
    "equal": (_equal, 1),
    "nearly equal": (_nearly_equal, 1),
    "disjoint": (_disjoint, 1),
    "steep": (_steep, 1),
    "all alike": (_all_alike, 1),
}
"""name -> how they are made, and how many of them with every setting."""


def all_cases(shape: Shape, settings=None, seed: int = 0) -> Cases:
    """Cases of every kind with every setting, or with these."""
    (vocabulary, count), rng, settings = shape, np.random.default_rng(seed), settings or SETTINGS.values()
    prefixes = sum(vocabulary**length for length in range(count + 1))
    made = [
        (*make(rng, vocabulary, count, prefixes), setting)
        for make, times in KINDS.values()
        for _ in range(times)
        for setting in settings
    ]
    tables, drafters, chosen = zip(*made, strict=True)
    return Cases(jnp.asarray(np.stack(tables)), jnp.asarray(np.stack(drafters)), sampling_of(chosen))


def dyadic_cases(shape: Shape, number: int, parts: int = 4) -> Cases:
    """Tables of probabilities, not of logits, in multiples of 1/parts, so that sums and products of them are exact."""
    (vocabulary, count), rng = shape, np.random.default_rng(1)
    prefixes = sum(vocabulary**length for length in range(count + 1))

    def draw(rows: int) -> jax.Array:
        cuts = np.sort(rng.integers(0, parts + 1, (number, rows, vocabulary - 1)), axis=-1)
        return jnp.asarray(np.diff(cuts, axis=-1, prepend=0, append=parts) / parts)

    return Cases(draw(prefixes), draw(count), sampling_of([SETTINGS["plain"]] * number))


def logits_of(cases: Cases) -> Cases:
    """The same with a table of logits."""
    return cases.replace(table=jnp.log(cases.table))

"""The law of the text that a rule writes, from the enumeration of its round, against the target's own."""

import numpy as np

from tests.support.loaded_dice import Round
from tests.support.tables import Cases, conditionals, joint, prefix_id, target_joint

TOLERANCE = 1e-12


def first_words(found: Round, vocabulary: int, measure: np.ndarray) -> list[np.ndarray]:
    """The measure ``[K X C R]`` of outcomes that say a text and no more, per text: ``[C V^m]`` for m = 1 .. P."""
    said, count, places = np.asarray(found.said), np.asarray(found.count), found.said.shape[-1]
    case = np.broadcast_to(np.arange(count.shape[2])[:, None], count.shape)
    measures = []
    for length in range(1, places + 1):
        chosen = (count == length) & (measure != 0)
        texts = said[chosen][:, :length]
        assert ((texts >= 0) & (texts < vocabulary)).all(), "a draft that was not proposed is said"
        ids = prefix_id(texts, length, vocabulary) - prefix_id(np.zeros(length, int), length, vocabulary)
        total = np.zeros((count.shape[2], vocabulary**length))
        np.add.at(total, (case[chosen], ids), measure[chosen])
        measures.append(total)
    return measures


def deviation(found: Round, cases: Cases) -> np.ndarray:
    """``[C]``: the largest error of the probability of a text of n+1 tokens."""
    conditional = conditionals(cases)
    whole = joint(first_words(found, cases.table.shape[-1], np.asarray(found.weight)), conditional)
    return np.abs(whole - target_joint(conditional)).max(1)


def says_the_impossible(found: Round, cases: Cases) -> np.ndarray:
    """bool ``[C]``: some fall of the dice, be it one in 2^53, says a text that the target cannot say."""
    can = [after > 0 for after in conditionals(cases)]
    said = first_words(found, cases.table.shape[-1], np.asarray(found.possible, np.float64))
    own, bad = can[0][:, 0], np.zeros(len(can[0]), bool)
    for texts, after in zip(said, [*can[1:], can[0]], strict=True):
        bad |= ((texts > 0) & ~own).any(1)
        own = (own[:, :, None] & after).reshape(len(own), -1)
    return bad


def check_law(found: Round, cases: Cases) -> Round:
    """The text of a round, gone on from plainly, has the law of the target's. Returns the round."""
    assert not np.asarray(found.unfit).any(), "a coin without a threshold of its own"
    off = deviation(found, cases)
    assert (off <= TOLERANCE).all(), f"{(~(off <= TOLERANCE)).sum()} of {len(off)} laws are wrong, by up to {off.max()}"
    assert not says_the_impossible(found, cases).any(), "a text of probability 0 is said"
    return found

"""What a run's ledger says: acceptance, its shape over the block, and the bounds that follow from it.

Pure numpy over the two arrays of a :class:`~dflash_jax.generate.Generation`, both ``[B, rounds]``:

* ``counts``: tokens a round delivered to a row, 0 once the row is done;
* ``accepted``: drafts the rule accepted in that round *before* stop tokens and budget cut it, -1 once the row is done.

A *verify* is one live (row, round) pair. Tokens behind a stop token or the budget are counted nowhere: they are not in
the text. A row's first token comes from its prompt and belongs to no round. The functions that take only these arrays
do not care about their shape, so the rows and rounds of many generations may be joined with :func:`join`.
"""

from collections.abc import Sequence

import numpy as np


def join(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Ledgers of several generations, row after row, as one flat array."""
    return np.concatenate([np.asarray(array).ravel() for array in arrays]) if arrays else np.zeros(0, np.int64)


def verifies(counts: np.ndarray) -> int:
    """Number of live (row, round) pairs."""
    return int((np.asarray(counts) > 0).sum())


def acceptance_length(counts: np.ndarray) -> float:
    """Tokens per verify: drafts that stood plus the target's own token. 1..P; nan without a round.

    Rounds of 4 and 8 tokens give 6.0; one round of six that a stop token cut after three gives 3.0.
    """
    number = verifies(counts)
    return float(np.asarray(counts).sum() / number) if number else float("nan")


def histogram(counts: np.ndarray, block_size: int) -> np.ndarray:
    """int ``[P]``: place i counts the verifies that delivered i + 1 tokens. Its mean is :func:`acceptance_length`."""
    counts = np.asarray(counts)
    return np.bincount(counts[counts > 0].ravel(), minlength=block_size + 1)[1 : block_size + 1]


def drafts_delivered(counts: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """int, flat: per verify, the accepted drafts that are in the text."""
    counts, accepted = np.asarray(counts), np.asarray(accepted)
    live = counts > 0
    return np.minimum(accepted, counts)[live]


def acceptance_ratio(counts: np.ndarray, accepted: np.ndarray, block_size: int | np.ndarray) -> float:
    """Drafts in the text / drafts proposed, P - 1 in every verify (or as many as each had). nan without a draft.

    Falls as the block grows; compare :func:`acceptance_length` between block sizes instead.
    """
    proposed = int(np.where(np.asarray(counts) > 0, np.asarray(block_size) - 1, 0).sum())
    return float(drafts_delivered(counts, accepted).sum() / proposed) if proposed else float("nan")


def position_rates(counts: np.ndarray, accepted: np.ndarray, block_size: int) -> np.ndarray:
    """float ``[P-1]``: place i is the share of verifies whose drafts 1..i+1 all are in the text. Never rises."""
    drafts = drafts_delivered(counts, accepted)
    if not len(drafts):
        return np.full(block_size - 1, np.nan)
    return (drafts[:, None] > np.arange(block_size - 1)).mean(axis=0)


def conditional_rates(
    counts: np.ndarray, accepted: np.ndarray, block_size: int, widths: np.ndarray | None = None
) -> np.ndarray:
    """float ``[P-1]``: place i is P(draft i+1 stands | drafts 1..i stood). nan where no verify came that far.

    A verify that a stop token or the budget cut says nothing about the drafts behind the cut, and counts for none.

    Args:
        widths: block size of each round, where they differ; drafts that were not proposed count for none.
    """
    stood, reached = draft_trials(counts, accepted, block_size, widths)
    with np.errstate(invalid="ignore", divide="ignore"):
        return stood / reached


def draft_trials(
    counts: np.ndarray, accepted: np.ndarray, block_size: int, widths: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """int ``[P-1]`` each: how often draft i+1 stood, and how often it was tried, drafts 1..i having stood."""
    counts, accepted = np.asarray(counts), np.asarray(accepted)
    widths = np.broadcast_to(block_size if widths is None else widths, counts.shape)
    live = counts > 0
    counts, accepted, widths = (part[live][:, None] for part in (counts, accepted, widths))
    index = np.arange(block_size - 1)
    cut = counts <= accepted
    reached = (np.minimum(accepted, counts) >= index) & ~(cut & (index >= counts)) & (index < widths - 1)
    stood = reached & (accepted > index)
    return stood.sum(axis=0), reached.sum(axis=0)


def expected_length(conditional: np.ndarray, block_size: int) -> float:
    """Tokens per verify that these conditional rates give at a block of ``block_size``, no cut: 1 + sum of products.

    Positions that no verify reached count as rejected.
    """
    rates = np.nan_to_num(np.asarray(conditional, float)[: block_size - 1])
    return float(1.0 + np.cumprod(rates).sum())


def uniform_union(experts: int, per_token: int, tokens: int) -> float:
    """Distinct experts of one layer that ``tokens`` tokens choose if each draws ``per_token`` of ``experts`` uniformly
    and independently: ``E (1 - (1 - K/E)^tokens)``."""
    return float(experts * (1.0 - (1.0 - per_token / experts) ** tokens)) if experts else 0.0


def speedup_bound(counts: Sequence[np.ndarray]) -> float:
    """Speedup over plain decoding if a round cost no more than a plain step: plain rounds / speculative rounds.

    Args:
        counts: ``[B, rounds]`` of each generation; plain decoding needs as many rounds as its longest row has tokens.

    For one row this is the acceptance length. In a batch it is less, because rows of unequal luck wait for each other.
    nan without a round.
    """
    counts = [np.asarray(each) for each in counts]
    rounds = sum(each.shape[1] for each in counts)
    plain = sum(int(each.sum(axis=1).max(initial=0)) for each in counts)
    return plain / rounds if rounds else float("nan")


def break_even(round_s: float, step_s: float) -> float:
    """Acceptance (tokens per round) at which speculation is as fast as plain decoding: seconds of a round over seconds
    of a plain step. The speedup is :func:`speedup_bound` divided by it."""
    return round_s / step_s

"""Which block size next, by what was accepted and what rounds cost: plain Python over numbers, between two segments."""

import math
from dataclasses import dataclass, field

import numpy as np

from dflash_jax.metrics import draft_trials, expected_length

SEGMENT = 24
"""Most drafted rounds between two decisions; the first ones after a probe are as many as the drafts that were tried."""

PROBE = 4
"""Rounds of a probe: drafting again, one draft, after a while of plain decoding; if it stands, more are tried."""

PENDING = 128
"""Most plain rounds in a row whose features wait to be absorbed: for the next draft, or for good if the text ends."""

SHARE = 0.04
"""Of plain decoding's time so far, what a useless drafter may have lost in all, what it saved taken off. Before every
probe its worst case is weighed, that no draft stands and the text ends (conservative bandits, arXiv 1602.04282)."""

USELESS = 0.25
"""A drafter is taken for useless while no more of its first drafts than this share ever stood."""

FIRST_REST, LONGEST_REST = 128, 2048
"""Plain rounds before a probe; four times as many after every one in which no draft stood."""

SOON = 32
"""The same where a drafter has paid so far."""

FADED = 0.2
"""Weight of what was known of acceptance before such a rest: the text has gone on."""

MEMORY = 0.9
"""Weight of what was known of acceptance when a segment of new rounds comes in."""

PRIOR = 4
"""Trials that a place is taken to have had with the drafts' rate on the whole: a place that is not tried any more tends
to that rate, and so is tried again."""

HOPE = 3
"""Drafts that are taken to have stood before any was tried."""

CALLS = 0.3
"""Weight of the newest short drafted segment in what one costs besides its rounds."""

FORGETTING = 0.02
"""Share by which a cost that a segment did not measure goes back to what was measured at first: a block size that was
slow once is tried again."""


@dataclass
class Controller:
    """Chooses a block size; plain Python over numbers, kept from text to text.

    Attributes:
        costs: block size -> seconds of a round, 1 being plain decoding. Measured anew with every segment of that size;
            ``first``: as they were given.
        stood, tried: per draft place, see :func:`~dflash_jax.metrics.draft_trials`, older rounds weighing less.
        said: tokens so far, a row's mean; ``saved``: plain steps that drafting saved so far, negative: lost; ``call``:
            what a segment costs besides its rounds, in plain steps.
        stood_ever, tried_ever: of first drafts, without forgetting.
        rest: plain rounds still to go before the next probe; ``pause``: how many there will be after a vain one;
            ``rested``: whether nothing was drafted since such a rest, or ever.
    """

    costs: dict[int, float]
    call: float = 0.0
    first: dict[int, float] = field(init=False)
    stood: np.ndarray = field(init=False)
    tried: np.ndarray = field(init=False)
    said: float = 0.0
    saved: float = 0.0
    stood_ever: float = 0.0
    tried_ever: float = 0.0
    rest: int = 0
    pause: int = FIRST_REST
    rested: bool = True

    def __post_init__(self) -> None:
        self.first = dict(self.costs)
        self.stood, self.tried = np.zeros((2, max(self.costs) - 1))

    def best(self) -> int:
        """The block size of most expected tokens per second. A place that was hardly tried is taken to be as good as
        drafts on the whole; without any trial all stand."""
        known = (self.stood.sum() + HOPE) / (self.tried.sum() + HOPE)
        rates = (self.stood + PRIOR * known) / (self.tried + PRIOR)
        return max(self.costs, key=lambda size: expected_length(rates, size) / self.costs[size])

    @property
    def useless(self) -> bool:
        """Whether hardly a first draft ever stood, or none was tried."""
        return self.stood_ever <= USELESS * self.tried_ever

    def next(self, left: int) -> tuple[int, int]:
        """Block size and most rounds of the next segment, in a text of ``left`` tokens more at most."""
        if len(self.costs) == 1:
            return 1, left
        best = self.best()
        if not self.rest and best > 1 and not self.rested:
            return best, int(np.clip(self.tried[0], PROBE, SEGMENT))
        narrow = min(size for size in self.costs if size > 1)
        wait = self.patience(narrow, left) if self.useless else self.rest
        return (1, wait) if wait else (narrow, PROBE)

    def patience(self, size: int, left: int) -> int:
        """Plain rounds before a useless drafter may be asked for a block of this size: ``left`` if that would not be in
        this text, which then goes on without a further call."""
        vain = PROBE * (self.costs[size] / self.costs[1] - 1) + 2 * self.call  # the second to decode plainly again
        now = SHARE * self.said + self.saved
        if self.rest == 0 and vain <= now + 1e-6:
            return 0
        for calls in range(1, left // PENDING + 2 if self.call <= max(now, 0.0) else 1):
            missing = vain + calls * self.call - now
            wait = max(self.rest, math.ceil(missing / SHARE - 1e-6), 1)
            if wait <= calls * PENDING:
                return min(wait, left)
        return left

    def saw(
        self, size: int, counts: np.ndarray, accepted: np.ndarray, seconds: float | None, first: bool = False
    ) -> None:
        """Take in a segment.

        Args:
            counts, accepted: its ledger ``[B, rounds]``.
            seconds: how long it took; None: unknown.
            first: of its text, whose call plain decoding has as well.
        """
        rounds = counts.shape[1]
        tokens = float(rounds * counts.sum() / max((counts > 0).sum(), 1))
        self.said += tokens
        if size > 1:
            rounds_took = rounds * self.costs[size] / self.costs[1]
            call = self.call
            if seconds is not None:
                most = 2 * (rounds_took + self.call)  # a machine may stop once
                call = min(max(seconds / self.costs[1] - rounds_took, 0.0), most)
            self.saved += tokens - rounds_took - call
            if rounds <= PROBE:
                self.call += CALLS * (call - self.call)
        else:
            self.saved -= self.call
        self.saved += self.call * first
        if seconds is not None and rounds > PROBE:  # in a shorter one the call is too large a part
            for other in self.costs.keys() - {size}:
                self.costs[other] += FORGETTING * (self.first[other] - self.costs[other])
            weight = 1 - 0.75 ** (rounds / SEGMENT)
            found = max(seconds - self.call * self.costs[1], seconds / 2) / rounds
            found = min(found, 2 * self.costs[size])  # a machine that stopped once is no block's cost
            self.costs[size] += weight * (found - self.costs[size])
        if size == 1:
            self.rested, self.rest = self.rested or self.rest > 0, max(self.rest - rounds, 0)
            return
        self.learn(size, counts, accepted)

    def learn(self, size: int, counts: np.ndarray, accepted: np.ndarray) -> None:
        """Take in which drafts stood."""
        self.rested = False
        keep = MEMORY ** min(counts.shape[1], SEGMENT)
        stood, tried = draft_trials(counts, accepted, len(self.stood) + 1, np.full(counts.shape, size))
        self.stood, self.tried = keep * self.stood + stood, keep * self.tried + tried
        self.stood_ever, self.tried_ever = self.stood_ever + float(stood[0]), self.tried_ever + float(tried[0])
        if self.best() > 1:
            self.pause = FIRST_REST
        else:
            self.rest = SOON if self.saved > 0 and self.pause == FIRST_REST else self.pause
            self.pause = FIRST_REST if stood.any() else min(4 * self.pause, LONGEST_REST)
            self.stood, self.tried = FADED * self.stood, FADED * self.tried

"""What a run gives back to its caller, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from dflash_jax.delivery import LogProbs
from dflash_jax.speculate import SpecState


@dataclass(frozen=True)
class Generation:
    """What came out.

    Attributes:
        tokens: delivered ids per row, the stop id included where one ended the row.
        finish: per row, ``"stop"``, ``"length"`` (also of a row that the caller ended), or ``"broken"``: the target's
            logits were not numbers any more. Its tokens are those before.
        seeds: per row, the seed that repeats it.
        counts: int ``[B, rounds]`` tokens delivered by each round, 0 once a row is done. The first token of a row
            comes from the prompt and belongs to no round.
        accepted: int ``[B, rounds]`` drafts accepted by each round, -1 once a row is done.
        union: float ``[M]`` mean distinct experts per round of each mixture layer (empty for a dense network).
        logprobs: per row, of its tokens; None where they were not asked for.
        widths: int ``[rounds]`` block size of each round, where they differ; else None.
        ttft_s: seconds until the first token of every row was on the host.
        decode_s: seconds from there to the end.
    """

    tokens: list[list[int]]
    finish: list[str]
    seeds: list[int]
    counts: np.ndarray
    accepted: np.ndarray
    union: np.ndarray
    logprobs: list[LogProbs] | None
    ttft_s: float
    decode_s: float
    widths: np.ndarray | None = None

    @property
    def rounds(self) -> int:
        return self.counts.shape[1]


def collect(state: SpecState, ttft_s: float, decode_s: float) -> Generation:
    """Bring a finished state to the host."""
    keys = jax.random.key_data(state.key)
    host, keys = jax.device_get((state.replace(cache=None, draft_cache=None, key=None), keys))
    rounds = int(host.rounds)
    texts = [host.tokens[row, :count].tolist() for row, count in enumerate(host.delivered)]
    return Generation(
        tokens=texts,
        finish=[_finish(*row) for row in zip(texts, host.ends.stop.tolist(), host.broken.tolist(), strict=True)],
        seeds=[(int(high) << 32) | int(low) for high, low in keys],
        counts=host.counts[:, :rounds].astype(np.int64),
        accepted=host.accepted[:, :rounds].astype(np.int64),
        union=host.union / max(rounds, 1),
        logprobs=_row_logprobs(host.logprobs, host.delivered),
        ttft_s=ttft_s,
        decode_s=decode_s,
    )


def cut_rows(generation: Generation, lengths: Sequence[int | None]) -> Generation:
    """Rows that end after so many tokens (None: where they are); what lies behind counts nowhere.

    Rounds in which no row says anything any more are dropped; ``union`` stays the mean over all that ran.
    """
    keep = [len(row) if length is None else length for row, length in zip(generation.tokens, lengths, strict=True)]
    before = np.cumsum(generation.counts, axis=1) - generation.counts
    counts = np.clip(np.array(keep)[:, None] - 1 - before, 0, generation.counts)
    logprobs, rounds = generation.logprobs, int((counts > 0).any(0).sum())
    counts, accepted = counts[:, :rounds], generation.accepted[:, :rounds]
    return replace(
        generation,
        tokens=[row[:length] for row, length in zip(generation.tokens, keep, strict=True)],
        finish=[old if length is None else "stop" for old, length in zip(generation.finish, lengths, strict=True)],
        counts=counts,
        accepted=np.where(counts > 0, accepted, -1),
        logprobs=logprobs and [_first(row, length) for row, length in zip(logprobs, keep, strict=True)],
    )


def _finish(text: list[int], stop: list[int], broken: bool) -> str:
    if broken:
        return "broken"
    return "stop" if text and text[-1] in stop else "length"


def _row_logprobs(logprobs: LogProbs | None, delivered: np.ndarray) -> list[LogProbs] | None:
    """Cut to each row's tokens."""
    if logprobs is None:
        return None
    rows = [jax.tree.map(lambda leaf, row=row: leaf[row], logprobs) for row in range(len(delivered))]
    return [_first(row, count) for row, count in zip(rows, delivered.tolist(), strict=True)]


def _first(logprobs: LogProbs, count: int) -> LogProbs:
    """Those of a row's first tokens."""
    return jax.tree.map(lambda leaf: leaf[:count], logprobs)

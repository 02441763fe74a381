"""Text as it comes, and for every piece whether a draft of the drafter or the target itself said it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from dflash_jax.generate import Decoder
from dflash_jax.settings import GREEDY, SamplingParams


@dataclass(frozen=True)
class Piece:
    """``text`` of one or more tokens, whole characters only; ``drafted``: the token that completed it was a draft."""

    text: str
    drafted: bool


def stream_tokens(
    decoder: Decoder, prompt: Sequence[int], max_new_tokens: int, stop: Sequence[int], sampling: SamplingParams = GREEDY
) -> Iterator[tuple[int, bool]]:
    """Every token of one row as soon as its round is over, and whether it was an accepted draft."""
    state = decoder.start([prompt], max_new_tokens, stop, sampling)
    token, done = jax.device_get((state.tokens[0, 0], state.done[0]))
    yield int(token), False
    sent, rounds = 1, 0
    while not done:
        rounds += 1
        state = decoder.advance(state, until=rounds)
        tokens, done, count, accepted = jax.device_get(
            (state.tokens[0], state.done[0], state.counts[0, rounds - 1], state.accepted[0, rounds - 1])
        )
        for place in range(int(count)):
            yield int(tokens[sent + place]), place < accepted
        sent += int(count)


def pieces(tokens: Iterator[tuple[int, bool]], tokenizer: Tokenizer) -> Iterator[Piece]:
    """The text of a token stream. A character that spans tokens waits for its last one; joined, the pieces are the
    decoded text of the whole row."""
    stream, ids, sent, drafted = DecodeStream(skip_special_tokens=False), [], "", False
    for token, drafted in tokens:
        ids.append(token)
        if text := stream.step(tokenizer, token):
            sent += text
            yield Piece(text, drafted)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    if len(whole) > len(sent):
        yield Piece(whole[len(sent) :], drafted)


def until(pieces: Iterator[Piece], stops: Sequence[str]) -> Iterator[Piece]:
    """The pieces before the first stop string, which itself is not shown, nor any part of one that may still come.

    A text that ends in an unfinished stop string is shown to its end.
    """
    held, drafted = "", False
    for piece in pieces:
        held, drafted = held + piece.text, piece.drafted
        if found := [place for place in map(held.find, stops) if place >= 0]:
            if before := held[: min(found)]:
                yield Piece(before, drafted)
            return
        keep = max((_started(held, stop) for stop in stops), default=0)
        if ready := held[: len(held) - keep]:
            yield Piece(ready, drafted)
        held = held[len(held) - keep :]
    if held:
        yield Piece(held, drafted)


def _started(text: str, stop: str) -> int:
    """How many characters of ``stop`` the end of ``text`` already says."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


GREEN, DIM, PLAIN, RESET = "\x1b[32m", "\x1b[2m", "", "\x1b[0m"
UNSAFE = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
"""Control characters but tab and newline: text must not steer the terminal."""


def shown(text: str, style: str, terminal: bool) -> str:
    """``text`` for a terminal, coloured and with control characters spelled out; elsewhere as it is."""
    if not terminal:
        return text
    safe = text.translate(UNSAFE)
    return f"{style}{safe}{RESET}" if style else safe

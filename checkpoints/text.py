"""Text in, text out: a decoder and its tokenizer, with strings that end a text.

A stop string may lie inside a block or across two; neither it nor any part of it is shown, and no character is split.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax
from tokenizers import Tokenizer

from dflash_jax.generate import Decoder
from dflash_jax.generation import Generation, cut_rows
from dflash_jax.settings import GREEDY, SamplingParams

BROKEN = "\ufffd"
"""What bytes that are no character, or none yet, are decoded to."""

TOKENS_PER_LOOK = 16
"""About as many tokens are decoded between two looks at the text, some in vain behind a stop string."""


@dataclass(frozen=True)
class Piece:
    """``text`` of one or more tokens, whole characters only; ``drafted``: the token that completed it was a draft.

    Bytes that are no character stand as U+FFFD. At the end of a text U+FFFD is taken for an unfinished character, and
    not shown.
    """

    text: str
    drafted: bool


@dataclass(frozen=True)
class Completion:
    """One row. ``text`` ends before a stop string or id; ``tokens`` end with the id, or with the token that completed
    the string. ``finish``: "stop" (either), "length" or "broken"."""

    text: str
    tokens: list[int]
    finish: str


@dataclass(frozen=True)
class TextDecoder:
    """A decoder that speaks text.

    Args:
        stop: strings that end a row.
        stop_ids: ids that end a row, such as the end-of-text token.

    Raises:
        ValueError: for an empty stop string, which would end every text at once, a string in place of a tuple, or a
            decoder that cannot stream.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise ValueError(f"stop {self.stop!r}: expected a tuple of strings, such as ({self.stop!r},)")
        if "" in self.stop:
            raise ValueError("stop '': an empty string ends every text at once; give at least one character")
        if not isinstance(self.decoder, Decoder):
            raise ValueError(f"a {type(self.decoder).__name__} decodes whole texts only; give its plain Decoder")

    def complete(
        self,
        prompts: Sequence[str],
        max_new_tokens: int | Sequence[int] | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    ) -> list[Completion]:
        """One text per prompt.

        Raises:
            ValueError: as :meth:`~dflash_jax.generate.Decoder.start`.
        """
        ids = [self.tokenizer.encode(prompt).ids for prompt in prompts]
        out = self.generate(ids, max_new_tokens, sampling=sampling)
        return [Completion(self.text_of(row), row, finish) for row, finish in zip(out.tokens, out.finish, strict=True)]

    def text_of(self, ids: Sequence[int]) -> str:
        """The decoded ids, up to the first stop string, a stop id at the end, or an unfinished character there."""
        said = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        text = whole_characters(self.tokenizer, said)
        return text[: first_stop(text, self.stop)]

    def generate(self, prompts, max_new_tokens=None, stop=(), sampling=GREEDY, logprobs=None) -> Generation:
        """As :meth:`~dflash_jax.generate.Decoder.generate`; rows also end with one of ``stop_ids``, or with the token
        that completes a stop string. Tokens behind it count nowhere."""
        stop = (*stop, *self.stop_ids)
        if not self.stop:
            return self.decoder.generate(prompts, max_new_tokens, stop, sampling, logprobs)
        rows = [_Watch(Characters(self.tokenizer), self.stop) for _ in prompts]
        rounds = max(1, round(2 * TOKENS_PER_LOOK / (1 + self.decoder.drafter.block_size)))
        segments = self.decoder.stream(prompts, max_new_tokens, stop, sampling, logprobs, rounds)
        found = next(segments)
        while not isinstance(found, Generation):
            for row, new in zip(rows, found, strict=True):
                row.hear(new)
            found = segments.send([row.length is not None for row in rows])
        return cut_rows(found, [row.length for row in rows])

    def warm_up(self, *args, **kwargs) -> None:
        """The decoder's."""
        self.decoder.warm_up(*args, **kwargs)

    def stream(
        self, prompt: str, max_new_tokens: int | None = None, sampling: SamplingParams = GREEDY
    ) -> Iterator[Piece]:
        """The text of one prompt as it comes, a round at a time."""
        return self.stream_ids(self.tokenizer.encode(prompt).ids, max_new_tokens, sampling)

    def stream_ids(
        self, ids: Sequence[int], max_new_tokens: int | None = None, sampling: SamplingParams = GREEDY
    ) -> Iterator[Piece]:
        """The same for a prompt's ids."""
        tokens = stream_tokens(self.decoder, ids, max_new_tokens, self.stop_ids, sampling)
        tokens = ((token, drafted) for token, drafted in tokens if token not in self.stop_ids)
        return until(pieces(tokens, self.tokenizer), self.stop)


@dataclass
class Characters:
    """The text of a row as its tokens come, whole characters only.

    Tokens wait for the end of a character. They are decoded behind those of the characters before, because decoders
    write the beginning of a text in another way. Some (``ByteFallback``) take whole characters back when a broken byte
    follows: those were told, and what waits is then decoded alone.
    """

    tokenizer: Tokenizer
    told: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)

    def hear(self, token: int) -> str:
        """The characters that a token completes."""
        self.waiting.append(token)
        text = self._waiting()
        if not text or text.endswith(BROKEN):
            return ""
        self.told, self.waiting = self.waiting, []
        return text

    @property
    def begun(self) -> str:
        """The whole characters of what waits: the rest of a text that ends here."""
        return self._waiting().rstrip(BROKEN)

    def _waiting(self) -> str:
        before, whole = (self._decoded(ids) for ids in (self.told, self.told + self.waiting))
        return whole[len(before) :] if whole.startswith(before) else self._decoded(self.waiting)

    def _decoded(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@dataclass
class _Watch:
    """Looks for stop strings in a row as its tokens come. ``length``: tokens up to the one that completed one."""

    characters: Characters
    stops: tuple[str, ...]
    length: int | None = None
    heard: int = 0
    tail: str = ""

    def hear(self, ids: Sequence[int]) -> None:
        for token in ids:
            if self.length is not None:
                return
            self.heard += 1
            self.tail += self.characters.hear(token)
            # a string may end where a character begins
            if first_stop(self.tail + self.characters.begun, self.stops) is not None:
                self.length = self.heard
            self.tail = self.tail[-max(map(len, self.stops)) :]


def stream_tokens(
    decoder: Decoder, prompt: Sequence[int], max_new_tokens: int | None, stop: Sequence[int], sampling=GREEDY
) -> Iterator[tuple[int, bool]]:
    """Every token of one row as soon as its round is over, and whether it was an accepted draft."""
    state = decoder.start([prompt], max_new_tokens, stop, sampling)
    sent, rounds = int(state.delivered[0]), 0
    if sent:
        yield int(state.tokens[0, 0]), False
    done = bool(state.done[0])
    while not done:
        rounds += 1
        state = decoder.advance(state, until=rounds)
        # whole arrays: an index of its own in every round would be a program of its own
        (tokens,), (done,), (counts,), (accepted,) = jax.device_get(
            (state.tokens, state.done, state.counts, state.accepted)
        )
        count = int(counts[rounds - 1])
        for place in range(count):
            yield int(tokens[sent + place]), place < accepted[rounds - 1]
        sent += count


def pieces(tokens: Iterator[tuple[int, bool]], tokenizer: Tokenizer) -> Iterator[Piece]:
    """The text of a token stream; joined, the pieces are :func:`whole_characters` of all tokens."""
    characters, drafted = Characters(tokenizer), False
    for token, drafted in tokens:
        if text := characters.hear(token):
            yield Piece(text, drafted)
    if characters.begun:
        yield Piece(characters.begun, drafted)


def until(pieces: Iterator[Piece], stops: Sequence[str]) -> Iterator[Piece]:
    """The pieces before the first stop string, which itself is not shown, nor any part of one that may still come.

    A text that ends in an unfinished stop string is shown to its end.
    """
    held, drafted = "", False
    for piece in pieces:
        held, drafted = held + piece.text, piece.drafted
        if (place := first_stop(held, stops)) is not None:
            if before := held[:place]:
                yield Piece(before, drafted)
            return
        keep = max((_started(held, stop) for stop in stops), default=0)
        if ready := held[: len(held) - keep]:
            yield Piece(ready, drafted)
        held = held[len(held) - keep :]
    if held:
        yield Piece(held, drafted)


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first (of two that end together, the longer): the same one however
    the text comes in pieces. None if there is none."""
    found = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def whole_characters(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The decoded ids without an unfinished character at their end."""
    characters = Characters(tokenizer)
    return "".join(map(characters.hear, ids)) + characters.begun


def _started(text: str, stop: str) -> int:
    """How many characters of ``stop`` the end of ``text`` already says."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)

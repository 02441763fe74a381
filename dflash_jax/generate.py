"""The compiled loop and its host shell: prompts in, tokens out.

Three programs are compiled per (batch, capacity, block size, rule): one hears a chunk of the prompts (again for its
other length), one says the first tokens, one runs rounds in a ``lax.while_loop`` until every row is done or a number of
rounds has passed. Prompt lengths, budgets, stop ids, seeds, settings and accept counts are values, not shapes.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.accept import Greedy
from dflash_jax.delivery import Ends
from dflash_jax.generation import Generation, collect
from dflash_jax.plain import NoDrafter
from dflash_jax.protocols import AcceptRule, Drafter, Params, Target
from dflash_jax.settings import GREEDY, SamplingParams, packed, per_row
from dflash_jax.speculate import Heard, SpecState, first_token, hear_prompt, spec_step

CHUNKS = (32, 128)
"""Prompt tokens heard per step: the smallest that holds the longest prompt, else the largest, again and again."""

SMALLEST_CAPACITY = 256
MOST_STOP_IDS = 16
LARGEST_BLOCK = 127
"""Tokens of a round are counted in int8."""

FOREVER = np.int32(2**31 - 1)

hear = jax.jit(hear_prompt, static_argnames=("target", "drafter"), donate_argnames="heard")
begin = jax.jit(
    first_token,
    static_argnames=("target", "rule", "room", "alternatives"),
    donate_argnames=("cache", "draft_cache"),
)


@partial(jax.jit, static_argnames=("target", "drafter", "rule"), donate_argnames="state")
def run_rounds(
    target: Target,
    drafter: Drafter,
    rule: AcceptRule,
    params: Params,
    draft_params: Params,
    state: SpecState,
    until: jax.Array,
) -> SpecState:
    """Rounds, until every row is done or ``until`` rounds have passed since the prompt."""
    return jax.lax.while_loop(
        lambda state: ~state.done.all() & (state.rounds < until),
        lambda state: spec_step(target, drafter, rule, params, draft_params, state),
        state,
    )


@dataclass(frozen=True)
class Decoder:
    """A target, a drafter and a rule, ready to decode.

    Args:
        drafter: None decodes plainly, by the same loop.
        context_limit: most tokens of prompt and output together (config key ``max_position_embeddings``).
    """

    target: Target
    params: Params
    drafter: Drafter = field(default_factory=NoDrafter)
    draft_params: Params = None
    rule: AcceptRule = field(default_factory=Greedy)
    context_limit: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.drafter.block_size <= LARGEST_BLOCK:
            raise ValueError(f"block size {self.drafter.block_size}: 1 (no draft) to {LARGEST_BLOCK}")
        if self.rule.budget > LARGEST_BLOCK - 1:
            raise ValueError(f"a draft tree of {self.rule.budget} nodes: at most {LARGEST_BLOCK - 1}")

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int] | None = None,
        stop: Sequence[int] = (),
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
        logprobs: int | None = None,
    ) -> SpecState:
        """Hear the prompts and say the first token of each row.

        Args:
            prompts: token ids, one list per row, each at least one token.
            max_new_tokens: for all rows or per row; None: as many as the context limit leaves.
            stop: ids that end a row; the id itself is delivered.
            sampling: for all rows or per row. What a row says depends on its own settings and seed, not on its
                neighbours. One seed for all rows: row 0 has it, the others have seeds made of it.
            logprobs: also keep the log-probability of every token said and of this many likeliest ones.

        Raises:
            ValueError: an empty prompt, a budget or a number of log-probabilities that is no integer or out of range,
                ids outside the vocabulary, too many stop ids, settings that the rule does not honour, or no room left
                below the context limit. Nothing is compiled before these checks.
        """
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        budget = self._budgets(lengths, max_new_tokens)
        stop_ids = _stop_row(stop)
        hidden, vocabulary = self._row
        _check_ids(prompts, vocabulary)
        settings, seeds = self._settings(sampling, len(prompts))
        if logprobs is not None and (not _is_integer(logprobs) or not 0 <= logprobs <= vocabulary):
            raise ValueError(f"logprobs {logprobs!r}: expected an integer from 0 to {vocabulary}, or None")
        capacity = bucket(int((lengths.astype(np.int64) + budget).max()) + self.width)
        chunk = next((size for size in CHUNKS if size >= lengths.max()), CHUNKS[-1])
        undo = undo_of(self.width)
        batch = len(prompts)
        heard = Heard(
            hidden=jnp.zeros((batch, *hidden.shape[1:]), hidden.dtype),
            cache=self.target.init_cache(batch, capacity, undo),
            draft_cache=self.drafter.init_cache(batch, capacity, undo),
        )
        static = dict(target=self.target, drafter=self.drafter)
        for at in range(0, int(lengths.max()), chunk):
            tokens = np.zeros((batch, chunk), np.int32)
            for row, prompt in enumerate(prompts):
                piece = prompt[at : at + chunk]
                tokens[row, : len(piece)] = piece
            count = np.clip(lengths - at, 0, chunk).astype(np.int32)
            heard = hear(
                **static, params=self.params, draft_params=self.draft_params, heard=heard, tokens=tokens, count=count
            )
        ends = Ends(budget=jnp.asarray(budget), stop=jnp.asarray(np.tile(stop_ids, (batch, 1))))
        return begin(
            target=self.target,
            rule=self.rule,
            params=self.params,
            hidden=heard.hidden,
            cache=heard.cache,
            draft_cache=heard.draft_cache,
            ends=ends,
            sampling=settings,
            seeds=seeds,
            room=capacity,
            alternatives=None if logprobs is None else int(logprobs),
        )

    @property
    def width(self) -> int:
        """Tokens of a verification."""
        return self.rule.width(self.drafter.block_size)

    def advance(self, state: SpecState, until: int | None = None) -> SpecState:
        """Run rounds until every row is done, or until ``until`` rounds have passed in all. Consumes ``state``."""
        until = jnp.asarray(FOREVER if until is None else until, jnp.int32)
        return run_rounds(self.target, self.drafter, self.rule, self.params, self.draft_params, state, until)

    def warm_up(self, prompts, max_new_tokens=None, stop=(), sampling=GREEDY) -> None:
        """Compile all that these prompts need, if no log-probabilities are asked for."""
        jax.block_until_ready(self.advance(self.start(prompts, max_new_tokens, stop, sampling), until=1))

    def generate(self, prompts, max_new_tokens=None, stop=(), sampling=GREEDY, logprobs=None) -> Generation:
        """All tokens at once; arguments as :meth:`start`."""
        started = time.perf_counter()
        state = jax.block_until_ready(self.start(prompts, max_new_tokens, stop, sampling, logprobs))
        first = time.perf_counter()
        state = jax.block_until_ready(self.advance(state))
        return collect(state, ttft_s=first - started, decode_s=time.perf_counter() - first)

    def stream(
        self, prompts, max_new_tokens=None, stop=(), sampling=GREEDY, logprobs=None, rounds_per_call: int = 4
    ) -> Generator[list[list[int]] | Generation, Sequence[bool] | None, None]:
        """Lists of new ids per row as they come, every ``rounds_per_call`` rounds; a :class:`Generation` at the end.

        A caller may ``send`` back one bool per row: rows that end here, whatever they would still say. Why is known to
        the caller alone: ``finish`` has "length" for them.
        """
        started = time.perf_counter()
        state = self.start(prompts, max_new_tokens, stop, sampling, logprobs)
        sent, first, until = [0] * len(prompts), None, 0
        while True:
            delivered, tokens, done = jax.device_get((state.delivered, state.tokens, state.done))
            first = first or time.perf_counter()
            ended = yield [tokens[row, sent[row] : delivered[row]].tolist() for row in range(len(sent))]
            sent = delivered.tolist()
            if ended is not None:
                done = done | np.asarray(ended)
                state = state.replace(done=jnp.asarray(done))
            if done.all():
                break
            until += rounds_per_call
            state = self.advance(state, until)
        yield collect(state, ttft_s=first - started, decode_s=time.perf_counter() - first)

    def _budgets(self, lengths: np.ndarray, max_new_tokens) -> np.ndarray:
        if not len(lengths) or (lengths == 0).any():
            raise ValueError("an empty prompt has no last token to go on from; give every row at least one token")
        room = FOREVER if self.context_limit is None else self.context_limit - lengths
        if (np.asarray(room) < 1).any():
            raise ValueError(
                f"prompts of {lengths.tolist()} tokens leave no room below the limit of {self.context_limit}"
            )
        if max_new_tokens is None:
            if self.context_limit is None:
                raise ValueError("max_new_tokens is needed: no context limit is known")
            return np.asarray(room, np.int32)
        if not all(map(_is_integer, np.asarray(max_new_tokens, object).ravel())):
            raise ValueError(f"max_new_tokens {max_new_tokens!r}: expected an integer, or one for each row")
        budget = np.broadcast_to(np.asarray(max_new_tokens, np.int64), lengths.shape)
        if (budget < 1).any():
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        return np.minimum(budget, room).astype(np.int32)

    def _settings(self, sampling, rows: int):
        settings = per_row(sampling, rows)
        hot = next((each.temperature for each in settings if not each.greedy), None)
        if hot is not None and not self.rule.samples:
            raise ValueError(
                f"temperature {hot:g} with the rule {self.rule.name}, which knows only the argmax; decode with a rule "
                "that samples, such as dflash_jax.accept.Match()"
            )
        return packed(settings)

    @cached_property
    def _row(self) -> tuple[jax.ShapeDtypeStruct, int]:
        """The shape of one token's hidden row, and the size of the vocabulary; traced once per decoder."""
        hidden = jax.eval_shape(self.target.embed, self.params, jax.ShapeDtypeStruct((1, 1), jnp.int32))
        return hidden, jax.eval_shape(self.target.unembed, self.params, hidden).shape[-1]


def undo_of(width: int) -> int:
    """The longest step that caches are built for, and one more: a ring of an odd number of slots made scores 1.8 times
    as slow on a CPU."""
    return max(CHUNKS[-1], width) + 1


def bucket(tokens: int) -> int:
    """The capacity that holds ``tokens`` positions: a power of two, at least 256."""
    return max(SMALLEST_CAPACITY, 1 << (tokens - 1).bit_length())


def _is_integer(value: object) -> bool:
    """Of Python or numpy, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_ids(prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    lowest, highest = min(map(min, prompts)), max(map(max, prompts))
    if lowest < 0 or highest >= vocabulary:
        raise ValueError(f"prompts hold ids {lowest} to {highest}; the vocabulary is 0 to {vocabulary - 1}")


def _stop_row(stop: Sequence[int]) -> np.ndarray:
    if not all(map(_is_integer, stop)):
        raise ValueError(f"stop {list(stop)!r}: expected integer ids; strings are for checkpoints.text.TextDecoder")
    if len(set(stop)) > MOST_STOP_IDS:
        raise ValueError(f"at most {MOST_STOP_IDS} stop ids, got {len(set(stop))}")
    if any(token < 0 for token in stop):
        raise ValueError(f"stop ids must not be negative, got {sorted(stop)}")
    row = np.full(MOST_STOP_IDS, -1, np.int32)
    row[: len(set(stop))] = sorted(set(stop))
    return row

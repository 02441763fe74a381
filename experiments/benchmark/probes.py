"""What the benchmark measures of our own loop: what it adds to its parts, how flat it is, what it copies and reads."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.generate import Decoder, bucket, run_rounds
from dflash_jax.protocols import Params, Target
from experiments.pair import expert_leaves
from experiments.timing import StepTimer, draft_steps, target_steps

ROUNDS = 8
"""Rounds of the compiled loop in one timed call."""

WARM_ROUNDS = 2
SLICE = 16
"""Tokens in one timed slice of the flatness run."""

COPY_BYTES = 256 * 2**20

SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<dims>[\d,]*)\]")
COPY = re.compile(rf"=\s*\(?(?P<shape>{SHAPE.pattern})[^=\n]*?\s(?:copy|copy-start)\(")
HLO_NAMES = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int32": "s32", "int8": "s8"}


def count_copies(program: str, shapes: list[str]) -> int:
    """``copy`` operations of optimised HLO whose result holds one of ``shapes``, axes in any order, ones aside.

    Args:
        shapes: as HLO writes them, e.g. ``f32[1,2,256,64]``.
    """
    wanted = {_folded(shape) for shape in shapes}
    return sum(_folded(match["shape"]) in wanted for match in COPY.finditer(program))


def _folded(shape: str) -> tuple[str, tuple[int, ...]]:
    match = SHAPE.match(shape)
    return match["dtype"], tuple(sorted(int(size) for size in match["dims"].split(",") if size not in ("", "1")))


def hlo_shape(array: jax.Array) -> str:
    """How HLO writes an array's type."""
    return f"{HLO_NAMES[array.dtype.name]}[{','.join(map(str, array.shape))}]"


def loop_copies(decoder: Decoder, prompt: list[int], tokens: int) -> int:
    """Cache-shaped copies in the program of the compiled loop."""
    state = decoder.start([prompt], tokens)
    lowered = run_rounds.lower(
        decoder.target,
        decoder.drafter,
        decoder.rule,
        decoder.params,
        decoder.draft_params,
        state,
        jnp.asarray(1, jnp.int32),
    )
    caches = jax.tree.leaves((state.cache.layers, getattr(state.draft_cache, "layers", ())))
    return count_copies(lowered.compile().as_text(), [hlo_shape(leaf) for leaf in caches])


class RoundProbe:
    """One block size: rounds of the loop beside its parts, compiled and ready to be timed in turn.

    The parts are programs of their own that keep their caches in place (see :mod:`experiments.timing`): the drafter's
    proposal and its taking in of features, and the target's step over a block with head and argmax. They are timed
    twice: called in turn, as the loop runs them, and each alone again and again. The latter leaves out the calls from
    Python, but also lets each keep its own weights in the CPU's caches, where together they may not fit.
    """

    def __init__(self, decoder: Decoder, prompt: list[int], tokens: int):
        text = decoder.generate([prompt], tokens).tokens[0]
        self.timer = StepTimer(decoder, [prompt], [text], tokens)
        self.decoder = decoder
        state = decoder.start([[*prompt, *text[: len(text) // 2]]], tokens - len(text) // 2)
        self.state = jax.block_until_ready(decoder.advance(state, WARM_ROUNDS))
        self._rounds()
        self._in_turn()

    def measure(self, turns: int) -> dict[str, Any]:
        """Medians in seconds, and medians of the turns' ratios of a round over draft and verify."""
        self.timer.seconds.clear()
        rounds, in_turn = [], []
        for _ in range(turns):
            self.timer.turn()
            rounds.append(self._rounds())
            in_turn.append(self._in_turn())
        costs = self.timer.costs()
        alone = np.array(self.timer.seconds)[:, 1:].sum(axis=1)
        ratios = np.array(rounds) / np.array(in_turn)
        return {
            "plain_step_s": costs.step_s,
            "verify_s": costs.verify_s,
            "draft_s": costs.draft_s,
            "verify_ratio": costs.ratio,
            "round_s": float(np.median(rounds)),
            "draft_and_verify_s": float(np.median(in_turn)),
            "overhead": float(np.median(ratios)),
            "overhead_spread": [float(ratios.min()), float(ratios.max())],
            "overhead_over_parts_alone": float(np.median(np.array(rounds) / alone)),
        }

    def _in_turn(self) -> float:
        """Seconds of one draft and one verification, separately jitted and called in turn."""
        timer, decoder = self.timer, self.decoder
        anchors, weights = timer.follow[:, : timer.steps].T, (decoder.params, decoder.draft_params)
        started = time.perf_counter()
        for step in range(timer.steps):
            one = slice(step, step + 1)
            timer.draft_cache, _ = draft_steps(
                decoder.target, decoder.drafter, *weights, anchors[one], timer.features, timer.draft_cache, timer.width
            )
            timer.cache, said = target_steps(
                decoder.target, decoder.params, timer.blocks[one], timer.cache, timer.width
            )
            jax.block_until_ready(said)
        return (time.perf_counter() - started) / timer.steps

    def _rounds(self) -> float:
        """Seconds of one round of the loop, at the length where the parts are timed.

        From a copy of one state, because hearing a prompt drives the weights out of the CPU's caches.
        """
        state = jax.block_until_ready(jax.tree.map(jnp.copy, self.state))
        before, started = int(state.rounds), time.perf_counter()
        state = jax.block_until_ready(self.decoder.advance(state, before + ROUNDS))
        seconds = time.perf_counter() - started
        made = int(state.rounds) - before
        return seconds / made if made else float("nan")


def flatness(decoder: Decoder, prompt: list[int], tokens: int, repeats: int) -> dict[str, Any]:
    """Slowest over fastest slice of a generation that stays within one capacity.

    Of each slice the fastest repeat counts: what disturbs a repeat is not the length. The first slice is left out:
    after a prompt the weights must find their way into the CPU's caches again.
    """
    slices = []
    for _ in range(repeats):
        state = jax.block_until_ready(decoder.start([prompt], tokens))
        slices.append(list(_slices(decoder, state, tokens)))
    best = np.min(np.array(slices), axis=0)[1:]
    return {
        "flatness": float(best.max() / best.min()),
        "capacity": bucket(len(prompt) + tokens + decoder.drafter.block_size),
        "lengths": [len(prompt) + SLICE * index for index in range(1, len(best) + 1)],
        "token_s": best.tolist(),
    }


def _slices(decoder: Decoder, state: Any, tokens: int) -> Iterator[float]:
    for until in range(SLICE, tokens, SLICE):
        started = time.perf_counter()
        state = jax.block_until_ready(decoder.advance(state, until))
        yield (time.perf_counter() - started) / SLICE


def token_bytes(target: Target, params: Params, union: float | None) -> int:
    """Bytes of weights that plain decoding must read for one token.

    Of the experts, the ``union`` (mean distinct experts per layer) of the E there are; of an embedding that is not also
    the head, one row: nothing.
    """
    experts = sum(leaf.nbytes for _, leaf in expert_leaves(params))
    everything = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    embedding = 0 if target.config.tie_word_embeddings else params["embed"].nbytes
    active = experts * union / target.experts if experts else 0
    return int(everything - experts - embedding + active)


def copy_bandwidth(threads: int, size: int = COPY_BYTES, repeats: int = 5) -> float:
    """Bytes per second of a large copy, reads and writes both counted: the best of ``repeats``, on ``threads`` threads.

    Whether a store first reads its cache line is not counted, so that the true traffic may be half as much again.
    """
    parts = [(np.ones(size // threads, np.uint8), np.empty(size // threads, np.uint8)) for _ in range(threads)]
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats + 1):  # the first one touches the pages
            started = time.perf_counter()
            list(pool.map(lambda part: np.copyto(part[1], part[0]), parts))
            best = min(best, time.perf_counter() - started)
    return 2 * (size // threads) * threads / best

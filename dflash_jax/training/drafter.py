"""Training a DFlash drafter: many blocks per text in one forward pass (arXiv 2602.06036, section 4).

A block is ``[x[a], MASK, ...]`` at positions ``a .. a + P - 1`` for a random anchor a. Row j >= 1 predicts ``x[a + j]``
from the features of positions strictly before a, as in decoding: the features of the anchor do not exist yet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dflash_jax.cache import Cache
from dflash_jax.protocols import Params, Target
from dflash_jax.shapes import Array, Bool, Float, Int, Shaped
from dflash_jax.training.optimize import TrainState, apply_gradients


@dataclass(frozen=True)
class Decay:
    """Row j weighs ``exp(-(j - 1) / gamma)`` (the paper: gamma 7 for blocks of 16, 5 for 10, 4 for 8)."""

    gamma: float

    def __call__(self, chance: Float[Array, "B N drafts"]) -> Float[Array, "B N drafts"]:
        weights = jnp.exp(-jnp.arange(chance.shape[-1]) / self.gamma)
        return jnp.broadcast_to(weights, chance.shape)


@dataclass(frozen=True)
class DPace:
    """Row j weighs the expected number of rows from j on that will be reached (D-PACE, arXiv 2605.18810).

    With ``c_j = (1 - alpha) * q_j(label) + alpha`` and ``P_j = prod_{i <= j} c_i``, the weight is ``sum_{i >= j} P_i``,
    held constant for the gradient.
    """

    alpha: float = 0.5

    def __call__(self, chance: Float[Array, "B N drafts"]) -> Float[Array, "B N drafts"]:
        reach = jnp.cumprod((1 - self.alpha) * chance + self.alpha, axis=-1)
        return jnp.flip(jnp.cumsum(jnp.flip(reach, -1), axis=-1), -1)


WEIGHTS: dict[str, Callable[[], Any]] = {"decay": lambda: Decay(gamma=4.0), "dpace": DPace}


def sample_anchors(
    key: jax.Array, supervised: Bool[Array, "B S"], count: int
) -> tuple[Int[Array, "B N"], Bool[Array, "B N"]]:
    """Up to ``count`` anchors per text without replacement, and which of them are real.

    An anchor and the token after it must both be supervised.
    """
    valid = supervised[:, :-1] & supervised[:, 1:]
    score = jnp.where(valid, jax.random.uniform(key, valid.shape), -1.0)
    top, anchors = jax.lax.top_k(score, count)
    return anchors.astype(jnp.int32), top >= 0


def block_logits(
    drafter, target: Target, params: Params, target_params: Params, tokens, features, anchors: Int[Array, "B N"]
) -> Float[Array, "B N drafts V"]:
    """Logits of rows 1..P-1 of every anchor's block, all blocks of a text side by side."""
    batch, length = tokens.shape
    count, size = anchors.shape[1], drafter.block_size
    empty: Cache = drafter.init_cache(batch, length, length)
    cache = drafter.module.apply({"params": params}, features, empty, method="absorb")
    ids = jnp.full((batch, count, size), drafter.config.mask_token_id, tokens.dtype)
    ids = ids.at[:, :, 0].set(jnp.take_along_axis(tokens, anchors, axis=1)).reshape(batch, -1)
    x = target.embed(target_params, ids) * drafter.config.input_embedding_scale
    hidden = drafter.module.apply({"params": params}, x, anchors, cache, method="block")
    hidden = hidden.reshape(batch, count, size, -1)[:, :, 1:]
    logits = drafter.head(target, target_params, hidden.reshape(batch, -1, hidden.shape[-1]))
    return logits.reshape(batch, count, size - 1, -1)


def following(
    text: Shaped[Array, "B S"], anchors: Int[Array, "B N"], drafts: int
) -> tuple[Shaped[Array, "B N drafts"], Bool[Array, "B N drafts"]]:
    """What stands at the ``drafts`` places after every anchor, and which of them lie inside the text."""
    place = anchors[:, :, None] + jnp.arange(1, drafts + 1)
    rows = jnp.arange(text.shape[0])[:, None, None]
    return text[rows, jnp.minimum(place, text.shape[1] - 1)], place < text.shape[1]


def block_loss(
    logits: Float[Array, "B N drafts V"],
    tokens: Int[Array, "B S"],
    anchors: Int[Array, "B N"],
    real: Bool[Array, "B N"],
    supervised: Bool[Array, "B S"],
    weigh: Callable[[jax.Array], jax.Array],
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Weighted cross-entropy, nats per unit of weight; and ``acceptance``, the tokens per round that greedy decoding
    would emit if every text continued as given (1 + leading correct rows; rows without a label end a block).

    Rows beyond the text or unsupervised carry no weight. Without any weight the loss and its gradient are zero.
    """
    labels, inside = following(tokens, anchors, logits.shape[2])
    counted = real[:, :, None] & inside & following(supervised, anchors, logits.shape[2])[0]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    weights = jax.lax.stop_gradient(weigh(jnp.exp(-nats))) * counted
    loss = jnp.sum(weights * nats) / jnp.maximum(jnp.sum(weights), 1e-9)
    right = (jnp.argmax(logits, axis=-1) == labels) & counted
    blocks = jnp.maximum(real.sum(), 1)
    accepted = jnp.cumprod(right.astype(jnp.int32), axis=-1).sum(-1)
    first = right[:, :, 0].sum() / blocks
    return loss, {"loss": loss, "acceptance": 1 + (accepted * real).sum() / blocks, "first_row_accuracy": first}


def make_lengths(drafter, target: Target, first: int):
    """``(params, target_params, tokens [B S], features [B S A D]) -> [B N]``: the tokens that a round from each anchor,
    ``first .. S - 2``, would deliver (1 + leading correct rows)."""

    def lengths(params, target_params, tokens, features):
        anchors = jnp.arange(first, tokens.shape[1] - 1, dtype=jnp.int32)
        anchors = jnp.broadcast_to(anchors, (tokens.shape[0], anchors.size))
        logits = block_logits(drafter, target, params, target_params, tokens, features, anchors)
        labels, inside = following(tokens, anchors, logits.shape[2])
        right = (jnp.argmax(logits, axis=-1) == labels) & inside
        return 1 + jnp.cumprod(right.astype(jnp.int32), axis=-1).sum(-1)

    return lengths


def replayed_tokens_per_round(lengths: Int[Array, "B N"]) -> Float[Array, ""]:
    """Greedy decoding of the texts, replayed: the first round starts at the first anchor, each other where the last one
    ended. Unlike the mean over all anchors this is what decoding will show: a round starts where the drafter has just
    failed, and such places are harder."""

    def visit(start: Int[Array, "B"], item: tuple[jax.Array, jax.Array]):
        place, length = item
        return jnp.where(start == place, place + length, start), start == place

    count = lengths.shape[1]
    first = jnp.zeros(lengths.shape[0], lengths.dtype)
    _, starts = jax.lax.scan(visit, first, (jnp.arange(count, dtype=lengths.dtype), lengths.T))
    return lengths.size / starts.sum()


def make_objective(drafter, target: Target, weigh, anchors_per_text: int):
    """``(params, target_params, tokens [B S], features [B S A D], supervised [B S], key) -> (loss, report)``: blocks at
    random anchors, and what :func:`block_loss` says of them."""

    def objective(params, target_params, tokens, features, supervised, key):
        anchors, real = sample_anchors(key, supervised, anchors_per_text)
        logits = block_logits(drafter, target, params, target_params, tokens, features, anchors)
        return block_loss(logits, tokens, anchors, real, supervised, weigh)

    return objective


def make_update(drafter, target: Target, optimizer: optax.GradientTransformation, weigh, anchors_per_text: int):
    """The jitted update: the arguments of :func:`make_objective` with the state in the place of the parameters.

    Returns ``(state, report)``. The target's parameters are constants: only the drafter learns.
    """
    objective = make_objective(drafter, target, weigh, anchors_per_text)

    @jax.jit
    def update(state: TrainState, *batch):
        grads, report = jax.grad(objective, has_aux=True)(state.params, *batch)
        state, norm = apply_gradients(state, grads, optimizer)
        return state, report | {"grad_norm": norm}

    return update

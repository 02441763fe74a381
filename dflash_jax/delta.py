"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464): a matrix per head as memory, read and written by tokens.

With a decay ``exp(g)``, a write strength ``beta`` and a key k of length one:

    S <- exp(g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q

Three forms, equal up to rounding. The recurrent one goes token by token: every token's operations are the same whether
one token is heard or a block, so decoding and verification round alike. The chunked one solves a triangular system per
chunk (section 3.3 of the paper) and is for prompts. The branched one solves the same system with a tree's ancestors in
place of all earlier tokens (TreeWY, arXiv 2608.20961).

Value heads come in runs of R per key head, ``[G R]``, so that keys are never repeated.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.shapes import Array, Bool, Float, Int

RECURRENT_UP_TO = 16
"""Tokens up to which a step is recurrent."""

CHUNK = 64
"""Tokens of a chunk, as in transformers' ``torch_chunk_gated_delta_rule``."""


class Tokens(NamedTuple):
    """What T tokens ask of the memory, and write to it. In float32 or wider.

    Attributes:
        q, k: ``[B T G K]``; k of length one, q scaled.
        v: ``[B T G R V]``.
        g: ``[B T G R]``, log of the decay, at most 0.
        beta: ``[B T G R]``, in 0..1.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


class Read(NamedTuple):
    """``out`` and ``written`` (o and u above) ``[B T G R V]``; ``state`` after the last token ``[B G R K V]``, None in
    a tree, which has no last one; ``states`` after every token ``[B T G R K V]``, where they are kept."""

    out: jax.Array
    written: jax.Array
    state: jax.Array | None
    states: jax.Array | None = None


def gated_delta(state: Float[Array, "B G R K V"], tokens: Tokens) -> Read:
    """Hear T tokens."""
    return recurrent(state, tokens) if tokens.k.shape[1] <= RECURRENT_UP_TO else chunked(state, tokens)


def hear_one(state: Float[Array, "B G R K V"], token: Tokens) -> Read:
    """One token; its arrays have no T. With ``g`` and ``beta`` 0 the state stays as it is, to the bit."""
    state = state * jnp.exp(token.g)[..., None, None]
    written = token.beta[..., None] * (token.v - jnp.einsum("BGRKV,BGK->BGRV", state, token.k))
    state = state + jnp.einsum("BGK,BGRV->BGRKV", token.k, written)
    return Read(jnp.einsum("BGRKV,BGK->BGRV", state, token.q), written, state)


def recurrent(state: Float[Array, "B G R K V"], tokens: Tokens, keep_states: bool = False) -> Read:
    """Token by token."""

    def visit(state: jax.Array, token: Tokens) -> tuple[jax.Array, Read]:
        read = hear_one(state, token)
        return read.state, read._replace(state=None, states=read.state if keep_states else None)

    by_token = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), tokens)
    state, parts = jax.lax.scan(visit, state, by_token)
    return jax.tree.map(lambda part: jnp.moveaxis(part, 0, 1), parts)._replace(state=state)


def chunked(state: Float[Array, "B G R K V"], tokens: Tokens, chunk: int = CHUNK) -> Read:
    """Chunk by chunk; the last one is filled up with tokens that change nothing."""
    count = tokens.k.shape[1]
    size = min(chunk, count)
    filled = -(-count // size) * size

    def cut(leaf: jax.Array) -> jax.Array:
        padded = jnp.pad(leaf, ((0, 0), (0, filled - count)) + ((0, 0),) * (leaf.ndim - 2))
        return jnp.moveaxis(padded.reshape(leaf.shape[0], -1, size, *leaf.shape[2:]), 1, 0)

    def visit(state: jax.Array, part: Tokens) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        read = _one_chunk(state, part)
        return read.state, (read.out, read.written)

    state, parts = jax.lax.scan(visit, state, jax.tree.map(cut, tokens))

    def join(part: jax.Array) -> jax.Array:
        joined = jnp.moveaxis(part, 0, 1)
        return joined.reshape(joined.shape[0], filled, *joined.shape[3:])[:, :count]

    return Read(*map(join, parts), state)


def _one_chunk(state: Float[Array, "B G R K V"], tokens: Tokens) -> Read:
    """Every token follows the one before it."""
    total = jnp.moveaxis(jnp.cumsum(tokens.g, axis=1), 1, -1)
    read = _solved(state, tokens, total, jnp.tril(jnp.ones((total.shape[-1],) * 2, bool)))
    return read._replace(state=absorb(state, tokens.k, read.written, tokens.g))


def branched(
    state: Float[Array, "B G R K V"], tokens: Tokens, ancestors: Bool[Array, "B T T"], keep_states: bool = False
) -> Read:
    """Hear a tree: each token as if its ``ancestors`` (itself included) alone had come, all by one solve."""
    with jax.default_matmul_precision("float32"):  # a total is an exponent: TF32 or bfloat16 products would not do
        total = jnp.einsum("BTS,BSGR->BGRT", ancestors.astype(tokens.g.dtype), tokens.g)
        read = _solved(state, tokens, total, ancestors[:, None, None])
        if not keep_states:
            return read
        start = jnp.moveaxis(jnp.exp(total), -1, 1)
        decay = _decay(total, ancestors[:, None, None])
        states = jnp.einsum("BGRTS,BSGK,BSGRV->BTGRKV", decay, tokens.k, read.written)
        return read._replace(states=start[..., None, None] * state[:, None] + states)


def _decay(total: Float[Array, "B G R T"], seen: Bool[Array, "*heads T T"]) -> Float[Array, "B G R T T"]:
    """``D_ij = e^(G_i - G_j)`` where token i sees j, else 0. Masked before the exponential, which may overflow else."""
    return jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf))


def _solved(
    state: Float[Array, "B G R K V"], tokens: Tokens, total: Float[Array, "B G R T"], seen: Bool[Array, "*heads T T"]
) -> Read:
    """``(I + strict(beta D k k^T)) u = beta (v - e^G k S)``, ``o = e^G q S + (D q k^T) u``.

    Args:
        total: G, the sum of g over the tokens that each sees, its own included.
        seen: lower triangular with a true diagonal.
    """
    size = total.shape[-1]
    decay = _decay(total, seen)
    beta = jnp.moveaxis(tokens.beta, 1, -1)
    alike = jnp.einsum("BTGK,BSGK->BGTS", tokens.k, tokens.k)[:, :, None]
    system = beta[..., None] * decay * alike * jnp.tril(jnp.ones((size, size)), -1).astype(decay.dtype)
    start = jnp.exp(total)
    recalled = start[..., None] * jnp.einsum("BTGK,BGRKV->BGRTV", tokens.k, state)
    wanted = beta[..., None] * (jnp.moveaxis(tokens.v, 1, 3) - recalled)
    written = solve_unit_lower(system, wanted)
    asked = jnp.einsum("BTGK,BSGK->BGTS", tokens.q, tokens.k)[:, :, None] * decay
    out = start[..., None] * jnp.einsum("BTGK,BGRKV->BGRTV", tokens.q, state) + asked @ written
    return Read(jnp.moveaxis(out, 3, 1), jnp.moveaxis(written, 3, 1), None)


def solve_unit_lower(strict: Float[Array, "*heads T T"], wanted: Float[Array, "*heads T V"]) -> jax.Array:
    """The u of ``(I + strict) u = wanted``. Its gradient is by the transposed system: no step of the solve is kept.

    Args:
        strict: strictly lower triangular; of its gradient only that part means anything.
    """

    def lower(strict: jax.Array, right: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(strict, right, cpu=forward_substitution, default=library_solve)

    def transposed(_: object, right: jax.Array) -> jax.Array:
        """Read from the end, the transposed system is lower triangular again."""
        turned = jnp.flip(jnp.swapaxes(strict, -1, -2), (-2, -1))
        return jnp.flip(lower(turned, jnp.flip(right, -2)), -2)

    def system(u: jax.Array) -> jax.Array:
        """For the gradient alone; its products as exact as the solve's, not TF32 or bfloat16."""
        return u + jnp.matmul(strict, u, precision="highest")

    return jax.lax.custom_linear_solve(system, wanted, lambda _, right: lower(strict, right), transposed)


def forward_substitution(strict: Float[Array, "*heads T T"], wanted: Float[Array, "*heads T V"]) -> jax.Array:
    """Row after row.

    For CPUs. The library's solve is LAPACK's there, whose BLAS has threads of its own: between solves they spin on CPUs
    that the rest of the program computes on, or that it was told to leave alone. Systems as small as these it solves
    more slowly besides.
    """

    def visit(solved: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        coefficients, right = (jax.lax.dynamic_index_in_dim(of, row, -2, keepdims=False) for of in (strict, wanted))
        new = right - jnp.einsum("...S,...SV->...V", coefficients, solved)
        return jax.lax.dynamic_update_index_in_dim(solved, new, row, -2), None

    return jax.lax.scan(visit, jnp.zeros_like(wanted), jnp.arange(wanted.shape[-2]))[0]


def library_solve(strict: Float[Array, "*heads T T"], wanted: Float[Array, "*heads T V"]) -> jax.Array:
    """By one call of the accelerator's library."""
    system = strict + jnp.eye(strict.shape[-1], dtype=strict.dtype)
    return jax.lax.linalg.triangular_solve(system, wanted, left_side=True, lower=True, unit_diagonal=True)


def absorb(
    state: Float[Array, "B G R K V"],
    k: Float[Array, "B T G K"],
    written: Float[Array, "B T G R V"],
    g: Float[Array, "B T G R"],
) -> Float[Array, "B G R K V"]:
    """The state after T tokens from what they wrote: ``e^G_T S + sum_j e^(G_T - G_j) k_j u_j^T``.

    Tokens whose ``written`` and ``g`` are 0 change nothing.
    """
    onwards = jnp.flip(jnp.cumsum(jnp.flip(g, 1), axis=1), 1)  # from each token on, its own decay included
    after = jnp.concatenate([onwards[:, 1:], jnp.zeros_like(g[:, :1])], axis=1)
    weighed = written * jnp.exp(after)[..., None]
    return state * jnp.exp(onwards[:, 0])[..., None, None] + jnp.einsum("BTGK,BTGRV->BGRKV", k, weighed)


def causal_convolution(
    window: Float[Array, "B before W"],
    rows: Float[Array, "B T W"],
    kernel: Float[Array, "taps W"],
    lineage: Int[Array, "B T taps"] | None = None,
) -> Float[Array, "B T W"]:
    """A short convolution over time, channel by channel; the last tap is the current row. ``window`` holds the
    ``taps - 1`` rows before.

    Args:
        lineage: of a tree, see :func:`dflash_jax.tree.lineage`; None: every row follows the one before it.
    """
    full = jnp.concatenate([window, rows], axis=1)
    if lineage is None:
        shifted = (full[:, tap : tap + rows.shape[1]] * kernel[tap] for tap in range(kernel.shape[0]))
    else:
        place = lineage + window.shape[1]
        batch = jnp.arange(rows.shape[0])[:, None]
        shifted = (full[batch, place[:, :, tap]] * kernel[tap] for tap in range(kernel.shape[0]))
    return sum(shifted, jnp.zeros_like(rows))


def unit(x: Float[Array, "*batch K"], eps: float = 1e-6) -> Float[Array, "*batch K"]:
    """``x * rsqrt(sum(x**2) + eps)``: length one (``l2norm`` of transformers)."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)

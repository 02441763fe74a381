"""What taking back rejected tokens costs a recurrent layer: three journals, by block size and batch.

    python -m experiments.ablate_rollback                       # a layer of Qwen3.5-35B-A3B
    python -m experiments.ablate_rollback --blocks 4 8 --batches 1 4 --json rollback.json

Protocol: one GatedDeltaNet layer's memory (no projections), random tokens in float32. A round resumes at a random count
of the last block (what was kept of it), hears the next block and records it; rounds run inside one compiled loop with
the memory updated in place, as in decoding. The methods take turns; medians over ``--repeats``, compile time excluded.
"no journal" is the recurrence alone.
"""

import json
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from checkpoints.safetensors_file import write_text
from dflash_jax import delta, recurrence
from dflash_jax.recurrence import JOURNALS, Recurrence, Sizes
from experiments.machine import describe


@dataclass(frozen=True)
class Args:
    """Time and bytes of the rollback methods."""

    blocks: tuple[int, ...] = (4, 8, 16)
    """tokens per verification"""
    batches: tuple[int, ...] = (1, 4)
    """rows side by side"""
    key_heads: int = 16
    """key heads of the layer"""
    value_heads: int = 32
    """value heads, a multiple of the key heads"""
    head_dim: int = 128
    """width of a key and of a value head"""
    taps: int = 4
    """of the short convolution"""
    rounds: int = 8
    """rounds in one timed call"""
    repeats: int = 5
    """timed calls of each method"""
    json: Path | None = None
    """write the figures here, too"""


def random_tokens(key: jax.Array, batch: int, block: int, sizes: Sizes) -> delta.Tokens:
    """Unit keys, decays between 0.5 and 1."""
    keys = jax.random.split(key, 5)
    head = (batch, block, sizes.key_heads)
    return delta.Tokens(
        q=delta.unit(jax.random.normal(keys[0], (*head, sizes.key_dim))) * sizes.key_dim**-0.5,
        k=delta.unit(jax.random.normal(keys[1], (*head, sizes.key_dim))),
        v=jax.random.normal(keys[2], (*head, sizes.repeat, sizes.value_dim)),
        g=-jax.random.uniform(keys[3], (*head, sizes.repeat), maxval=0.7),
        beta=jax.random.uniform(keys[4], (*head, sizes.repeat)),
    )


@partial(jax.jit, static_argnames="rounds", donate_argnums=0)
def run(
    memory: Recurrence, length: jax.Array, tokens: delta.Tokens, rows: jax.Array, kept: jax.Array, rounds: int
) -> tuple[Recurrence, jax.Array, jax.Array]:
    """Rounds of resume, hear, record; ``kept`` int32 ``[rounds B]``. The sum keeps every output alive."""

    def one(turn, carry):
        memory, length, total = carry
        state, window = recurrence.resume(memory, length)
        read = recurrence.hear(memory, state, tokens)
        memory = recurrence.record(memory, length, state, window, rows, tokens, read)
        return memory, length + kept[turn], total + read.out.sum()

    return jax.lax.fori_loop(0, rounds, one, (memory, length, jnp.zeros((), jnp.float32)))


@partial(jax.jit, static_argnames="rounds", donate_argnums=0)
def run_without(state: jax.Array, tokens: delta.Tokens, rounds: int) -> tuple[jax.Array, jax.Array]:
    """The recurrence alone."""

    def one(turn, carry):
        read = delta.gated_delta(carry[0], tokens)
        return read.state, carry[1] + read.out.sum()

    return jax.lax.fori_loop(0, rounds, one, (state, jnp.zeros((), jnp.float32)))


def measure(args: Args, batch: int, block: int) -> dict:
    """Seconds of a round and bytes of a layer's memory, per method."""
    sizes = Sizes(
        key_heads=args.key_heads,
        repeat=args.value_heads // args.key_heads,
        key_dim=args.head_dim,
        value_dim=args.head_dim,
        taps=args.taps,
        channels=(2 * args.key_heads + args.value_heads) * args.head_dim,
    )
    key = jax.random.key(0)
    tokens = random_tokens(key, batch, block, sizes)
    rows = jax.random.normal(key, (batch, block, sizes.channels))
    kept = jax.random.randint(key, (args.rounds, batch), 0, block + 1, jnp.int32)
    wide = jnp.dtype("float32")
    memories = {
        method: recurrence.init_recurrence(batch, sizes, undo=block, dtype=wide, wide=wide, method=method)
        for method in JOURNALS
    }
    lengths = dict.fromkeys(JOURNALS, jnp.zeros(batch, jnp.int32))
    state = jnp.zeros((batch, *sizes.state), wide)
    seconds: dict[str, list[float]] = {method: [] for method in (*JOURNALS, "rest")}
    for turn in range(args.repeats + 1):
        for method in JOURNALS:
            started = time.perf_counter()
            memory, length, total = run(memories[method], lengths[method], tokens, rows, kept, args.rounds)
            jax.block_until_ready((memory, total))
            memories[method], lengths[method] = memory, length
            seconds[method] += [(time.perf_counter() - started) / args.rounds] if turn else []
        started = time.perf_counter()
        state, total = jax.block_until_ready(run_without(state, tokens, args.rounds))
        seconds["rest"] += [(time.perf_counter() - started) / args.rounds] if turn else []
    return {
        "batch": batch,
        "block": block,
        "seconds": {method: statistics.median(each) for method, each in seconds.items()},
        "spread": {method: [min(each), max(each)] for method, each in seconds.items()},
        "bytes": {method: sum(leaf.nbytes for leaf in jax.tree.leaves(memory)) for method, memory in memories.items()},
        "state_bytes": state.nbytes,
    }


def show(rows: list[dict], console: Console) -> None:
    """One line per block size and batch."""
    table = Table(title="a round of one GatedDeltaNet layer: median ms, and MB of its memory", box=None)
    for column in ("batch", "block", *JOURNALS, "no journal", *(f"{method} MB" for method in JOURNALS), "state MB"):
        table.add_column(column, justify="right")
    for row in rows:
        times = [f"{row['seconds'][method] * 1e3:.2f}" for method in (*JOURNALS, "rest")]
        sizes = [f"{row['bytes'][method] / 1e6:.1f}" for method in JOURNALS]
        table.add_row(str(row["batch"]), str(row["block"]), *times, *sizes, f"{row['state_bytes'] / 1e6:.1f}")
    console.print(table)
    widest = max(most / least for row in rows for least, most in row["spread"].values())
    console.print(f"slowest over fastest repeat of one figure: at most {widest:.2f}")
    fastest = {min(JOURNALS, key=row["seconds"].get) for row in rows}
    console.print(
        f"fastest everywhere: {', '.join(fastest)}" if len(fastest) == 1 else "no method is fastest everywhere"
    )


def _command() -> str:
    return shlex.join(["python", "-m", "experiments.ablate_rollback", *sys.argv[1:]])


def main(args: Args) -> None:
    rows = [measure(args, batch, block) for batch in args.batches for block in args.blocks]
    show(rows, Console(width=110))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_text(
            args.json, json.dumps({"command": _command(), "machine": asdict(describe()), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main(tyro.cli(Args))

# %% [markdown]
# # Taking tokens back: attention, and three ways for a recurrent state
#
# **After this notebook you can decide:** what your caches need so that rejected drafts leave no trace, and which
# journal to keep for a recurrent layer: which is fast, which is small, and what each costs at your block size.
#
# A verification hears drafts that may be rejected. Afterwards the target must be as if it had never heard them. The
# pair here is `tiny-qwen3.5-moe`: most of its layers are GatedDeltaNet, which keeps a *state*, the others attention
# with keys and values.

# %%
from dataclasses import replace

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from tokenizers import Tokenizer

from checkpoints.load import load_drafter, load_target
from dflash_jax import recurrence
from dflash_jax.accept import argmax_draft
from dflash_jax.cache import Slots, rollback
from dflash_jax.recurrence import JOURNALS, Recurrence
from experiments import ablate_rollback
from experiments.pair import PAIRS
from experiments.prompts import encode, of_split, read_rows

plt.rcParams.update({"figure.dpi": 90, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})

PAIR, ROWS, BLOCK = "tiny-qwen3.5-moe", 8, 8
drafter, draft_params = load_drafter(PAIRS / f"{PAIR}-dflash", PAIRS / PAIR)
target, params = load_target(PAIRS / PAIR, taps=drafter.config.taps)
tokenizer = Tokenizer.from_file(str(PAIRS / PAIR / "tokenizer.json"))
rows = of_split(read_rows(PAIRS / "tiny-gpt-oss" / "prompts.jsonl"), "modeling")
prompts = encode(rows, tokenizer, None)[:ROWS]
layers = target.init_cache(1, 256, BLOCK).layers
print("layers:", " ".join("state" if isinstance(layer, Recurrence) else "keys+values" for layer in layers))

# %% [markdown]
# ## A verification, and what is kept of it
#
# Every prompt but for its last 8 tokens is heard, then those 8 in one step, as a verification would. Then all is taken
# back but the first n. What should the target say next? To know, a second cache hears just those n tokens, one by one.

# %%
step, unembed = jax.jit(target.step), jax.jit(target.unembed)
tokens = jnp.array(prompts)
blocks = [tokens[:, at : at + BLOCK] for at in range(0, tokens.shape[1], BLOCK)]
last = blocks[-1]

start = target.init_cache(ROWS, 256, BLOCK)
for block in blocks[:-1]:
    start = step(params, block, start).cache
verified = step(params, last, start).cache


def says_next(cache):
    """Log-probabilities of what follows one more token."""
    logits = unembed(params, step(params, last[:, -1:], cache).hidden)[:, 0]
    logits = np.asarray(logits, np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


truth, one_by_one = [says_next(start)], start
for place in range(BLOCK):
    one_by_one = step(params, last[:, place : place + 1], one_by_one).cache
    truth.append(says_next(one_by_one))
print(f"{ROWS} rows; lengths: before {start.length[0]}, after the verification {verified.length[0]}")

# %% [markdown]
# ## Keys and values: `length` is the only truth
#
# A position's key and value lie in a slot of their own. Whoever looks, looks only at slots below `length`; the next
# step writes over the rest. So forgetting is one number. To be sure that nothing else is read, the slots behind
# `length` are filled with rubbish here.


# %%
def with_rubbish(cache):
    """Everything past ``length`` in keys and values replaced by large numbers."""

    def spoil(layer):
        if not isinstance(layer, Slots):
            return layer
        behind = (jnp.arange(layer.k.shape[2]) >= cache.length[:, None])[:, None, :, None]
        return layer.replace(k=jnp.where(behind, 1e4, layer.k), v=jnp.where(behind, 1e4, layer.v))

    return cache.replace(layers=tuple(map(spoil, cache.layers)))


def rolled_back(kept):
    return rollback(verified, start.length + kept)


print(f"{'kept':>4}  {'largest change by the rubbish':32}{'largest difference from the truth'}")
for kept in range(BLOCK + 1):
    clean, spoilt = says_next(rolled_back(kept)), says_next(with_rubbish(rolled_back(kept)))
    print(f"{kept:4}  {np.abs(spoilt - clean).max():<32.1e}{np.abs(clean - truth[kept]).max():.1e}")

# %% [markdown]
# The last column is rounding of float32: the widths of the steps differ. It also holds for the recurrent layers, which
# is the point of what follows: on their own they could not do this.
#
# ## A state cannot forget
#
# A recurrent state is one matrix per head into which every token is added; there is no slot to ignore. What if an
# engine moves `length` back and leaves the state as it is after the verification? Made so on purpose:


# %%
def with_stale_state(cache):
    """The same cache, its recurrent states as they are after the whole verification."""

    def stale(layer):
        if not isinstance(layer, Recurrence):
            return layer
        taps = target.config.memory.taps
        state, window = recurrence.resume(layer, verified.length)
        return layer.replace(state=state, base=cache.length, rows=layer.rows.at[:, : taps - 1].set(window))

    return cache.replace(layers=tuple(map(stale, cache.layers)))


def divergence(logs, others):
    """Kullback-Leibler divergence of each row, in nats, and whether the likeliest token changed."""
    return (np.exp(logs) * (logs - others)).sum(-1), logs.argmax(-1) != others.argmax(-1)


rejected = np.arange(BLOCK + 1)[::-1]
wrong = [divergence(truth[kept], says_next(with_stale_state(rolled_back(kept)))) for kept in range(BLOCK + 1)]
right = [divergence(truth[kept], says_next(rolled_back(kept))) for kept in range(BLOCK + 1)]

figure, (left, flips) = plt.subplots(1, 2, figsize=(8, 3.2), constrained_layout=True)
for name, found, colour in (("stale state", wrong, "#c04030"), ("journal", right, "#4878a8")):
    mean = [max(each.mean(), 1e-12) for each, _ in found]
    left.semilogy(rejected, mean, marker="o", color=colour, label=name)
    flips.plot(rejected, [100 * flipped.mean() for _, flipped in found], marker="o", color=colour, label=name)
left.set(xlabel="rejected tokens", ylabel="mean KL from the truth (nats)", title="Next distribution")
flips.set(xlabel="rejected tokens", ylabel="rows whose argmax changed (%)", title="Next token", ylim=(-4, 104))
left.legend(frameon=False)
for axis in (left, flips):
    axis.grid(alpha=0.3)
plt.show()
print(f"Figure 1. {ROWS} rows, one verification of {BLOCK}. What is below 1e-12 is drawn there.")

# %% [markdown]
# One verification is enough to see it, and nothing raises. In a long text it happens every round.
#
# ## Three journals
#
# So the state that is kept is an *old* one, and the newest step's writes wait in a journal beside it. The next step
# reads from `length` how many of them count, and absorbs exactly those. Rolling back stays one number.
#
# | journal | keeps of each token | takes in n tokens by |
# |---|---|---|
# | `solve` | its key and its solved write u | one masked sum of outer products |
# | `replay` | its key, value, decay and strength | running the recurrence again over them |
# | `states` | the whole state after it | picking one |
#
# The text must not depend on which one is used. Rounds as in notebook 01, for all rows at once, each with an accepted
# count of its own:

# %%
ROUNDS = 12
absorb = jax.jit(drafter.absorb)


@jax.jit
def draft(anchor, draft_cache):
    return drafter.propose(draft_params, target, params, anchor, draft_cache, argmax_draft).tokens


def decode(method):
    """Tokens of every row, after the same number of rounds."""
    keeping = replace(target, module=target.module.clone(method=method))
    hear = jax.jit(keeping.step)
    cache, draft_cache = (network.init_cache(ROWS, 256, BLOCK) for network in (keeping, drafter))
    for block in blocks:
        out = hear(params, block, cache)
        cache = out.cache
        draft_cache = absorb(draft_params, out.features, jnp.full(ROWS, BLOCK), draft_cache)
    anchor = jnp.argmax(unembed(params, out.hidden), axis=-1)[:, -1]
    texts, kept = [[] for _ in range(ROWS)], []
    for _ in range(ROUNDS):
        proposal = jnp.concatenate([anchor[:, None], draft(anchor, draft_cache)], axis=1)
        out = hear(params, proposal, cache)
        own = jnp.argmax(unembed(params, out.hidden), axis=-1)
        count = 1 + jnp.cumprod(proposal[:, 1:] == own[:, :-1], axis=1).sum(1)
        cache = rollback(out.cache, cache.length + count)
        draft_cache = absorb(draft_params, out.features, count, draft_cache)
        for row, text in enumerate(texts):
            text += proposal[row, : count[row]].tolist()
        anchor = own[jnp.arange(ROWS), count - 1]
        kept += count.tolist()
    return texts, kept


found = {method: decode(method) for method in JOURNALS}
reference, _ = found["solve"]
for method, (texts, kept) in found.items():
    same = sum(a == b for a, b in zip(texts, reference, strict=True))
    print(f"{method:8} {len(kept)} verifications kept {min(kept)} to {max(kept)} tokens; ", end="")
    print(f"{same} of {ROWS} texts as with solve")
    assert texts == reference

# %% [markdown]
# ## Bytes and time
#
# Measured for one layer of the size of Qwen3.5-35B-A3B (16 key heads, 32 value heads, width 128), one row, float32,
# random tokens, by the functions of `experiments.ablate_rollback`. A round resumes at a random count of the last block,
# hears the next one and records it. "no journal" is the recurrence alone: what a layer would cost if nothing were ever
# rejected.

# %%
args = ablate_rollback.Args(rounds=4, repeats=5)
sizes_of_block = (2, 4, 8, 16)
measured = [ablate_rollback.measure(args, batch=1, block=size) for size in sizes_of_block]

looks = {"solve": ("#4878a8", 8), "replay": ("#50c060", 4), "states": ("#c04030", 5), "rest": ("black", 4)}
figure, (times, memory) = plt.subplots(1, 2, figsize=(8, 3.4), constrained_layout=True)
for method, (colour, dot) in looks.items():
    label = "no journal" if method == "rest" else method
    style = dict(color=colour, marker="o", markersize=dot, linestyle="--" if method == "rest" else "-", label=label)
    times.plot(sizes_of_block, [1e3 * row["seconds"][method] for row in measured], **style)
    if method != "rest":
        beside = [(row["bytes"][method] - row["state_bytes"]) / 1e6 for row in measured]
        memory.plot(sizes_of_block, beside, **style)
memory.axhline(measured[0]["state_bytes"] / 1e6, color="black", linestyle=":", label="the state itself")
times.set(xlabel="block size (tokens)", ylabel="median time of a round (ms)", title="Time", ylim=(0, None))
memory.set(xlabel="block size (tokens)", ylabel="journal (MB per row and layer)", title="Memory")
memory.set(yscale="log", ylim=(0.1, 300))
for axis in (times, memory):
    axis.set_xticks(sizes_of_block)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=9, loc="upper left")
plt.show()
print("Figure 2. One layer of Qwen3.5-35B-A3B's size, float32, one row. Left: resume, hear, record. Right: what is")
print("kept beside the state, with the convolution's rows.")

# %%
print(f"{'block':>5}" + "".join(f"{method:>12}" for method in JOURNALS) + "   above no journal; bytes beside the state")
for row in measured:
    rest = row["seconds"]["rest"]
    times = "".join(f"{100 * (row['seconds'][method] / rest - 1):+11.0f}%" for method in JOURNALS)
    kept = ", ".join(f"{method} {(row['bytes'][method] - row['state_bytes']) / 1e6:.2f} MB" for method in JOURNALS)
    print(f"{row['block']:5}{times}   {kept}")
spread = max(most / least for row in measured for least, most in row["spread"].values())
fastest = [min(JOURNALS, key=row["seconds"].get) for row in measured]
print(f"fastest per block size: {', '.join(fastest)}; slowest over fastest repeat: up to {spread:.2f}")

# %% [markdown]
# ## What to take away
#
# * Keys and values: a slot per position, masks by `length`, no undo code at all. (A sliding window in a ring needs a
#   few more slots than its window; `dflash_jax/cache.py` says how many.)
# * Recurrent layers: never advance the kept state by tokens that may be rejected; keep the old state and a journal.
# * `states` pays a whole state for each token of the block; `solve` and `replay` pay a few vectors. Times on a quiet
#   machine, with batches: `python -m experiments.ablate_rollback`.

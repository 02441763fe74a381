# %% [markdown]
# # How block drafting works, by hand
#
# **After this notebook you can decide:** whether a drafter that guesses a whole block at once fits your decoding loop:
# what it needs from the target, what one round costs you in state, and what you must take back when it guesses wrong.
#
# One round is five verbs: **draft, verify, accept, roll back, absorb**. Here they are called one at a time, on blocks
# of 8 tokens, with the pair `tiny-gpt-oss` + `tiny-gpt-oss-dflash` that lies in this repository. The compiled loop
# (`dflash_jax/speculate.py`, `spec_step`) does the same five things; the last section compares.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from tokenizers import Tokenizer

from checkpoints.load import load_drafter, load_target
from dflash_jax import metrics
from dflash_jax.accept import argmax_draft
from dflash_jax.cache import rollback
from dflash_jax.generate import Decoder
from experiments.pair import PAIRS
from experiments.prompts import encode, of_split, read_rows

plt.rcParams.update({"figure.dpi": 90, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})

drafter, draft_params = load_drafter(PAIRS / "tiny-gpt-oss-dflash", PAIRS / "tiny-gpt-oss")
target, params = load_target(PAIRS / "tiny-gpt-oss", taps=drafter.config.taps)
tokenizer = Tokenizer.from_file(str(PAIRS / "tiny-gpt-oss" / "tokenizer.json"))
rows = of_split(read_rows(PAIRS / "tiny-gpt-oss" / "prompts.jsonl"), "modeling")
prompts = encode(rows, tokenizer, None)
size = drafter.block_size


def words(ids) -> list[str]:
    """Each token as text, with its spaces visible."""
    return [tokenizer.decode([int(token)]).replace("\n", "⏎").replace(" ", "·") for token in np.ravel(ids)]


print(f"block of {size} tokens: the anchor and {size - 1} drafts")
print(f"the drafter has {drafter.config.layers} layers, the target {target.config.layers}")
print(f"it reads the target's residual stream after layers {drafter.config.taps}")

# %% [markdown]
# ## The prompt
#
# Text that neither model was trained on, without a chat template.

# %%
prompt = prompts[5]
print(rows[5].text)
print(f"\n{len(prompt)} tokens, the last ten: {words(prompt[-10:])}")

# %% [markdown]
# ## Hear the prompt
#
# The target hears all of it in one step. Two things come out besides its memory: the hidden row of the last token, from
# which the first new token follows, and the *features*: the residual stream at the drafter's taps. The drafter takes in
# the features of everything that the target has heard, once, and keeps keys and values of them.
#
# The first token is said but nobody has heard it yet. Such a token is called the **anchor**.

# %%
step, absorb = jax.jit(target.step), jax.jit(drafter.absorb)
unembed = jax.jit(target.unembed)

out = step(params, jnp.array([prompt]), target.init_cache(batch=1, capacity=256, undo=129))
cache = out.cache
draft_cache = absorb(
    draft_params, out.features, jnp.array([len(prompt)]), drafter.init_cache(batch=1, capacity=256, undo=129)
)
anchor = jnp.argmax(unembed(params, out.hidden[:, -1:]), axis=-1)[:, 0]

print(f"features: {out.features.shape} = rows, tokens, taps, width")
print(f"target has heard {int(cache.length[0])} tokens, drafter {int(draft_cache.length[0])}")
print(f"anchor: {words(anchor)}")

# %% [markdown]
# ## Draft
#
# The block goes in as the anchor and mask tokens; one forward pass gives a distribution for **every** masked position.
# No position waits for the one before it, and so none knows what the one before it will say: each column below is a
# guess about its own place alone. That is cheap, and it is why later drafts may not fit the ones before them.

# %%
draft_logits = jax.jit(lambda tokens, cache: drafter.logits(draft_params, target, params, tokens, cache))
masks = jnp.full((1, size - 1), drafter.config.mask_token_id)


def draft(anchor, draft_cache):
    """Distributions over the vocabulary for the places after the anchor."""
    return draft_logits(jnp.concatenate([anchor[:, None], masks], axis=1), draft_cache)


logits = draft(anchor, draft_cache)
q = np.asarray(jax.nn.softmax(logits, axis=-1))[0]
drafts = argmax_draft(logits).tokens
print("drafts:", words(drafts))


# %%
def show(q, title):
    """The likeliest tokens of every place."""
    best = np.argsort(-q, axis=-1)[:, :5]
    _, axis = plt.subplots(figsize=(8, 3.4), constrained_layout=True)
    axis.imshow(np.take_along_axis(q, best, axis=-1).T, cmap="Blues", vmin=0, vmax=1.6, aspect="auto")
    for place, ids in enumerate(best):
        for rank, token in enumerate(ids):
            axis.text(place, rank, f"{words(token)[0]}\n{q[place, token]:.2f}", ha="center", va="center", fontsize=9)
    axis.set(
        title=title,
        xlabel="place in the block (0 is the anchor)",
        ylabel="rank",
        xticks=range(len(q)),
        xticklabels=range(1, len(q) + 1),
        yticks=range(5),
        yticklabels=range(1, 6),
    )
    plt.show()


show(q, "The drafter's five likeliest tokens per place, with their probabilities")
print("Figure 1. One forward pass of the drafter. ·: a space, ⏎: a line break; the top row is what it proposes.")

# %% [markdown]
# ## Verify
#
# The target hears anchor and drafts in **one** step, as if they were text. Row j of its output says what *it* would say
# after the anchor and the first j drafts; so a single step checks all drafts, and the row after the last good draft
# already holds one more token of the target's own.

# %%
proposal = jnp.concatenate([anchor[:, None], drafts], axis=1)
out = step(params, proposal, cache)
own = np.asarray(jnp.argmax(unembed(params, out.hidden), axis=-1))[0]

print(f"{'place':>5}  {'heard':14}{'target would say':18}{'draft of that place':20}")
for place in range(size):
    guess = words(drafts)[place] if place < size - 1 else ""
    verdict = "" if not guess else ("agrees" if int(drafts[0, place]) == own[place] else "differs")
    print(f"{place:5}  {words(proposal)[place]:14}{words(own)[place]:18}{guess:20}{verdict}")

# %% [markdown]
# ## Accept
#
# Greedy decoding keeps the leading drafts that are the target's own choice, and then says the target's token. What
# stands *behind* the first wrong draft is worthless even where it agrees: the target said it about a text that will not
# exist.

# %%
right = np.asarray(drafts)[0] == own[:-1]
accepted = int(np.cumprod(right).sum())
said = [int(token) for token in drafts[0, :accepted]] + [int(own[accepted])]
print(f"{accepted} of {size - 1} drafts accepted, so one verification delivers {len(said)} tokens: {words(said)}")

# %% [markdown]
# ## Roll back
#
# The target has heard all 8 tokens, of which only the anchor and the accepted drafts are text. Forgetting the rest is
# one number, the cache's `length`; nothing is erased or copied. (Why that suffices for keys and values, and what a
# recurrent layer needs, is the subject of notebook 04.)

# %%
before = int(cache.length[0])
kept = accepted + 1
heard = out.cache
cache = rollback(heard, cache.length + kept)
print(f"length {before} -> {int(heard.length[0])} by the verification -> {int(cache.length[0])} after rolling back")
same = all(a is b for a, b in zip(jax.tree.leaves(heard.layers), jax.tree.leaves(cache.layers), strict=True))
print(f"keys and values are the very same arrays: {same}")

# %% [markdown]
# ## Absorb
#
# The verification computed features of the tokens it heard, so the drafter learns what became of its block for free. It
# takes in as many rows as were kept. The block's own keys and values were never stored: what is never written needs no
# undo. The token said last is the next anchor.

# %%
draft_cache = absorb(draft_params, out.features, jnp.array([kept]), draft_cache)
anchor = jnp.array([said[-1]])
text = [int(token) for token in proposal[0, :1]] + said
print(f"target has heard {int(cache.length[0])} tokens, drafter {int(draft_cache.length[0])}")
print(f"new anchor: {words(anchor)}")
print(f"text so far: {tokenizer.decode(text)!r}")

# %% [markdown]
# ## More rounds
#
# The same lines again, until 48 tokens are said.

# %%
rounds = [len(said)]
while len(text) < 48:
    logits = draft(anchor, draft_cache)
    drafts = argmax_draft(logits).tokens
    proposal = jnp.concatenate([anchor[:, None], drafts], axis=1)
    out = step(params, proposal, cache)
    own = np.asarray(jnp.argmax(unembed(params, out.hidden), axis=-1))[0]
    accepted = int(np.cumprod(np.asarray(drafts)[0] == own[:-1]).sum())
    said = [int(token) for token in drafts[0, :accepted]] + [int(own[accepted])]
    cache = rollback(out.cache, cache.length + accepted + 1)
    draft_cache = absorb(draft_params, out.features, jnp.array([accepted + 1]), draft_cache)
    anchor = jnp.array([said[-1]])
    text += said
    rounds.append(len(said))
    print(f"round {len(rounds):2}: {accepted} accepted   {' '.join(words(said))}")

# %% [markdown]
# ## The compiled loop says the same
#
# `Decoder.generate` runs these rounds inside one `lax.while_loop`. And plain decoding, one token a step? It is the same
# loop with nothing proposed, and its text must be the same, too: that is what lossless means for greedy decoding.

# %%
decoder = Decoder(target, params, drafter, draft_params)
result = decoder.generate([prompt], max_new_tokens=48)
plain = Decoder(target, params).generate([prompt], max_new_tokens=48)
counts = result.counts[0].tolist()
print("tokens per round, by hand:", rounds)
print("tokens per round, Decoder:", counts, "(the last one is cut at 48 tokens)")
print("same text by hand:", text[:48] == result.tokens[0])
print("same text as plain decoding:", plain.tokens[0] == result.tokens[0])
print(f"verifications: {result.rounds}; plain steps for the same text: {plain.rounds}")
assert text[:48] == result.tokens[0] == plain.tokens[0]

# %% [markdown]
# ## How far do drafts stand?
#
# One prompt says little. Over several prompts: how many tokens a verification delivers, and how often a draft stands,
# given that all before it did.

# %%
results = [decoder.generate([each], max_new_tokens=48) for each in prompts[:16]]
counts = metrics.join([each.counts for each in results])
accepted = metrics.join([each.accepted for each in results])
shares = 100 * metrics.histogram(counts, size) / metrics.verifies(counts)
rates = metrics.conditional_rates(counts, accepted, size)
mean = metrics.acceptance_length(counts)

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), constrained_layout=True)
left.bar(range(1, size + 1), shares, color="#4878a8")
left.axvline(mean, color="#c04030", linestyle="--", label=f"mean {mean:.2f}")
left.set(xlabel="tokens that it delivers", ylabel="verifications (%)", title="Tokens per verification")
left.set_xticks(range(1, size + 1))
left.legend(frameon=False)
right.plot(range(1, size), rates, marker="o", color="#4878a8")
right.set(xlabel="draft", ylabel="share that stands", title="If all before it stood", ylim=(0, 1.05))
right.grid(alpha=0.3)
plt.show()
print(f"Figure 2. {len(results)} prompts, {metrics.verifies(counts)} verifications, {counts.sum()} tokens, greedy.")

# %% [markdown]
# ## What to take away
#
# * The drafter needs three things of the target: features at its taps, the embedding and the head. It has no vocabulary
#   of its own.
# * A round leaves two numbers to move, both caches' `length`, and one token to carry, the anchor.
# * The mean above is tokens per verification, not a speedup: a verification of 8 tokens costs more than a step of one.
#   How much more, and when that pays, is the subject of notebook 05.

# %% [markdown]
# # What lossless means, and how to lose it without noticing
#
# **After this notebook you can decide:** whether an engine's sampled speculative decoding may be called lossless, which
# three lines of code to read in order to find out, and which accept rule to use when you need the *same* text, not just
# the same law.
#
# An accept rule is lossless if the text has exactly the target's law, whatever the drafter proposes. Tests of quality
# do not see a small loss, so it is better proved: on a vocabulary of four tokens every case can be enumerated.

# %%
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from tokenizers import Tokenizer

from checkpoints.load import load_drafter, load_target
from dflash_jax.generate import Decoder
from dflash_jax.protocols import Draft
from dflash_jax.rules import ACCEPT
from dflash_jax.sampling import Dice, Sampling, distribution, seed_keys
from dflash_jax.settings import SamplingParams
from experiments.pair import PAIRS
from experiments.prompts import encode, of_split, read_rows

plt.rcParams.update({"figure.dpi": 90, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})

p = np.array([0.40, 0.32, 0.18, 0.10])  # the target's distribution at one position
q = np.array([0.50, 0.18, 0.20, 0.12])  # the drafter's
print("target ", p)
print("drafter", q)

# %% [markdown]
# ## The rule
#
# *Rejection* draws a draft d from q, accepts it with probability `min(1, p[d] / q[d])`, and otherwise draws from what p
# has and q has not, `(p - q)+`. The law of the token that is said follows by adding up all cases. In the code below the
# distribution that the draft **was drawn from** and the one that the rule **divides by** are two arguments. In a
# correct engine they are one and the same.


# %%
def normalised(mass):
    return mass / mass.sum()


def law_said(drawn_from, divided_by, p=p):
    """The exact law of the token said after one draft."""
    law = np.zeros(len(p))
    for d, chance_of_draft in enumerate(drawn_from):
        if chance_of_draft == 0:
            continue
        accept = min(1, p[d] / divided_by[d])
        law[d] += chance_of_draft * accept
        if accept < 1:
            law += chance_of_draft * (1 - accept) * normalised(np.maximum(p - divided_by, 0))
    return law


def variation(law, p=p):
    """Total variation: the largest difference that the two laws make for any event."""
    return 0.5 * np.abs(law - p).sum()


top_two = normalised(np.where(q >= np.sort(q)[-2], q, 0))
best = np.eye(len(q))[q.argmax()]
cases = {
    "right q": (q, q),
    "argmax, one-hot q": (best, best),
    "top-2 draw, raw q": (top_two, q),
    "argmax, softmax q": (best, q),
}
laws = {name: law_said(*case) for name, case in cases.items()}
print(f"{'drafts, and q of the rule':26}{'law of the token said':34}total variation from p")
for name, law in laws.items():
    print(f"{name:26}{np.array2string(law, precision=4, floatmode='fixed'):34}{variation(law):.4f}")
assert variation(laws["right q"]) < 1e-12 and variation(laws["argmax, one-hot q"]) < 1e-12

# %%
figure, axis = plt.subplots(figsize=(8, 3.4), constrained_layout=True)
width = 0.19
colours = ["#4878a8", "#8fb3d0", "#c04030", "#e09060"]
for i, ((name, law), colour) in enumerate(zip(laws.items(), colours, strict=True)):
    label = f"{name} (TV {variation(law):.3f})"
    axis.bar(np.arange(4) + (i - 1.5) * width, 100 * law, width, label=label, color=colour)
axis.hlines(100 * p, np.arange(4) - 0.42, np.arange(4) + 0.42, color="black", label="the target's law")
axis.set(
    xlabel="token",
    ylabel="probability (%)",
    title="Law of the token said, by what the rule divides by",
    xticks=range(4),
)
axis.legend(frameon=False, fontsize=9)
plt.show()
print("Figure 1. Blue: the rule divides by the distribution of the draw. Red: it divides by another one. Exact sums.")

# %% [markdown]
# Two ways to be right, two to be wrong:
#
# * **raw q after a filtered draw**: the drafter samples with top-k, top-p or another temperature, and the rule divides
#   by the unfiltered softmax.
# * **a softmax ratio for argmax drafts**: an argmax was not drawn from the softmax. Its q is certainty, so it must be
#   accepted with probability p[d], not p[d] / q[d].
#
# Nothing raises, and every token said is one that the target likes; but the rare tokens are gone, and more drafts are
# accepted, so that the mistake looks like a faster engine.

# %%
print(f"{'':26}{'share of drafts accepted':26}what the drafts' law allows at most")
for name, (drawn_from, divided_by) in cases.items():
    accepted = sum(d * min(1, a / b) for d, a, b in zip(drawn_from, p, divided_by, strict=True) if d)
    print(f"{name:26}{accepted:<26.3f}{np.minimum(p, drawn_from).sum():.3f}")

# %% [markdown]
# The last column is `sum(min(p, draw))`: no lossless rule accepts one draft more often. The wrong ones do.
#
# ## The shipped rule, with the same mistake made on purpose
#
# The sums above are this notebook's own. Here `ACCEPT["rejection"]` of `dflash_jax` judges drafts in many rows at once.
# First it chooses the drafts itself (the rule holds both ends, so that the two distributions cannot differ), then it is
# given wrong ones.

# %%
ROWS = 100_000
seeds = jnp.stack([jnp.zeros(ROWS, jnp.uint32), jnp.arange(ROWS, dtype=jnp.uint32)], axis=1)
dice = Dice(seed_keys(seeds), jnp.zeros(ROWS, jnp.int32))
plain = Sampling(*(jnp.full(ROWS, value) for value in (1.0, 0, 1.0, 0.0)))
target_logits = jnp.broadcast_to(jnp.log(jnp.asarray(p)), (ROWS, 2, 4))  # one draft, and the position after it
drafter_logits = jnp.broadcast_to(jnp.log(jnp.asarray(q)), (ROWS, 1, 4))
rule = ACCEPT["rejection"]


@jax.jit
def said(dice, draft, logits, sampling):
    """The first token of each row's round: the draft if it stands, else the rule's token."""
    verdict = rule(dice, draft, logits, sampling)
    return jnp.where(verdict.accepted > 0, draft.tokens[:, 0], verdict.token)


right = jax.jit(rule.choose)(dice, drafter_logits, plain)
filtered = distribution(drafter_logits, plain.replace(top_k=jnp.full(ROWS, 2)))
wrong = Draft(tokens=dice.drafts(filtered), q=right.q)
argmaxes = Draft(tokens=jnp.full((ROWS, 1), int(q.argmax())), q=right.q)
error = 0.5 * np.sqrt(p * (1 - p) / ROWS).sum()
for name, draft in {"right q": right, "top-2 draw, raw q": wrong, "argmax, softmax q": argmaxes}.items():
    shares = np.bincount(np.asarray(said(dice, draft, target_logits, plain)), minlength=4) / ROWS
    exact = variation(shares, laws[name])
    print(f"{name:20} counted {variation(shares):.4f} from p, {exact:.4f} from the exact law above")
    assert exact < 4 * error
print(f"{ROWS:,} rows; the noise of a count is about {error:.4f}")

# %% [markdown]
# ## A small loss per token is a large one per text
#
# Total variation of a whole text of n tokens (every position like the one above, exact sums over all texts):


# %%
def text_law(law, n):
    """Law of texts of n independent tokens, flat."""
    whole = np.ones(1)
    for _ in range(n):
        whole = np.outer(whole, law).ravel()
    return whole


lengths = range(1, 10)
figure, axis = plt.subplots(figsize=(6, 3), constrained_layout=True)
for name, colour in (("top-2 draw, raw q", "#c04030"), ("argmax, softmax q", "#e09060"), ("right q", "#4878a8")):
    apart = [variation(text_law(laws[name], n), text_law(p, n)) for n in lengths]
    axis.plot(lengths, apart, marker="o", color=colour, label=name)
axis.set(xlabel="length of the text (tokens)", ylabel="total variation", title="How far the law of a text is off")
axis.set_ylim(-0.03, 1)
axis.grid(alpha=0.3)
axis.legend(frameon=False)
plt.show()
print("Figure 2. 0: nobody can tell the texts apart. 1: no text of one law is a text of the other. Exact sums.")

# %% [markdown]
# ## Block verification accepts more, and loses nothing
#
# Rejection judges draft by draft. Block verification (arXiv 2403.10444) judges prefixes: a draft that was lucky lends
# some of its luck to the next one. Enumerated for two drafts of four tokens: the target's second distribution depends
# on the first token, the drafter's does not, as in a block drafter.


# %%
def outcomes(p1, p2, q1, q2, by_block):
    """Mean accepted drafts, and the exact law of two tokens; what the round does not say is drawn from p."""
    mean, law = 0.0, np.zeros((4, 4))
    for d1, d2 in product(range(4), range(4)):
        w1 = min(1, p1[d1] / q1[d1])
        if by_block:
            w2 = min(1, w1 * p2[d1, d2] / q2[d2])
            left = np.maximum(w1 * p2[d1] - q2, 0)
            h1 = 1 if w1 >= 1 else left.sum() / (left.sum() + 1 - w1)
            both, one = w2, (1 - w2) * h1  # the longest prefix that stands
        else:
            left = np.maximum(p2[d1] - q2, 0)
            both = w1 * min(1, p2[d1, d2] / q2[d2])
            one = w1 - both
        chance = q1[d1] * q2[d2]
        mean += chance * (2 * both + one)
        law[d1, d2] += chance * both
        if one > 0:
            law[d1] += chance * one * normalised(left)
        none = 1 - both - one
        if none > 1e-15:
            law += chance * none * normalised(np.maximum(p1 - q1, 0))[:, None] * p2
    return mean, law


numbers = np.random.default_rng(0)
found = []
for _ in range(400):
    p1, q1, q2 = numbers.dirichlet(np.ones(4), 3)
    p2 = numbers.dirichlet(np.ones(4), 4)
    results = [outcomes(p1, p2, q1, q2, by_block) for by_block in (False, True)]
    found.append([mean for mean, _ in results])
    for _, law in results:
        assert np.abs(law - p1[:, None] * p2).max() < 1e-12
by_draft, by_block = np.array(found).T

figure, axis = plt.subplots(figsize=(4.6, 4), constrained_layout=True)
axis.scatter(by_draft, by_block, s=9, color="#4878a8", alpha=0.6)
axis.plot([0, 2], [0, 2], color="black", linewidth=1)
axis.set(xticks=[0, 0.5, 1, 1.5, 2], yticks=[0, 0.5, 1, 1.5, 2])
axis.set(
    xlabel="rejection: mean accepted drafts", ylabel="block: mean accepted drafts", title="Two drafts, exact", aspect=1
)
plt.show()
print(f"Figure 3. {len(found)} random pairs of target and drafter, both rules lossless to 1e-12 in all of them.")
print(f"block minus rejection: least {(by_block - by_draft).min():.1e}, mean {(by_block - by_draft).mean():.3f} drafts")

# %% [markdown]
# ## The same law, or the same text?
#
# With a seed, one can ask for more than the same law. The rule **match** lets the target draw its own token at every
# position, with dice that belong to seed and position, and accepts a draft only if it *is* that token. Then the text is
# the one that plain decoding draws with this seed, and no q is divided by at all. Shown with a shipped pair:

# %%
folder = PAIRS / "tiny-glm4-moe"
drafter, draft_params = load_drafter(PAIRS / "tiny-glm4-moe-dflash", folder)
target, params = load_target(folder, taps=drafter.config.taps)
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
rows = of_split(read_rows(PAIRS / "tiny-gpt-oss" / "prompts.jsonl"), "modeling")
prompts = encode(rows, tokenizer, None)[:4]

alone = Decoder(target, params, rule=ACCEPT["match"])
speculative = Decoder(target, params, drafter, draft_params, rule=ACCEPT["match"])
sampling = [SamplingParams(temperature=0.8, top_p=0.95, seed=row) for row in range(len(prompts))]
wanted = alone.generate(prompts, 48, sampling=sampling)
matched = speculative.generate(prompts, 48, sampling=sampling)
rejected = replace(speculative, rule=ACCEPT["rejection"]).generate(prompts, 48, sampling=sampling)


def first_difference(a, b):
    return next((place for place, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)


print(f"{'seed':>4}  {'match = plain':15}{'rejection first differs at token'}")
for row in range(len(prompts)):
    where = first_difference(rejected.tokens[row], wanted.tokens[row])
    print(f"{row:4}  {matched.tokens[row] == wanted.tokens[row]!s:15}{'nowhere' if where is None else where}")
print(f"rounds for 4 texts of 48 tokens: plain {wanted.rounds}, match {matched.rounds}, rejection {rejected.rounds}")
assert matched.tokens == wanted.tokens

# %% [markdown]
# The texts of *rejection* are other draws of the same law (figure 1, first row of the table), so they cannot be held
# against plain decoding one by one; those of *match* can, and every engine that claims this may be tested so.
#
# ## What to take away
#
# * Ask an engine: what was the draft drawn from, and is *that array* the q of the ratio and of the residual?
# * Argmax drafts have a one-hot q. `match` avoids the question: it has no q.
# * "Lossless" says nothing about rounding, which can flip near-ties in low precision, nor about whether the target
#   itself is computed rightly: [docs/lossless.md](../../docs/lossless.md).

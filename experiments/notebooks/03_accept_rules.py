# %% [markdown]
# # Which accept rule?
#
# **After this notebook you can decide:** which accept rule to decode with at your temperature, and whether the extra
# tokens of a lossy rule are worth what it does to the text.
#
# All rules of `dflash_jax.rules.ACCEPT`, three temperatures, one shipped pair, a few prompts: a small version whose
# figures are noisy. The study, with more prompts, all pairs and the parameters of the lossy rules: `python -m
# experiments.ablate_accept`.

# %%
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from tokenizers import Tokenizer

from checkpoints.load import load_drafter, load_target
from dflash_jax import metrics
from dflash_jax.generate import Decoder
from dflash_jax.generation import collect
from dflash_jax.rules import ACCEPT
from dflash_jax.sampling import distribution
from dflash_jax.settings import SamplingParams, packed, per_row
from dflash_jax.speculate import spec_step
from experiments.laboratory.rows import quotient
from experiments.pair import PAIRS
from experiments.prompts import encode, of_split, read_rows

plt.rcParams.update({"figure.dpi": 90, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})

PAIR, BUDGET, ROWS = "tiny-glm4-moe", 64, 12
TEMPERATURES = (0.0, 0.7, 1.0)

drafter, draft_params = load_drafter(PAIRS / f"{PAIR}-dflash", PAIRS / PAIR)
target, params = load_target(PAIRS / PAIR, taps=drafter.config.taps)
tokenizer = Tokenizer.from_file(str(PAIRS / PAIR / "tokenizer.json"))
rows = of_split(read_rows(PAIRS / "tiny-gpt-oss" / "prompts.jsonl"), "modeling")
prompts = encode(rows, tokenizer, None)[:ROWS]
print(f"{PAIR}, block {drafter.block_size}, {ROWS} prompts of {len(prompts[0])} tokens, {BUDGET} tokens each")
print(f"{'rule':15}{'lossless':10}{'for a seed, plain text':24}proposes")
for name, rule in ACCEPT.items():
    drawn = type(rule).choose is ACCEPT["rejection"].choose.__func__
    proposes = f"a tree of {rule.budget} nodes" if rule.budget else "a draw" if drawn else "the likeliest token"
    print(f"{name:15}{'yes' if rule.lossless else 'NO':10}{'yes' if rule.pathwise else 'no':24}{proposes}")

# %% [markdown]
# ## Run them
#
# Every run starts from the same prompts and the same first tokens, drawn by the target alone; then the rule takes over.
# `greedy` knows only the argmax, so it runs at temperature 0 alone.
#
# `Decoder(..., rule=rule).generate` would compile the whole loop for each rule. Here the round of
# `dflash_jax/speculate.py` runs as it stands, but its parts are compiled one by one, so that another rule compiles
# nothing but itself.

# %%
first = Decoder(target, params, drafter, draft_params, rule=ACCEPT["match"])
drafter_logits = jax.jit(
    lambda anchor, cache: drafter.propose(draft_params, target, params, anchor, cache, lambda logits: logits)
)
target_parts = SimpleNamespace(step=jax.jit(target.step), unembed=jax.jit(target.unembed))
drafter_parts = SimpleNamespace(
    block_size=drafter.block_size,
    absorb=jax.jit(drafter.absorb),
    propose=lambda weights, target, params, anchor, cache, choose: choose(drafter_logits(anchor, cache)),
)


class Compiled:
    """A rule, its two ends compiled."""

    def __init__(self, rule):
        self.choose, self.judge = jax.jit(rule.choose), jax.jit(rule.__call__)

    def __call__(self, *args):
        return self.judge(*args)


def settings(temperature):
    return [SamplingParams(temperature=temperature, seed=row) for row in range(ROWS)]


started = {temperature: first.start(prompts, BUDGET, sampling=settings(temperature)) for temperature in TEMPERATURES}


def run(rule, state):
    while not state.done.all():
        state = spec_step(target_parts, drafter_parts, rule, params, draft_params, state)
    return collect(state, ttft_s=0.0, decode_s=0.0)


runs = {}
for name, rule in ACCEPT.items():
    compiled = Compiled(rule)
    for temperature in TEMPERATURES if rule.samples else (0.0,):
        runs[name, temperature] = run(compiled, started[temperature])
by_prompt = {key: quotient(each.counts.sum(1), (each.counts > 0).sum(1)) for key, each in runs.items()}
lengths, errors = ({key: each[part] for key, each in by_prompt.items()} for part in (0, 1))

# %%
names = list(ACCEPT)
figure, axis = plt.subplots(figsize=(8, 3.5), constrained_layout=True)
for i, (temperature, colour) in enumerate(zip(TEMPERATURES, ("#28486a", "#4878a8", "#9dbfdd"), strict=True)):
    heights, bars = ([some.get((name, temperature), 0) for name in names] for some in (lengths, errors))
    style = dict(color=colour, label=f"temperature {temperature:g}", error_kw=dict(linewidth=0.8))
    axis.bar(np.arange(len(names)) + (i - 1) * 0.27, heights, 0.27, yerr=bars, **style)
edge = sum(rule.lossless for rule in ACCEPT.values()) - 0.5
axis.axvline(edge, color="black", linestyle="--", linewidth=1)
top = max(lengths.values())
axis.set_ylim(0, 1.5 * top)
axis.text(edge - 0.1, 1.22 * top, "lossless", ha="right")
axis.text(edge + 0.1, 1.22 * top, "lossy")
axis.set(ylabel="tokens per verification", title=f"{PAIR}: tokens per verification, by rule", xticks=range(len(names)))
widths = {name: rule.width(drafter.block_size) for name, rule in ACCEPT.items()}
axis.set_xticklabels([f"{name}\n({widths[name]} wide)" if rule.budget else name for name, rule in ACCEPT.items()])
axis.tick_params(axis="x", labelrotation=20)
axis.legend(frameon=False, fontsize=9, loc="upper left", ncols=3)
plt.show()
verified = [metrics.verifies(each.counts) for each in runs.values()]
print(
    f"Figure 1. {PAIR}, {ROWS} prompts of {BUDGET} tokens, {min(verified)} to {max(verified)} verifications a bar, no "
    f"repeats. 1 would be plain decoding. Lines: standard error over prompts. A verification of `tree` hears "
    f"{widths['tree']} tokens, of every other rule {drafter.block_size}."
)

# %% [markdown]
# At temperature 0 all lossless rules write one and the same text: target and drafter are certain, a draw is the argmax.
# The chains take the same rounds to it, `tree` takes fewer and wider ones. Above 0 they part. The next cell says how.

# %%
lossless = [name for name, rule in ACCEPT.items() if rule.lossless and rule.samples]
chains = [name for name in lossless if not ACCEPT[name].budget]
texts = {tuple(map(tuple, runs[name, 0.0].tokens)) for name in [*lossless, "greedy"]}
print(f"different texts of the lossless rules at temperature 0: {len(texts)}")
for temperature in TEMPERATURES[1:]:
    ranked = sorted(lossless, key=lambda name: -lengths[name, temperature])
    words = ", ".join(f"{name} {lengths[name, temperature]:.2f} ±{errors[name, temperature]:.2f}" for name in ranked)
    print(f"temperature {temperature:g}: {words}")
assert len(texts) == 1

# %% [markdown]
# Two effects pull against each other. Where the target is uncertain, a draft drawn from a similar distribution is
# accepted more often than the likeliest token. But a block drafter draws its positions independently of each other, so
# that several draws may not fit together. Which one wins depends on temperature, pair and text: measure it, on more
# texts than these. Differences within the errors above say nothing.
#
# Tokens per verification are not speed. The study's speeds on this pair, over plain decoding under the same settings:

# %%
study = json.loads((PAIRS.parents[1] / "experiments" / "results" / "ablate_accept.json").read_text())
speed = {(row["rule"], row["temperature"]): row["ratio"] for row in study["rows"] if row["pair"] == PAIR}
print(f"{'rule':15}" + "".join(f"{f'temperature {t:g}':>17}" for t in TEMPERATURES))
for name in names:
    ratios = "".join(f"{f'{speed[name, t]:.2f}x' if (name, t) in speed else '-':>17}" for t in TEMPERATURES)
    print(f"{name:15}{ratios}")
print(f"from: {study['command']}")
print("at temperature 0 match, one_hot, rejection and block say and accept what greedy does")

# %% [markdown]
# ## What a lossy rule gives up
#
# A lossy rule keeps a draft that the target finds *good enough*. Two measures, both by the target itself, which hears
# every text once more:
#
# * **Replaced tokens.** Where a lossy rule keeps draft d, the text says d for certain; the target would have said d
#   with probability p(d). So `1 - p(d)` is the chance that it would have said something else, and the mean over all
#   tokens of the text is the expected share of tokens that are not the target's own. (For one token it is the total
#   variation from p.) A lossless rule has 0: at temperature 0 that is counted below, above it is proved (notebook 02).
# * **Perplexity** of the text under the target at temperature 1: lower is what the target finds likelier. It says how
#   the text changed, not whether for better.


# %%
@jax.jit
def hear_again(tokens, sampling):
    """Of every token after the first: its log-probability, and its probability under the settings of the run."""
    logits = target.unembed(params, target.step(params, tokens, target.init_cache(ROWS, 256, 256)).hidden)[:, :-1]
    said = tokens[:, 1:, None]
    of_all = jax.nn.log_softmax(logits.astype(jnp.float32)), distribution(logits, sampling)
    return tuple(jnp.take_along_axis(each, said, axis=-1)[..., 0] for each in of_all)


def kept_drafts(counts, accepted):
    """For each token of one text, whether it is a draft that the rule kept."""
    mask = [False]  # the first comes from the prompt
    for count, stood in zip(counts, accepted, strict=True):
        mask += [place < stood for place in range(count)]
    return np.array(mask)


def given_up(name, temperature):
    out = runs[name, temperature]
    longest = max(len(prompt) for prompt in prompts) + BUDGET
    tokens = [(prompt + text + [0] * longest)[:longest] for prompt, text in zip(prompts, out.tokens, strict=True)]
    sampling, _ = packed(per_row(settings(temperature), ROWS))
    logs, chances = map(np.asarray, hear_again(jnp.array(tokens), sampling))
    scores, replaced = [], []
    for row, (prompt, text) in enumerate(zip(prompts, out.tokens, strict=True)):
        place = slice(len(prompt) - 1, len(prompt) - 1 + len(text))
        scores.append(logs[row, place])
        replaced.append(np.where(kept_drafts(out.counts[row], out.accepted[row]), 1 - chances[row, place], 0))
    return np.concatenate(scores), np.concatenate(replaced)


judged = {key: given_up(*key) for key in runs}
replaced = {key: 0.0 if ACCEPT[key[0]].lossless and key[1] else each[1].mean() for key, each in judged.items()}
print(f"{'rule':15}{'temperature':>11}{'tokens/verify':>15}{'perplexity':>12}{'replaced':>10}")
for (name, temperature), (scores, _) in judged.items():
    note = "" if not ACCEPT[name].lossless else "  proved" if temperature else "  counted"
    share = f"{100 * replaced[name, temperature]:.1f}%"
    perplexity = np.exp(-scores.mean())
    print(f"{name:15}{temperature:11g}{lengths[name, temperature]:15.2f}{perplexity:12.2f}{share:>10}{note}")
error = max(quotient(scores.reshape(ROWS, -1).sum(1), np.full(ROWS, BUDGET))[1] for scores, _ in judged.values())
print(f"standard error of a perplexity: up to {100 * error:.0f}% (over prompts)")
assert all(share == 0 for (name, _), share in replaced.items() if ACCEPT[name].lossless)

# %%
lossy = [name for name, rule in ACCEPT.items() if not rule.lossless]
figure, axes = plt.subplots(1, len(TEMPERATURES), figsize=(8.4, 3.1), sharey=True, constrained_layout=True)
for axis, temperature in zip(axes, TEMPERATURES, strict=True):
    best = max(lengths[name, temperature] for name in chains)
    axis.axhline(best, color="black", linestyle="--", linewidth=1, label="best lossless chain")
    for name, mark in zip(lossy, "o^s", strict=True):
        axis.plot(
            100 * replaced[name, temperature], lengths[name, temperature], mark, markersize=8, label=name, alpha=0.8
        )
    axis.set(title=f"temperature {temperature:g}", xlabel="replaced tokens (%)")
    axis.set_xlim(0, 1.15 * 100 * max(replaced.values()))
    axis.grid(alpha=0.3)
axes[0].set_ylabel("tokens per verification")
axes[0].set_ylim(1, None)
axes[0].legend(frameon=False, fontsize=9, loc="lower right")
plt.show()
print(
    f"Figure 2. {PAIR}, {ROWS} prompts: what the lossy rules buy, and the share of the text that they pay with. All "
    f"verifications are {drafter.block_size} tokens wide."
)

# %%
slower = [
    f"{name} at temperature {t:g}"
    for name in lossy
    for t in TEMPERATURES
    if lengths[name, t] < max(lengths[other, t] for other in chains)
]
print(f"lossy, and fewer tokens than the best lossless chain: {', '.join(slower) or 'none'}")
for temperature in TEMPERATURES:
    own = -judged["match", temperature][0].mean()
    lower = [name for name in lossy if -judged[name, temperature][0].mean() < own]
    print(f"temperature {temperature:g}: perplexity below that of match: {', '.join(lower) or 'none'}")

# %% [markdown]
# ## What to take away
#
# * Sampled decoding without loss: `block`, the default, or `match` where the text must be the one that plain decoding
#   says for the seed: it needs no q, and every token can be compared.
# * Rank the rules on your own pair and text: the order in the output above is that of one small drafter on source code.
# * A lossy rule is a trade of text for time. Look at the share of replaced tokens, not at perplexity alone: a text of
#   likeliest tokens can have a lower one than the target's own draws, and is still not what was asked for.

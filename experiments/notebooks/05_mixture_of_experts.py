# %% [markdown]
# # Why mixture-of-experts models are different
#
# **After this notebook you can decide:** how wide a block your mixture-of-experts target can afford, and from three
# measured numbers, before any tuning, whether speculation pays on it.
#
# A dense matrix is read once for a step, whether the step hears one token or eight. Experts are not: each token chooses
# its own few, and a verification reads the **union** of all choices. So a wide verification costs more than a step, and
# a block has to deliver more to pay. Here the union is measured on the three shipped pairs, then time, then the balance
# of both.

# %%
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from tokenizers import Tokenizer

from checkpoints.load import load_drafter, load_target
from dflash_jax import metrics
from dflash_jax.generate import Decoder
from dflash_jax.protocols import StepOut, Target
from experiments.pair import PAIRS, known_pairs
from experiments.prompts import encode, of_split, read_rows
from experiments.threads import first_cpus, pinned
from experiments.timing import StepTimer, target_steps

plt.rcParams.update({"figure.dpi": 90, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})

with pinned(first_cpus(1)):  # matrices this small are fastest on one thread, plain and speculative (docs/slower.md)
    jax.devices()

BUDGET, PROMPTS = 72, 12
tokenizer = Tokenizer.from_file(str(PAIRS / "tiny-gpt-oss" / "tokenizer.json"))  # all pairs have the same
rows = read_rows(PAIRS / "tiny-gpt-oss" / "prompts.jsonl")
prompts = {
    split: encode(of_split(rows, split), tokenizer, None)[:PROMPTS] for split in ("modeling", "library", "stdlib")
}

# %% [markdown]
# ## The union, measured
#
# `Generation.union` tells how many distinct experts a verification's tokens chose, per mixture layer. For the union of
# its first 1, 2, .. 8 tokens the target is wrapped: the loop asks a target only for what `protocols.py` says, so the
# wrapper may report each of these as if it were a layer of its own. The decoding itself is not touched: what a token
# chooses does not depend on the tokens after it. (A drafter that is asked for a smaller block may propose other tokens;
# `run_spec --block-size` measures that.)


# %%
@dataclass(frozen=True)
class ByWidth:
    """A target that reports the experts of the first 1, 2, .. ``widths`` tokens of a step, in layers of their own."""

    target: Target
    widths: int

    @property
    def mixture_layers(self) -> int:
        return self.target.mixture_layers * self.widths

    def step(self, params, tokens, cache, tree=None) -> StepOut:
        out = self.target.step(params, tokens, cache, tree)
        place = jnp.arange(tokens.shape[1])[:, None, None]
        first = [jnp.where(place < n, out.experts, out.experts[:, :1]) for n in range(1, self.widths + 1)]
        return out.replace(experts=jnp.concatenate(first, axis=2))

    def __getattr__(self, name):
        return getattr(self.target, name)


def load(name):
    drafter, draft_params = load_drafter(PAIRS / f"{name}-dflash", PAIRS / name)
    target, params = load_target(PAIRS / name, taps=drafter.config.taps)
    return Decoder(ByWidth(target, drafter.block_size), params, drafter, draft_params)


def decode(decoder, prompts):
    """One prompt at a time: a verification then reads for one text alone."""
    return [decoder.generate([prompt], BUDGET) for prompt in prompts]


def union_by_width(results, widths):
    """Mean experts per layer, of all rounds."""
    total = sum(each.union * each.rounds for each in results) / sum(each.rounds for each in results)
    return total.reshape(widths, -1).mean(axis=1)


decoders = {name: load(name) for name in known_pairs()}
size = next(iter(decoders.values())).drafter.block_size
results = {name: decode(decoder, prompts["modeling"]) for name, decoder in decoders.items()}
unions = {name: union_by_width(each, size) for name, each in results.items()}

# %% [markdown]
# Beside it three estimates. *Uniform*: every token draws its experts at random, `E (1 - (1 - K/E)^n)`. *Other texts*:
# real choices of tokens that have nothing to do with each other, one from here, one from there: what popular experts
# alone explain. *Its own text*: n neighbouring tokens of the text that came out.


# %%
def choices(decoder, prompts, results):
    """Experts ``[texts, tokens, M, K]`` of whole texts, prompt and output."""
    texts = jnp.array([prompt + each.tokens[0] for prompt, each in zip(prompts, results, strict=True)])
    target = decoder.target.target
    hear = jax.jit(lambda params, tokens: target.step(params, tokens, target.init_cache(len(texts), 256, 256)).experts)
    return np.asarray(hear(decoder.params, texts))


def distinct(experts):
    """Mean distinct experts per layer of ``[groups, n, M, K]``."""
    ids = np.sort(np.moveaxis(experts, 2, 1).reshape(len(experts), experts.shape[2], -1), axis=-1)
    return (1 + (np.diff(ids, axis=-1) != 0).sum(-1)).mean()


def neighbours(experts, n):
    at = range(experts.shape[1] - n)
    return distinct(np.concatenate([experts[:, i : i + n] for i in at]))


def strangers(experts, n, groups=600):
    every = experts.reshape(-1, *experts.shape[2:])
    return distinct(every[np.random.default_rng(0).integers(0, len(every), (groups, n))])


widths = np.arange(1, size + 1)
figure, axes = plt.subplots(1, 3, figsize=(9, 3.5), constrained_layout=True)
summary = []
for axis, (name, decoder) in zip(axes, decoders.items(), strict=True):
    experts, per_token = decoder.target.experts, decoder.target.config.experts_per_token
    chosen = choices(decoder, prompts["modeling"], results[name])
    curves = {
        "uniform": [metrics.uniform_union(experts, per_token, n) for n in widths],
        "other texts": [strangers(chosen, n) for n in widths],
        "its own text": [neighbours(chosen, n) for n in widths],
        "verification": unions[name],
    }
    for (label, values), style in zip(curves.items(), ("k:", "k--", "-", "o-"), strict=True):
        axis.plot(widths, values, style, label=label, markersize=4)
    axis.axhline(experts, color="gray", linewidth=0.8)
    axis.set(title=f"{name}\n{experts} experts, {per_token} per token", xlabel="tokens", xticks=widths)
    axis.set_ylim(0, 1.08 * experts)
    axis.grid(alpha=0.3)
    summary.append((name, curves, experts))
axes[0].set_ylabel("distinct experts per layer")
axes[0].legend(frameon=False, fontsize=9, loc="lower right")
plt.show()
print("Figure 1. Union of the experts of n tokens. Gray: all there are.")
for name, curves, experts in summary:
    words = ", ".join(f"{label} {values[-1]:.2f}" for label, values in curves.items())
    print(f"{name:17} {size} tokens of {experts} experts: {words}")

# %% [markdown]
# ## What the shapes of released models say
#
# Tiny pairs have few experts and are soon exhausted. For released models here is the uniform estimate alone, below
# which the measured unions above stay: the experts that a verification reads for each one of a plain step.

# %%
shapes = {"gpt-oss-20b": (32, 4), "GLM-4.7-Flash": (64, 4), "GLM-4.6": (160, 8), "Qwen3.5-35B-A3B": (256, 8)}
wide = np.arange(1, 17)
figure, axis = plt.subplots(figsize=(6.4, 3.3), constrained_layout=True)
for label, (experts, per_token) in shapes.items():
    reads = [metrics.uniform_union(experts, per_token, int(n)) / per_token for n in wide]
    axis.plot(wide, reads, label=f"{label} ({per_token} of {experts})")
axis.plot(wide, np.ones(len(wide)), "k:", label="dense")
axis.set(
    xlabel="tokens of a verification", ylabel="experts read / plain step", title="Uniform estimate", ylim=(0, None)
)
axis.grid(alpha=0.3)
axis.legend(frameon=False, fontsize=9)
plt.show()
print("Figure 2. Computed, not measured. Where reading experts is all that a step costs, this is what it costs.")

# %% [markdown]
# ## Time
#
# A round is a draft and a verification. `StepTimer` times both, and a plain step, half-way through a text, many steps
# per compiled call. For other widths the same program is compiled again. One pair; the others: `python -m
# experiments.run_spec --pair all`.

# %%
name = "tiny-gpt-oss"
decoder = decoders[name]
timer = StepTimer(decoder, prompts["modeling"][:1], results[name][0].tokens, BUDGET)
timed = [1, 2, 4, 5, size]
others = [width for width in timed if width not in (1, size)]


def steps_of(width):
    def program():
        timer.cache, said = target_steps(decoder.target, decoder.params, timer.blocks, timer.cache, width)
        return said

    return program


timer.programs += tuple(steps_of(width) for width in others)
timer.turn()  # compiles
timer.seconds.clear()
for _ in range(15):
    timer.turn()
step, widest, draft, *between = np.array(timer.seconds).T
verify = {1: step, size: widest} | dict(zip(others, between, strict=True))
ratio = {width: float(np.median(verify[width] / step)) for width in timed}
draft_ratio = float(np.median(draft / step))
even = {width: metrics.break_even(ratio[width] + draft_ratio, 1.0) for width in timed[1:]}

print(f"{'tokens':>6}{'median ms':>11}{'plain steps':>13}{'experts, plain = 1':>20}")
for width in timed:
    grown = unions[name][width - 1] / unions[name][0]
    print(f"{width:6}{1e3 * np.median(verify[width]):11.2f}{ratio[width]:13.2f}{grown:20.2f}")
print(f"{'draft':>6}{1e3 * np.median(draft):11.2f}{draft_ratio:13.2f}   (a proposal of {size}, and taking in features)")
low, high = np.quantile(widest / step, [0.25, 0.75])
print(f"middle half of the ratios at {size} tokens: {low:.2f} to {high:.2f}")

# %% [markdown]
# The two last columns need not agree. On a CPU arithmetic grows with the width, too; on hardware that spends a step
# reading weights, the experts are most of it.
#
# ## When it pays
#
# A round that costs c plain steps pays if it delivers more than c tokens. **c is the break-even acceptance.** The
# acceptance depends on text; here for three kinds: files like the training text, other files of the same library, and
# the standard library. For smaller blocks the acceptance follows from the conditional rates at block 8, and the draft
# is priced as timed at 8.

# %%
accepting = {}
for split, texts in prompts.items():
    found = results[name] if split == "modeling" else decode(decoder, texts)
    counts = metrics.join([each.counts for each in found])
    accepted = metrics.join([each.accepted for each in found])
    rates = metrics.conditional_rates(counts, accepted, size)
    accepting[split] = [metrics.expected_length(rates, width) for width in widths]

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
left.plot(timed, [ratio[width] for width in timed], "ks--", label="verification, time")
left.plot(widths, unions[name] / unions[name][0], "o-", markersize=4, label="verification, experts read")
left.plot([1, size], [1, 1], "k:", label="if width were free")
left.set(xlabel="tokens of a verification", ylabel="relative to a plain step", title="What a verification costs")
for split, lengths in accepting.items():
    right.plot(widths, lengths, "o-", markersize=4, label=f"delivers, {split}")
right.plot(list(even), list(even.values()), "ks--", label="must deliver (break-even)")
right.set(xlabel="block size (tokens)", ylabel="tokens per round", title="What a round delivers")
for axis in (left, right):
    axis.set(xticks=widths, ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=9)
plt.show()
print(
    f"Figure 3. {name}, one thread; {PROMPTS} prompts of {BUDGET} tokens per line. Above the squares speculation pays."
)

# %%
print(f"{'block':>5}{'break-even':>12}" + "".join(f"{split:>22}" for split in accepting))
for width, cost in even.items():
    cells = [(lengths[width - 1], lengths[width - 1] / cost) for lengths in accepting.values()]
    words = "".join(f"{f'{length:.2f} -> {gain:.2f}x':>22}" for length, gain in cells)
    print(f"{width:5}{cost:12.2f}{words}")
print("tokens per round -> predicted speedup = tokens per round / break-even")

# %% [markdown]
# Is it so? The same texts, decoded plainly and in blocks of 8 in turn. The prediction leaves out what is neither draft
# nor verification, so it promises more than comes, here by a tenth: do not trust it where it says 1.0x.

# %%
whole = Decoder(decoder.target.target, decoder.params, decoder.drafter, decoder.draft_params)
plain = Decoder(decoder.target.target, decoder.params)
for split, texts in prompts.items():
    for text in texts:  # compiles
        plain.warm_up([text], BUDGET)
        whole.warm_up([text], BUDGET)
    seconds = [(plain.generate([text], BUDGET).decode_s, whole.generate([text], BUDGET).decode_s) for text in texts]
    measured, guess = np.divide(*np.sum(seconds, axis=0)), accepting[split][-1] / even[size]
    print(f"{split:9} predicted {guess:.2f}x, measured {measured:.2f}x")

# %% [markdown]
# ## What to take away
#
# Three numbers decide, and each can be had in a minute: the time of a verification over that of a plain step at your
# block size, the time of a draft over the same, and the tokens per verification *on your own text*. `python -m
# experiments.run_spec` prints all three for your pair and your device.
#
# The best block is where the predicted speedup is largest, and it moves with the shape. A wider block adds the drafts
# that are least likely to stand. Their price falls once nearly all experts are read anyway, as here with 4; with
# hundreds of experts it does not (figure 2).

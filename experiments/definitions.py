"""What each line of the summary means."""

import textwrap

from experiments.agreement import TIE

WIDTH = 118
LABEL = 19
"""Columns of the label before a line's text."""

DEFINITIONS = {
    "rule": """
        The accept rule, whether the text has exactly the target's own law under it, and how tokens are drawn. For one
        seed, greedy, match and tree say what plain decoding says; other lossless rules draw other tokens of the same
        law.""",
    "compile": """
        Seconds to trace, lower and compile the programs that decode (prefill, first token and loop, with and without
        drafter), or to read them from the persistent cache ($DFLASH_JAX_CACHE/xla). Part of no other figure.""",
    "baseline": """
        Plain decoding by the same compiled loop without a drafter, one token a round. tok/s: tokens after each
        row's first / seconds of the rounds; median of the repeats (least-largest). TTFT: seconds until a batch's first
        tokens are on the host, prompt included. ITL: seconds between two tokens of a row.""",
    "speculative": "The same with the drafter.",
    "speedup": """
        Median ratio of tok/s of neighbouring repeats, which take turns (plain, speculative, plain, ...) in one process.
        Refused if dtype, experts, batch, prompts, budget, stop ids or device differ. Upper bound: plain rounds /
        speculative rounds, the speedup if a round cost no more than a plain step; for one row it is the acceptance
        length. Break-even acceptance: time of a round / time of a plain step. Speedup = bound / break-even.""",
    "acceptance": """
        Acceptance length, tokens per verify: (accepted drafts + the target's own token) / (live row, round) pairs, from
        1 to the block size. Tokens behind a stop id or the budget count nowhere; a row's first token belongs to its
        prompt. Drafts accepted: drafts in the text / drafts proposed. Histogram: share of verifies by the number of
        tokens they delivered. Conditional: P(draft i stands | all drafts before it stood); a verify that was cut says
        nothing about the drafts behind the cut.""",
    "agreement": f"""
        Share of prompts whose speculative ids equal the plain ids from first to last. Where two texts part, the target
        hears the common text and the margin is its largest minus its second largest logit (drawn tokens:
        log-probability plus noise): below {TIE["float32"]}
        (float32) or {TIE["bfloat16"]} (bfloat16) rounding can explain the difference (tie), above only a defect
        (REAL).""",
    "where time goes": """
        Draft (the proposal, and taking in the features of a round) and verify (target, head and argmax over a block),
        each a program of its own timed half-way through the text, as shares of a round of the loop. Accept and rest is
        what is left; the parts timed apart may cost more than inside the loop, and then are shares of their sum.""",
    "verify": "Time of a target step of the block's width / of width 1: median over turns that alternate.",
    "experts": """
        Distinct experts per mixture layer that the tokens of one round chose, mean over rounds and layers; for a plain
        step as measured in the baseline. Uniform estimate: E (1 - (1 - K/E)^tokens), independent uniform routing.""",
    "memory": "Largest resident set of the process; bytes of the parameters and of one batch's keys and values.",
    "why not faster?": """
        Time of a round in plain steps, split as above, against the tokens it delivers. A smaller block size is named if
        its predicted speedup is at least 5 % larger: conditional rates as measured, cost of verify linear in its width,
        of draft and rest unchanged.""",
}
"""Label of a line -> its definition."""


def explanation() -> list[str]:
    """The definitions, wrapped like the summary."""
    return [wrapped(f"{label:<{LABEL}}", " ".join(text.split())) for label, text in DEFINITIONS.items()]


def wrapped(head: str, text: str) -> str:
    """``head`` and ``text`` on lines of :data:`WIDTH` columns; all but the first begin under the text."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    )

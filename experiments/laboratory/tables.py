"""The screen of ablate_accept: a table per pair and block size, and which lossless rule accepts most."""

import math
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from experiments.definitions import LABEL, wrapped
from experiments.laboratory.measure import Findings
from experiments.laboratory.rows import Best, Row, best_lossless
from experiments.laboratory.screen import where
from experiments.laboratory.study import Study

WIDTH = 120
COLUMNS = (
    *("T", "rule", "law", "tok/verify", "verified", "tok/s", "ratio", "verify", "union"),
    *("TV", "KL", "ppl", "change"),
)
DEFINITIONS = {
    "tok/verify": "tokens of rounds / verifications, with its standard error; the two numbers under verified",
    "ratio": "tok/s over plain decoding's at the same temperature, median of neighbouring repeats",
    "verify": "time of a verification of this width / of a one-token step",
    "union": "experts per mixture layer that a round reads",
    "TV, KL": "of what is said against the target's own distribution, mean over delivered tokens (KL in nats): 0 for "
    "lossless rules by proof (tests/laws/test_exact.py), measured for lossy ones; at temperature 0: share of "
    "tokens that are not the target's argmax",
    "ppl": "perplexity of the text to the target at temperature 1; change: against plain decoding, with its "
    "standard error",
}


def show(study: Study, console: Console | None = None) -> None:
    """Print everything."""
    console = console or Console(width=WIDTH, highlight=False)
    for line in head(study):
        console.print(line, markup=False)
    for one in study.findings:
        console.print(_title(one), markup=False)
        console.print(_table(one))
        console.print()
    for label, text in DEFINITIONS.items():
        console.print(wrapped(f"{label:<{LABEL}}", text), markup=False)
    for note in study.left_out:
        console.print(wrapped(f"{'left out':<{LABEL}}", note), markup=False)
    console.print("\nthe lossless rule that accepts most", markup=False)
    for best in best_lossless(study.rows):
        console.print(f"  {in_words(best)}", markup=False)
    for words in warnings(study):
        console.print(wrapped(f"{'warning':<{LABEL}}", words), markup=False)
    console.print(f"{'reproduce':<{LABEL}}{study.command}", markup=False, soft_wrap=True)


def head(study: Study) -> Iterator[str]:
    """What the figures hold for."""
    args = study.args
    prompts = ", ".join(sorted({f"{one.prompts} of {one.known}" for one in study.findings}))
    quick = "   QUICK: a first look, too few texts to tell neighbouring rules apart" if args.quick else ""
    filters = [
        *([f"top-k {args.top_k}"] if args.top_k > 0 else []),
        *([f"top-p {args.top_p:g}"] if args.top_p < 1 else []),
        *([f"min-p {args.min_p:g}"] if args.min_p > 0 else []),
    ]
    yield f"{'accept rules':<{LABEL}}{args.dtype}   {', '.join(filters) or 'no filters'}   seed {args.seed}{quick}"
    yield f"{'device':<{LABEL}}{where(study.machine)}"
    yield (
        f"{'texts':<{LABEL}}prompts {prompts}   {args.max_new_tokens} tokens each at most   repeats {args.repeats} "
        "(drawn texts are other ones in each)"
    )
    seconds, programs, hits = (sum(getattr(one, name) for one in study.findings) for name in COMPILED)
    yield f"{'compile':<{LABEL}}{seconds:.1f} s ({programs} programs, {hits} from cache), in no other figure\n"


COMPILED = ("compile_s", "programs", "hits")


def warnings(study: Study) -> Iterator[str]:
    """What a reader should know before believing the figures."""
    for one in study.findings:
        if one.while_timing:
            yield (
                f"{one.names[0]}, block {one.block_size}: {one.while_timing} programs were compiled while timing: "
                "the speeds are too low"
            )
        if any(row.kl is not None and math.isinf(row.kl) for row in one.rows):
            yield f"{one.names[0]}: KL is infinite where an accepted draft lies outside the filters"


def _title(one: Findings) -> str:
    costs = one.costs
    experts = f", {one.experts_per_token} of {one.experts} experts per token" if one.experts else ""
    timed = f": verify {costs.verify_s * 1e3:.1f} ms, one token {costs.step_s * 1e3:.1f} ms" if costs else ""
    return f"{' + '.join(one.names)}, block {one.block_size} ({one.block_size - 1} drafts){experts}{timed}"


def _table(one: Findings) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("rule", "law") else "right", no_wrap=True)
    for before, row in zip((None, *one.rows), one.rows, strict=False):
        if before is not None and before.temperature != row.temperature:
            table.add_section()
        first = before is None or before.temperature != row.temperature
        table.add_row(f"{row.temperature:g}" if first else "", *cells(row))
    return table


def cells(row: Row) -> list[str]:
    """A row's columns after the temperature."""
    return [
        row.rule,
        row.label,
        "-" if row.plain else with_error(row.acceptance_length, row.acceptance_length_error, ".2f"),
        "-" if row.plain else f"{row.verified_tokens}/{row.verifies}",
        number(row.tok_s, ".0f") + f" ({number(row.tok_s_least, '.0f')}-{number(row.tok_s_most, '.0f')})",
        "-" if row.plain else number(row.ratio, ".2f", "x"),
        "-" if row.plain else number(row.verify_ratio, ".2f", "x"),
        number(row.union, ".2f"),
        *strays(row),
        number(row.perplexity, ".2f"),
        "-" if row.plain else with_error(100 * row.perplexity_change, 100 * row.perplexity_change_error, "+.1f", "%"),
    ]


def strays(row: Row) -> tuple[str, str]:
    """Total variation and divergence, or what stands in their place."""
    if row.plain:
        return "-", "-"
    if row.lossless:
        return "0", "0"
    if row.not_argmax is not None:
        return f"{row.not_argmax:.1%} other", "-"
    return number(row.total_variation, ".3f"), number(row.kl, ".3f")


def in_words(best: Best) -> str:
    """One line about the best lossless rule of a pair, block size and temperature."""
    where = f"{best.pair}, block {best.block_size}, temperature {best.temperature:g}"
    lead = f"{best.rule} {best.acceptance_length:.2f} tokens/verify"
    if best.second is None:
        return f"{where}: {lead} (no other has a row)"
    doubt = "" if best.clear else ", within two standard errors"
    return f"{where}: {lead} (next: {best.second} {best.second_acceptance_length:.2f}{doubt})"


def number(value: float | None, how: str, unit: str = "") -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:{how}}{unit}"


def with_error(value: float, error: float, how: str, unit: str = "") -> str:
    """A figure and its standard error, which has as many digits."""
    shown = number(value, how, unit)
    return shown if math.isnan(error) or math.isnan(value) else f"{shown} ±{error:{how.lstrip('+')}}"

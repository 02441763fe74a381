"""The screen of ablate_accept: a table per pair and block size, and which lossless rule accepts most."""

import math
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from experiments.definitions import LABEL, wrapped
from experiments.laboratory.measure import Findings
from experiments.laboratory.ranking import TITLE, lines
from experiments.laboratory.rows import Row
from experiments.laboratory.screen import where
from experiments.laboratory.study import Study, warnings
from experiments.summary import filters

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
    console.print(f"\n{TITLE}", markup=False)
    for words in lines(study.rows):
        console.print(f"  {words}", markup=False)
    for words in warnings(study):
        console.print(wrapped(f"{'warning':<{LABEL}}", words), markup=False)
    console.print(f"{'reproduce':<{LABEL}}{study.command}", markup=False, soft_wrap=True)


def head(study: Study) -> Iterator[str]:
    """What the figures hold for."""
    args = study.args
    prompts = ", ".join(sorted({f"{one.prompts} of {one.known}" for one in study.findings}))
    quick = "   QUICK: a first look, too few texts to tell neighbouring rules apart" if args.quick else ""
    cut = ", ".join(filters(args.top_k, args.top_p, args.min_p)) or "no filters"
    yield f"{'accept rules':<{LABEL}}{args.dtype}   {cut}   seed {args.seed}{quick}"
    yield f"{'device':<{LABEL}}{where(study.machine)}"
    yield (
        f"{'texts':<{LABEL}}prompts {prompts}   {args.max_new_tokens} tokens each at most   repeats {args.repeats} "
        "(drawn texts are other ones in each)"
    )
    seconds, programs, hits = (sum(getattr(one, name) for one in study.findings) for name in COMPILED)
    yield f"{'compile':<{LABEL}}{seconds:.1f} s ({programs} programs, {hits} from cache), in no other figure\n"


COMPILED = ("compile_s", "programs", "hits")


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


def number(value: float | None, how: str, unit: str = "") -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:{how}}{unit}"


def with_error(value: float, error: float, how: str, unit: str = "") -> str:
    """A figure and its standard error, which has as many digits."""
    shown = number(value, how, unit)
    return shown if math.isnan(error) or math.isnan(value) else f"{shown} ±{error:{how.lstrip('+')}}"

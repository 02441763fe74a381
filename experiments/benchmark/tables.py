"""The benchmark's figures on the screen."""

from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.benchmark.report import KEYS, PROBES, RATIOS, Result, block_row, contestant, name_of, spread

WIDTH = 120


def show(result: Result, console: Console | None = None) -> None:
    """Print all tables, then why what is null is null."""
    console = console or Console(width=WIDTH, highlight=False)
    console.print(speeds(result))
    for threads in result.threads:
        if result.blocks.get(threads):
            console.print(blocks(result, threads))
    console.print(keys(result))
    who = ", ".join(f"{name} {t}" for name, t in result.better.items())
    console.print(f"headline: each contestant at its faster thread setting: {who}")
    for name, what in PROBES.items():
        console.print(f"{name}: {what}")
    for name, value in result.headline().items():
        if value is None:
            console.print(f"{name}: null, {result.reasons.get(name, 'not measured')}")
    for each, words in result.contest.failures.items():
        console.print(f"failed: {name_of(each)}: {words}", markup=False)
    if result.disturbed:
        names = ", ".join(name_of(each) for each in result.disturbed)
        console.print(f"disturbed, do not quote: others had the CPU of {names}", markup=False)


def speeds(result: Result) -> Table:
    """One row per entry."""
    table = Table(title="decoding only, tokens per second (median, least - largest)")
    for name in ("contestant", "threads", "variant", "tok/s", "", "tok/round", "same ids", "CPU share"):
        table.add_column(name, justify="left" if name in ("contestant", "variant") else "right")
    order = sorted(result.contest.samples, key=lambda who: (who.threads, list(_contestants()).index(who.contestant)))
    for who in order:
        row = contestant(result, who)
        rate = row["tok_s"]
        table.add_row(
            who.contestant,
            str(who.threads),
            who.label,
            number(rate["median"], 1),
            f"{number(rate['min'], 0)} - {number(rate['max'], 0)}",
            number(row["tokens_per_round"], 2),
            f"{row['prompts_equal']}/{row['prompts']}",
            number(row["cpu_share"], 2),
        )
    return table


def blocks(result: Result, threads: int) -> Table:
    """One row per block size: what a round costs and what it brings."""
    table = Table(title=f"speculative decoding by block size, threads {threads} (costs in plain steps)")
    columns = ("block", "over plain", "", "tok/round", "round", "verify", "draft", "union", "overhead", "verdict")
    for name in columns:
        table.add_column(name, justify="left" if name == "verdict" else "right")
    for block in sorted(result.blocks[threads]):
        row = block_row(result, threads, block)
        over = row["spec_over_plain"]
        table.add_row(
            str(block),
            number(over["median"], 2),
            f"{number(over['min'], 2)} - {number(over['max'], 2)}",
            number(row["tokens_per_round"], 2),
            number(row["round_in_plain_steps"], 2),
            number(row.get("verify_ratio"), 2),
            number(row["draft_in_plain_steps"], 2),
            number(row["union"], 2),
            number(row.get("overhead"), 3),
            verdict(row),
        )
    return table


def verdict(row: dict[str, Any]) -> str:
    """Wins or loses, and why: the tokens that a round brings, and its cost in plain steps."""
    over, brings, costs = row["spec_over_plain"]["median"], row["tokens_per_round"], row["round_in_plain_steps"]
    if over is None or brings is None or costs is None:
        return "not measured"
    sign = "<" if brings < costs else ">"
    return f"{'wins' if over > 1 else 'loses'}: brings {brings:.2f} {sign} costs {costs:.2f}"


def keys(result: Result) -> Table:
    """One row per key of the JSON."""
    table = Table(title="ratios of neighbouring runs (median), and probes")
    table.add_column("key")
    table.add_column("headline", justify="right")
    for threads in result.threads:
        table.add_column(f"threads {threads} (least - largest; pairs)", justify="right")
    headline = result.headline()
    for name in KEYS:
        cells = []
        for threads in result.threads:
            value = result.at(threads)[name]
            pairs = spread(result.ratio(name, threads, threads)) if name in RATIOS else None
            more = ""
            if pairs and pairs["runs"]:
                more = f" ({number(pairs['min'], 2)} - {number(pairs['max'], 2)}; {pairs['runs']})"
            cells.append(number(value, 0 if name == "cache_copies" else 2) + more)
        digits = 0 if name == "cache_copies" else 2
        table.add_row(name, number(headline.get(name), digits), *cells)
    return table


def number(value: float | None, digits: int) -> str:
    return "-" if value is None or value != value else f"{value:.{digits}f}"


def _contestants() -> dict[str, None]:
    return dict.fromkeys(name for pair in RATIOS.values() for name in pair)

"""Decode with and without a drafter, compare the two, and say on one screen what came of it and why.

Examples:

    python -m experiments.run_spec                                          # shipped pair, held-out prompts
    python -m experiments.run_spec --prompt "def forward(self" --stream     # text as it comes, drafts in colour
    python -m experiments.run_spec --split stdlib --max-samples 16 --json results/stdlib.json
    python -m experiments.run_spec --target gpt-oss-20b --draft gpt-oss-20b-DFlash --dtype bfloat16 --experts packed
    python -m experiments.run_spec --block-size 4 --plots results --explain
    python -m experiments.run_spec --pair all                               # every shipped pair, a row each
    python -m experiments.run_spec --temperature 1 --top-p 0.9 --rule block # drawn, and still the target's own law

Text goes to the model as it is, without a chat template. Plain and speculative repeats take turns in
one process; compilation is reported apart, and programs are kept in $DFLASH_JAX_CACHE/xla (~/.cache/dflash_jax/xla).
"""

from dataclasses import replace

import tyro
from rich.console import Console

from checkpoints.text import TextDecoder
from dflash_jax.adaptive import AdaptiveDecoder
from dflash_jax.generation import Generation
from dflash_jax.settings import SamplingParams
from experiments import agreement, comparison, machine, runs, timing
from experiments.arguments import Args, command, plain_rule_of, rule_of, sampling_of
from experiments.compilation import CompileWatch, use_compilation_cache
from experiments.definitions import LABEL, explanation
from experiments.pair import ALL_PAIRS, Pair, check_target, known_pairs, load_pair
from experiments.plan import Plan, prepare
from experiments.progress import Waiting
from experiments.refusals import refusals
from experiments.report import Compiled, Report, write_json
from experiments.streaming import DIM, GREEN, PLAIN, shown
from experiments.summary import lines, warnings
from experiments.threads import pinned


def measure(args: Args, plan: Plan, pair: Pair, waiting: Waiting) -> Report:
    """Compile, stream if asked, time, and hold the two texts against each other."""
    sampling, here = sampling_of(args), machine.describe()
    decoders = {"baseline": pair.plain} if args.baseline else {}
    decoders["speculative"] = AdaptiveDecoder(pair.speculative) if args.adaptive else pair.speculative
    if args.stop:
        decoders = {name: TextDecoder(decoder, pair.tokenizer, args.stop) for name, decoder in decoders.items()}
    with CompileWatch() as compiling:
        for name, decoder in decoders.items():
            with refusals(), waiting.on(f"compiling prefill and loop ({name})"):
                first = runs.warm_up(decoder, plan.batches, args.max_new_tokens, pair.stop, sampling)
    if args.stream:
        show_stream(args, plan, pair)
    timer = None
    with CompileWatch() as measuring, waiting.on("compiling the parts of a round"):
        if first.rounds and not args.adaptive:
            timer = timing.StepTimer(pair.speculative, plan.batches[0], first.tokens, args.max_new_tokens)
    total = args.repeats * len(decoders) * len(plan.batches)
    with CompileWatch() as timed, waiting.through("generating", total) as step:
        found = runs.run_interleaved(
            decoders,
            plan.batches,
            runs.conditions_of(pair, plan.batches, args.max_new_tokens, sampling, args.stop),
            repeats=args.repeats,
            after_each=lambda name, generation: step(_live(name, generation)),
            between=timer.turn if timer else lambda: None,
            before_repeat=decoders["speculative"].forget if args.adaptive else lambda: None,
        )
    agreed = None
    if args.baseline and (pair.rule.pathwise or (pair.rule.lossless and sampling.greedy)):
        with waiting.on("comparing texts"):
            agreed = agree(plan, pair, runs.settings_of(sampling, plan.batches), **found)
    return Report(
        command=command(args),
        pair=pair.facts,
        prompts_known=plan.known,
        machine=here,
        compiled=Compiled(compiling.seconds, compiling.programs, compiling.hits, measuring.seconds, timed.programs),
        memory=machine.measure_memory(pair, args.batch, plan.longest + args.max_new_tokens),
        speculative=found["speculative"],
        plain=found.get("baseline"),
        costs=timer and timer.costs(),
        agreement=agreed,
    )


def agree(
    plan: Plan, pair: Pair, settings: list[list[SamplingParams]], baseline: runs.Run, speculative: runs.Run
) -> agreement.Agreement:
    """Hold the texts of both runs against each other, repeat by repeat and prompt by prompt."""
    prompts = [prompt for batch in plan.batches for prompt in batch]
    each = [one for batch in settings for one in batch]
    return agreement.worst(
        agreement.compare(pair.plain, prompts, plain, drafted, pair.dtype, each)
        for plain, drafted in zip(baseline.texts_of_repeats, speculative.texts_of_repeats, strict=True)
    )


def _live(name: str, generation: Generation) -> str:
    """One generation in a few words, for the progress bar."""
    tokens = sum(map(len, generation.tokens))
    verifies = max(int((generation.counts > 0).sum()), 1)
    return (
        f"{name} {tokens / (generation.ttft_s + generation.decode_s):.0f} tok/s, "
        f"{generation.counts.sum() / verifies:.2f} tokens/round"
    )


def show_stream(args: Args, plan: Plan, pair: Pair) -> None:
    """Print every prompt and its text as it comes; before a lossy rule's, that it is one."""
    console = Console()
    if not pair.rule.lossless:
        print(f"rule {pair.rule.name}: LOSSY, the text is not the target's own\n")
    dim, green = (PLAIN, PLAIN) if console.no_color else (DIM, GREEN)
    texts = TextDecoder(pair.speculative, pair.tokenizer, args.stop, pair.stop)
    settings = runs.settings_of(sampling_of(args), plan.batches)
    for row, (prompt,), (setting,) in zip(plan.rows, plan.batches, settings, strict=True):
        print(shown(row.text, dim, console.is_terminal), end="")
        for piece in texts.stream_ids(prompt, args.max_new_tokens, setting):
            print(shown(piece.text, green if piece.drafted else PLAIN, console.is_terminal), end="", flush=True)
        print("\n")


def publish(args: Args, report: Report) -> None:
    """Print the summary and write the files that were asked for."""
    print("\n".join(lines(report) + warnings(report)))
    if args.explain:
        print("\n" + "\n".join(explanation()))
    if args.json is not None:
        write_json(report, args.json)
        print(f"{'written':<{LABEL}}{args.json}")
    if args.plots is not None:
        from experiments.plots import plot_acceptance  # matplotlib takes a second to import

        print(f"{'written':<{LABEL}}{plot_acceptance(report, args.plots)}")


def main(args: Args) -> Report | list[Report]:
    """Parse -> prepare -> load -> measure -> publish."""
    use_compilation_cache()
    waiting = Waiting(args.quiet)
    if args.pair == ALL_PAIRS:
        return compare_all(args, waiting)
    with refusals():
        plan = prepare(args)
    report = run(args, plan, waiting)
    publish(args, report)
    return report


def run(args: Args, plan: Plan, waiting: Waiting) -> Report:
    """Load a pair and measure it."""
    with pinned(plan.cpus):
        with refusals(), waiting.on(f"loading {' + '.join(plan.folders.names)}"):
            rules = dict(rule=rule_of(args), plain_rule=plain_rule_of(sampling_of(args)))
            pair = load_pair(
                plan.folders, plan.tokenizer, dtype=args.dtype, experts=args.experts, adaptive=args.adaptive, **rules
            )
        return measure(args, plan, pair, waiting)


def compare_all(args: Args, waiting: Waiting) -> list[Report]:
    """Every shipped pair in turn, then one table."""
    with refusals():
        if args.stream or args.plots or args.explain:
            raise ValueError("--pair all prints one table: leave out --stream, --plots and --explain, or name one pair")
        each = [replace(args, pair=name) for name in known_pairs()]
        plans = [prepare(one) for one in each]
        with pinned(plans[0].cpus):  # starts jax, which counts its threads then
            for plan in plans:
                check_target(plan.folders, dtype=args.dtype, experts=args.experts)
    reports = [run(replace(one, json=None), plan, waiting) for one, plan in zip(each, plans, strict=True)]
    comparison.show(reports)
    if args.json is not None:
        comparison.write_json(command(args), reports, args.json)
        print(f"{'written':<{LABEL}}{args.json}")
    return reports


if __name__ == "__main__":
    main(tyro.cli(Args, prog="python -m experiments.run_spec", description=__doc__))

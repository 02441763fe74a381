"""What does each accept rule bring at each temperature, and what does a lossy one cost the text?

Rules x temperatures x block sizes x pairs: acceptance, speed against plain decoding under the same settings, experts
read, and how far the text strays from the target's own law.

Examples:

    python -m experiments.ablate_accept                                        # shipped pair, all rules, T 0, 0.7, 1
    python -m experiments.ablate_accept --quick                                # every shipped pair, a first look
    python -m experiments.ablate_accept --pair all --max-samples 16 --json accept.json --csv accept.csv --plots plots
    python -m experiments.ablate_accept --rules match rejection block --temperatures 1 --block-sizes 4 8 16
    python -m experiments.ablate_accept --target gpt-oss-20b --draft gpt-oss-20b-DFlash --dtype bfloat16 --top-p 0.9

The block size is the pair's own (of tiny-gpt-oss 5, the fastest on a CPU) unless --block-sizes names others.

Protocol: decoders take turns prompt by prompt (plain, rule, rule, ...) in one process, the same seeds for all, other
seeds in every repeat; speeds are medians of the repeats, acceptance is pooled over all different texts. Each (rule,
block size) is one program, compiled before the timing; temperatures are values and compile nothing. Plain decoding
draws as the rule match does, at temperature 0 as greedy.

Lossless rules have total variation and divergence 0 by proof (tests/laws/test_exact.py), and none is measured. Lossy
ones are: the target hears prompt and text again, and p is its distribution at every delivered token, under the row's
own temperature and filters. Such a rule says an accepted draft d for certain where the target would have drawn from p,
so that at this token TV = 1 - p(d) and KL(said || target) = -log p(d); at a token of the target's own both are 0.
Printed is the mean over delivered tokens. At temperature 0 p is a certainty: printed is the share of tokens that are
not its argmax. Perplexity is the target's at temperature 1, without filters, of the delivered tokens; its change is
against plain decoding of the same prompts, seeds and settings.
"""

from dataclasses import replace

import tyro

from experiments import machine
from experiments.arguments import command
from experiments.compilation import use_compilation_cache
from experiments.definitions import LABEL
from experiments.laboratory import tables
from experiments.laboratory.arguments import Args, settled
from experiments.laboratory.measure import Findings, measure
from experiments.laboratory.plan import (
    forget_programs,
    left_out,
    load,
    names_of,
    prepare_rules,
    temperatures_of,
)
from experiments.laboratory.study import Study, payload, write_csv, write_json
from experiments.plan import Plan
from experiments.progress import Waiting
from experiments.refusals import refusals
from experiments.threads import available_cpus, pinned


def measure_pair(args: Args, plans: list[Plan], waiting: Waiting, cpus: list[int]) -> list[Findings]:
    """Load a pair once and measure it at every block size; compile on ``cpus``."""
    pair = load(args, plans[0], waiting)
    sized = [replace(pair, drafter=replace(pair.drafter, block_size=plan.folders.block_size)) for plan in plans]
    found = []
    for plan, each in zip(plans, sized, strict=True):
        found.append(measure(args, plan, each, waiting, cpus))
        forget_programs()
    return found


def publish(study: Study) -> None:
    """Print the tables and write the files that were asked for."""
    args = study.args
    tables.show(study)
    written = []
    if args.json is not None:
        write_json(payload(study), args.json)
        written.append(args.json)
    if args.csv is not None:
        write_csv(study.rows, args.csv)
        written.append(args.csv)
    if args.plots is not None:
        from experiments.laboratory.plots import plot_study  # matplotlib takes a second to import

        written += plot_study(study, args.plots)
    for path in written:
        print(f"{'written':<{LABEL}}{path}")


def main(given: Args) -> Study:
    """Parse -> prepare -> load -> measure -> publish."""
    use_compilation_cache()
    args, waiting = settled(given), Waiting(given.quiet)
    with refusals():
        plans = prepare_rules(args)
    cpus = available_cpus()
    with pinned(plans[0][0].cpus):
        here = machine.describe()
        findings = [one for each in plans for one in measure_pair(args, each, waiting, cpus)]
    study = Study(
        command=command(given, "experiments.ablate_accept"),
        args=args,
        left_out=tuple(left_out(names_of(args), temperatures_of(args))),
        machine=here,
        findings=tuple(findings),
    )
    publish(study)
    return study


if __name__ == "__main__":
    main(tyro.cli(Args, prog="python -m experiments.ablate_accept", description=__doc__))

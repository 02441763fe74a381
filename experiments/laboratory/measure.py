"""Every rule at every temperature with one pair and block size: compiled first, timed in turn, then judged."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from dflash_jax.generate import Decoder
from dflash_jax.generation import Generation
from dflash_jax.rules import ACCEPT
from dflash_jax.settings import SamplingParams, derived_seed
from experiments import runs, timing
from experiments.arguments import sampling_of
from experiments.compilation import CompileWatch
from experiments.laboratory.arguments import Args, for_one_block
from experiments.laboratory.judge import drafted, opinion_of, straying_of
from experiments.laboratory.plan import names_of, rules_at, temperatures_of
from experiments.laboratory.rows import PLAIN, Row, Trial, different, row_of
from experiments.pair import Pair
from experiments.plan import Plan
from experiments.progress import Waiting
from experiments.threads import pinned

MOST_COMPILERS = 4


@dataclass(frozen=True)
class Findings:
    """One pair at one block size.

    Attributes:
        costs: parts of a round; None if no text had a round.
        compile_s, programs, hits: compilation, summed over programs built side by side, part of no other figure;
            ``hits`` came from the persistent cache.
        while_timing: programs built while timing; anything but 0 spoils the speeds.
        crowding: see :func:`experiments.runs.crowding`.
        known: prompts there were to choose from; ``prompts`` were taken.
    """

    names: tuple[str, str]
    family: str
    block_size: int
    experts: int
    experts_per_token: int
    costs: timing.StepCosts | None
    compile_s: float
    programs: int
    hits: int
    while_timing: int
    crowding: str | None
    known: int
    prompts: int
    prompt_hash: str
    rows: tuple[Row, ...]


def measure(args: Args, plan: Plan, pair: Pair, waiting: Waiting, cpus: Sequence[int]) -> Findings:
    """All rows of one pair and block size.

    Args:
        args: settled.
        pair: with the drafter at this block size.
        cpus: to compile on; the timing is on the plan's.
    """
    where = f"{pair.names[0]}, block {pair.drafter.block_size}"
    settings = [_sampling(args, temperature) for temperature in temperatures_of(args)]
    contests = [_decoders(pair, names_of(args), sampling) for sampling in settings]
    with CompileWatch() as compiling:
        with waiting.on(f"compiling {len(names_of(args))} rules and plain decoding ({where})"):
            first = _compile(args, plan, pair, settings, contests, cpus)
        timers: dict[int, timing.StepTimer] = {}
        if first.rounds:
            with waiting.on(f"compiling the parts of a round ({where})"):
                for name in names_of(args):
                    decoder = replace(pair, rule=ACCEPT[name]).speculative
                    if decoder.width not in timers:
                        text = (plan.batches[0], first.tokens, args.max_new_tokens)
                        timers[decoder.width] = timing.StepTimer(decoder, *text)
    with CompileWatch() as timed:
        timings = [
            _time(args, plan, pair, sampling, decoders, where, waiting, timers)
            for sampling, decoders in zip(settings, contests, strict=True)
        ]
    costs = {width: timer.costs() for width, timer in timers.items()}
    with waiting.on(f"the target hears the texts again ({where})"):
        rows = [
            row
            for sampling, found in zip(settings, timings, strict=True)
            for row in _rows(pair, plan, sampling, found, costs)
        ]
    facts = pair.facts
    return Findings(
        names=pair.names,
        family=pair.family,
        block_size=facts.block_size,
        experts=facts.experts,
        experts_per_token=facts.experts_per_token,
        costs=costs.get(facts.block_size),
        compile_s=compiling.seconds,
        programs=compiling.programs,
        hits=compiling.hits,
        while_timing=timed.programs,
        crowding=runs.crowding([run for each in timings for found in each.values() for run in found], len(plan.cpus)),
        known=plan.known,
        prompts=len(plan.rows),
        prompt_hash=timings[0][PLAIN][0].conditions.prompts,
        rows=tuple(rows),
    )


def _sampling(args: Args, temperature: float) -> SamplingParams:
    return sampling_of(for_one_block(args, None, None, temperature))


def _lossless(name: str) -> bool:
    return name == PLAIN or ACCEPT[name].lossless


def _decoders(pair: Pair, names: Sequence[str], sampling: SamplingParams) -> dict[str, Decoder]:
    """Plain decoding, which draws its tokens as ``match`` does, and every rule that has a row at this temperature."""
    plain = replace(pair, plain_rule=ACCEPT["greedy" if sampling.greedy else "match"]).plain
    rules = {name: replace(pair, rule=ACCEPT[name]).speculative for name in rules_at(names, sampling.temperature)}
    return {PLAIN: plain} | rules


def _compile(
    args: Args,
    plan: Plan,
    pair: Pair,
    settings: Sequence[SamplingParams],
    contests: Sequence[dict[str, Decoder]],
    cpus: Sequence[int],
) -> Generation:
    """Build the programs of every rule once, several at a time; temperatures are values. Returns what a rule says."""
    jobs = {
        (name, decoder.rule.name): (decoder, sampling)
        for sampling, decoders in zip(settings, contests, strict=True)
        for name, decoder in decoders.items()
    }
    with pinned(cpus), ThreadPoolExecutor(min(len(cpus), MOST_COMPILERS)) as pool:
        said = pool.map(
            lambda job: runs.warm_up(job[0], plan.batches, args.max_new_tokens, pair.stop, job[1]), jobs.values()
        )
        return next(each for (name, _), each in zip(jobs, list(said), strict=True) if name != PLAIN)


def _time(
    args: Args,
    plan: Plan,
    pair: Pair,
    sampling: SamplingParams,
    decoders: dict[str, Decoder],
    where: str,
    waiting: Waiting,
    timers: dict[int, timing.StepTimer],
) -> dict[str, list[runs.Run]]:
    """A B C A B C ...: a run of every decoder per repeat. Each repeat draws with seeds of its own, the same for all
    decoders, so that repeats tell more of the rule than one text over and over."""
    found: dict[str, list[runs.Run]] = {name: [] for name in decoders}
    total = args.repeats * len(decoders) * len(plan.batches)
    with waiting.through(f"timing {where}, temperature {sampling.temperature:g}", total) as step:
        for repeat in range(args.repeats):
            seeded = replace(sampling, seed=derived_seed(sampling.seed, repeat * len(plan.batches)))
            turn = runs.run_interleaved(
                decoders,
                plan.batches,
                runs.conditions_of(pair, plan.batches, args.max_new_tokens, seeded),
                repeats=1,
                after_each=lambda name, generation: step(name),
                between=lambda: [timer.turn() for timer in timers.values()],
            )
            for name, run in turn.items():
                found[name].append(run)
    return found


def _rows(
    pair: Pair,
    plan: Plan,
    sampling: SamplingParams,
    found: dict[str, list[runs.Run]],
    costs: dict[int, timing.StepCosts],
) -> list[Row]:
    """The rows of one temperature, plain decoding first."""
    trials = {name: _judge(pair, plan, name, each) for name, each in found.items()}
    same = dict(pair=pair.names[0], family=pair.family, block_size=pair.drafter.block_size, sampling=sampling)

    def ratio(name: str) -> float:
        """Of the rule's own width."""
        width = 1 if name == PLAIN else ACCEPT[name].width(pair.drafter.block_size)
        return costs[width].ratio if width in costs else math.nan

    return [
        row_of(trial, trials[PLAIN], **same, rule=name, lossless=_lossless(name), verify_ratio=ratio(name))
        for name, trial in trials.items()
    ]


def _judge(pair: Pair, plan: Plan, name: str, found: list[runs.Run]) -> Trial:
    """What the target thinks of the texts of one decoder."""
    surprise, straying = [], []
    for run in different(found):
        sampling = run.conditions.sampling
        for (prompt,), generation in zip(plan.batches, run.repeats[0], strict=True):
            (text,) = generation.tokens
            opinion = opinion_of(pair.plain, prompt, text, sampling)
            surprise.append(float(opinion.surprise.sum()))
            if not _lossless(name):
                straying.append(straying_of(opinion.p, drafted(generation.counts[0], generation.accepted[0])))
    return Trial(tuple(found), tuple(surprise), tuple(straying))

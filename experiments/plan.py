"""From arguments to a run with which nothing is wrong: every check that needs no weights, before any is read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from experiments.arguments import SHIPPED, Args, rule_of
from experiments.outputs import check_outputs
from experiments.pair import FASTEST_BLOCK, PAIRS, SHIPPED_THREADS, Folders, inspect, load_tokenizer, locate
from experiments.prompts import Row, batches, encode, of_split, read_rows
from experiments.threads import first_cpus

FEWEST_REPEATS = 3


@dataclass(frozen=True)
class Plan:
    """A run to be made. ``known``: how many prompts there were to choose ``rows`` from; ``cpus``: those to run on."""

    folders: Folders
    tokenizer: Tokenizer
    rows: Sequence[Row]
    batches: list[list[list[int]]]
    known: int
    cpus: list[int]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt) for batch in self.batches for prompt in batch)


def prepare(args: Args) -> Plan:
    """Check all that can be checked without weights.

    Raises:
        ValueError: saying what is wrong and what to do.
    """
    for name, least in (("max_samples", 1), ("max_new_tokens", 1), ("batch", 1), ("repeats", FEWEST_REPEATS)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least {least}")
    if args.stream and args.batch > 1:
        raise ValueError(f"--stream shows one row at a time: leave out --batch {args.batch}")
    if "" in args.stop:
        raise ValueError("--stop '': an empty string ends every text at once; give at least one character")
    check_outputs({"--json": args.json, "--plots": args.plots})
    rule_of(args)
    if args.adaptive and args.stop:
        raise ValueError("--adaptive decodes whole texts: leave out --stop")
    if args.adaptive and args.stream:
        raise ValueError("--adaptive decodes whole texts: leave out --stream")
    if args.adaptive and args.rule == "tree":
        raise ValueError("--adaptive chooses among block sizes: leave out --rule tree")
    named = args.pair is None and args.target is None and args.draft is None
    pair = SHIPPED if named else args.pair
    target, draft = locate(pair, args.target, args.draft)
    folders = inspect(target, draft, _block_size(args) or FASTEST_BLOCK.get(pair))
    rows, tokenizer = _rows(args, target), load_tokenizer(target)
    chosen = rows[: args.max_samples]
    if args.batch > len(chosen):
        raise ValueError(f"--batch {args.batch}: there are {len(chosen)} prompts (--max-samples {args.max_samples})")
    prompts = encode(chosen, tokenizer, folders.context_limit)
    shipped = SHIPPED_THREADS if pair else None
    cpus = first_cpus(shipped if args.threads is None else args.threads)
    return Plan(folders, tokenizer, chosen, batches(prompts, args.batch), len(rows), cpus)


def _block_size(args: Args) -> int | None:
    drafts = args.num_speculative_tokens
    if drafts is None:
        return args.block_size
    if args.block_size not in (None, drafts + 1):
        raise ValueError(
            f"--block-size {args.block_size} means {args.block_size - 1} drafts, but --num-speculative-tokens is "
            f"{drafts}; give one of them"
        )
    return drafts + 1


def _rows(args: Args, target: Path) -> list[Row]:
    """The prompts asked for, in order."""
    if args.prompt is not None:
        if args.prompts is not None or args.split is not None:
            raise ValueError("--prompt is the only prompt: leave out --prompts and --split")
        if not args.prompt:
            raise ValueError("--prompt is empty; there must be a last token to go on from")
        return [Row("--prompt", None, args.prompt)]
    shipped = next((f for f in (target / "prompts.jsonl", PAIRS / SHIPPED / "prompts.jsonl") if f.is_file()), None)
    if args.prompts is None and shipped is None:
        raise ValueError("no prompts: give --prompt TEXT or --prompts FILE.jsonl")
    rows = read_rows(args.prompts or shipped)
    split = args.split or ("modeling" if args.prompts is None else None)
    return rows if split is None else of_split(rows, split)

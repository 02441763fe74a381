"""A target and its drafter: where they lie, what is refused before a weight is read, and how they are loaded."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tokenizers import Tokenizer

import checkpoints
from checkpoints.load import load_drafter, load_target, plan_target, read_config, stop_ids
from checkpoints.reader import open_checkpoint
from dflash_jax.accept import Greedy
from dflash_jax.generate import LARGEST_BLOCK, Decoder
from dflash_jax.protocols import AcceptRule, Drafter, Params, Target
from models.dflash import DFlashConfig

PAIRS = Path(checkpoints.__file__).parent / "pairs"
"""Shipped pairs: ``NAME/`` is a target and ``NAME-dflash/`` its drafter."""

GREEDY = Greedy()
DRAFT_SUFFIX = "-dflash"
ALL_PAIRS = "all"
FASTEST_BLOCK = {"tiny-gpt-oss": 5}
"""The default block size of a shipped pair: the fastest on a CPU, where the one trained for is larger."""

SHIPPED_THREADS = 1
"""The default threads of shipped pairs on a CPU: their matrices are too small for two, with and without a drafter."""


@dataclass(frozen=True)
class Folders:
    """Where a pair lies, and the parts of its configs that are needed before its weights."""

    target: Path
    draft: Path
    family: str
    block_size: int
    context_limit: int | None

    @property
    def names(self) -> tuple[str, str]:
        return self.target.resolve().name, self.draft.resolve().name


@dataclass(frozen=True)
class Facts:
    """A pair in words and numbers.

    Attributes:
        names: folders of target and drafter.
        family: the target's ``model_type``.
        rule: the accept rule, whether it is ``lossless``, and whether it says what plain decoding says (``pathwise``).
        block_size: P, the anchor and P-1 drafts; ``width``: tokens of a verification, more than P for a tree.
        adaptive: P is the largest block size, and each segment of rounds has one of its own.
        experts: E of a mixture layer, 0 for a dense target; ``experts_per_token``: K.
    """

    names: tuple[str, str]
    family: str
    rule: str
    lossless: bool
    pathwise: bool
    block_size: int
    width: int
    adaptive: bool
    experts: int
    experts_per_token: int


@dataclass(frozen=True)
class Pair:
    """A loaded pair.

    Attributes:
        expert_format: how the routed experts are held ("packed", a dtype, or "none").
        rule: of speculative decoding; ``plain_rule``: of plain decoding, which has no drafts to accept.
        adaptive: speculative decoding chooses its block size.
    """

    names: tuple[str, str]
    family: str
    target: Target
    params: Params
    drafter: Drafter
    draft_params: Params
    tokenizer: Tokenizer
    stop: tuple[int, ...]
    context_limit: int | None
    dtype: str
    expert_format: str
    rule: AcceptRule = GREEDY
    plain_rule: AcceptRule = GREEDY
    adaptive: bool = False

    @property
    def speculative(self) -> Decoder:
        options = dict(rule=self.rule, context_limit=self.context_limit)
        return Decoder(self.target, self.params, self.drafter, self.draft_params, **options)

    @property
    def plain(self) -> Decoder:
        """The same loop without a drafter, one token a round: plain decoding at its best."""
        return Decoder(self.target, self.params, rule=self.plain_rule, context_limit=self.context_limit)

    @property
    def facts(self) -> Facts:
        return Facts(
            names=self.names,
            family=self.family,
            rule=self.rule.name,
            lossless=self.rule.lossless,
            pathwise=self.rule.pathwise,
            block_size=self.drafter.block_size,
            width=self.speculative.width,
            adaptive=self.adaptive,
            experts=self.target.experts,
            experts_per_token=getattr(self.target.config, "experts_per_token", 0),
        )


def known_pairs(root: Path = PAIRS) -> list[str]:
    """Names of the shipped pairs."""
    names = [folder.name for folder in root.iterdir() if folder.is_dir()] if root.is_dir() else []
    return sorted(name for name in names if not name.endswith(DRAFT_SUFFIX) and name[0].isalnum())


def locate(pair: str | None, target: Path | None, draft: Path | None, root: Path = PAIRS) -> tuple[Path, Path]:
    """The folders of a pair, given by its name or by the two folders.

    Raises:
        ValueError: an unknown name, one folder without the other, both ways at once, or a folder that is missing.
    """
    if pair is not None and (target or draft):
        raise ValueError("--pair names both checkpoints; leave out --target and --draft, or --pair")
    if target or draft:
        if target is None:
            raise ValueError(f"--draft {draft} needs its target: add --target DIR")
        if draft is None:
            raise ValueError(f"--target {target} has no drafter: add --draft DIR (a DFlash checkpoint trained for it)")
    else:
        known = known_pairs(root)
        if pair not in known:
            raise ValueError(f"unknown pair {pair!r}; known: {', '.join([*known, ALL_PAIRS]) if known else 'none'}")
        target, draft = root / pair, root / (pair + DRAFT_SUFFIX)
    for role, folder in (("target", target), ("drafter", draft)):
        if not (folder / "config.json").is_file():
            what = "has no config.json" if folder.is_dir() else "does not exist"
            raise ValueError(f"{role} folder {folder} {what}; expected a Hugging Face checkpoint folder")
    return target, draft


def inspect(target: Path, draft: Path, block_size: int | None) -> Folders:
    """Read both configs and settle the block size.

    Args:
        block_size: the anchor and P-1 drafts; None: as the drafter was trained.

    Raises:
        ValueError: a config that cannot be used, or a block size out of range.
    """
    trained = DFlashConfig.from_hf(read_config(draft)).block_size
    size = trained if block_size is None else block_size
    if not 2 <= size <= LARGEST_BLOCK:
        raise ValueError(f"a block of {size} tokens: expected the anchor and at least one draft, 2 to {LARGEST_BLOCK}")
    config = read_config(target)
    limit = config.get("max_position_embeddings")
    return Folders(target, draft, str(config.get("model_type")), size, None if limit is None else int(limit))


def load_tokenizer(target: Path) -> Tokenizer:
    """The target's tokenizer.

    Raises:
        ValueError: if the folder has no ``tokenizer.json``.
    """
    file = target / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{target} has no tokenizer.json; copy it from the release, prompts are given as text")
    return Tokenizer.from_file(str(file))


def check_target(folders: Folders, *, dtype: str, experts: str | None) -> None:
    """Hold the target's headers against its family, reading no weight.

    Raises:
        ValueError: whatever the loader would refuse.
    """
    config = read_config(folders.target)
    plan_target(open_checkpoint(folders.target), config, dtype=jnp.dtype(dtype), experts=experts)


def load_pair(
    folders: Folders,
    tokenizer: Tokenizer,
    *,
    dtype: str,
    experts: str | None,
    rule: AcceptRule = GREEDY,
    plain_rule: AcceptRule = GREEDY,
    adaptive: bool = False,
) -> Pair:
    """Load both networks, the drafter first: that the two fit is checked before the large one is read.

    Raises:
        ValueError: whatever the loader refuses.
    """
    drafter, draft_params = load_drafter(folders.draft, folders.target, dtype=jnp.dtype(dtype))
    taps = drafter.config.taps
    target, params = load_target(folders.target, dtype=jnp.dtype(dtype), experts=experts, taps=taps)
    return Pair(
        names=folders.names,
        family=folders.family,
        target=target,
        params=params,
        drafter=replace(drafter, block_size=folders.block_size),
        draft_params=draft_params,
        tokenizer=tokenizer,
        stop=stop_ids(folders.target),
        context_limit=folders.context_limit,
        dtype=dtype,
        expert_format=expert_format(params),
        rule=rule,
        plain_rule=plain_rule,
        adaptive=adaptive,
    )


def expert_leaves(params: Params) -> list[tuple[str, Any]]:
    """``(path, array)`` of every leaf that belongs to a routed expert."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    named = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
    return [(path, leaf) for path, leaf in named if "/experts/" in path]


def expert_format(params: Params) -> str:
    """How the experts are held: "packed" for MXFP4 and FP8, else the dtype of their matrices; "none" for a dense
    network."""
    leaves = [(path, leaf) for path, leaf in expert_leaves(params) if not path.endswith("_bias")]
    kinds = {str(leaf.dtype) for _, leaf in leaves}
    if not kinds:
        return "none"
    return "packed" if any(path.endswith("/codes") for path, _ in leaves) else "+".join(sorted(kinds))

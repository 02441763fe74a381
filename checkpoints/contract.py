"""The pairing contract: does this drafter belong to this target? Asked of configs and headers, before weights load.

A drafter that does not fit rarely fails by itself: wrong taps of the right width, a mask token that is no row of the
embedding, or a look-alike's block layout all run, and propose nothing that is ever accepted.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints.config import read_config, read_vocabulary, text_config
from checkpoints.errors import raise_if
from checkpoints.reader import Reader

REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


class LookAlike(NamedTuple):
    """A format that resembles z-lab's first DFlash and is not it."""

    name: str
    why: str
    architectures: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()


LOOK_ALIKES = (
    LookAlike(
        "DFlash2",
        "it adds convolutions around every layer and a candidate selector",
        architectures=("DFlash2",),
        tensors=("candidate_selector.", "attention_conv", "mlp_conv"),
    ),
    LookAlike(
        "DeepSpec / DSpark (deepseek-ai dflash_*_block7 included)",
        "its first block position predicts too, so every label is shifted by one",
        architectures=("DSpark",),
        keys=("markov_rank", "markov_head_type", "enable_confidence_head", "shift_label"),
        tensors=("markov_head.", "confidence_head."),
    ),
    LookAlike(
        "the speculators format",
        "its layer ids are counted from one and its vocabulary may be reduced; convert it to z-lab's layout",
        keys=("speculators_model_type", "speculators_config", "aux_hidden_state_layer_ids", "draft_vocab_size"),
        tensors=("d2t", "t2d"),
    ),
    LookAlike(
        "Xiaomi MiMo's drafter",
        "it has attention sinks, scaled values and a mask embedding of its own",
        architectures=("MiMo",),
        keys=("attention_sink_bias", "attention_value_scale"),
        tensors=("attention_sink_bias", "attention_value_scale"),
    ),
    LookAlike(
        "Muse Glimmer's assistant",
        "its context projection is an encoder with a norm of its own",
        architectures=("MuseGlimmer",),
        tensors=("encoder.fc", "encoder.output_norm_enc"),
    ),
)


def setting(config: dict[str, Any], key: str) -> Any:
    """A drafter's setting: inside ``dflash_config``, else at top level, else None."""
    inner = config.get("dflash_config") or {}
    return inner[key] if inner.get(key) is not None else config.get(key)


def is_fc(name: str) -> bool:
    """Is this the projection of the taps, which every DFlash drafter has and no target?"""
    return name in ("fc.weight", "model.fc.weight")


def look_alikes(config: dict[str, Any], names: Iterable[str]) -> list[str]:
    """A sentence for every foreign format that a drafter's config or tensor names show."""
    architectures, names = config.get("architectures") or [], list(names)
    found = []
    for other in LOOK_ALIKES:
        signs = [f"architecture {a!r}" for a in architectures if any(sign in a for sign in other.architectures)]
        signs += [f"key {key!r}" for key in other.keys if setting(config, key) is not None]
        signs += [f"tensor {n!r}" for n in names if any(sign in n for sign in other.tensors)][:1]
        if signs:
            found.append(f"this is {other.name}, not DFlash v1 ({', '.join(signs)}): {other.why}")
    return found


def check_pair(config: dict[str, Any], drafter: Reader, target: Path | str | dict[str, Any]) -> None:
    """Hold a drafter against its target.

    Args:
        config: the drafter's ``config.json``.
        drafter: its headers.
        target: the target's folder, or its config dictionary.

    Raises:
        CheckpointError: look-alikes by name; else every disagreement, with both values and both files.
    """
    raise_if(drafter.folder, look_alikes(config, drafter))
    folder = None if isinstance(target, dict) else Path(target)
    other = text_config(target) if folder is None else read_config(folder)
    mine, theirs = f"{drafter.folder}/config.json", f"{folder or 'the target'}/config.json"
    problems = [f"{mine}: {key!r} is missing" for key in REQUIRED if config.get(key) is None]
    problems += _check_taps(config, other, mine, theirs)
    problems += _check_block(config, other, mine, theirs)
    problems += _check_widths(config, other, drafter, mine, theirs)
    problems += _check_vocabulary(config, other, drafter.folder, folder, mine, theirs)
    raise_if(drafter.folder, problems)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_taps(config: dict, other: dict, mine: str, theirs: str) -> list[str]:
    """Taps are never guessed: a formula gives the right number of layers and the wrong ones."""
    taps, layers = setting(config, "target_layer_ids"), other.get("num_hidden_layers")
    if not isinstance(taps, list) or not taps or not all(map(_is_int, taps)):
        said = "is missing" if taps is None else f"is {taps!r}"
        return [
            f"{mine}: 'target_layer_ids' {said}; expected the list of target layers that the drafter was trained on"
        ]
    problems = []
    if negative := [tap for tap in taps if tap < 0]:
        problems.append(f"{mine}: 'target_layer_ids' {taps} has negative entries {negative}; layers count from 0")
    if len(set(taps)) != len(taps):
        problems.append(f"{mine}: 'target_layer_ids' {taps} names a layer twice")
    if layers is not None and (outside := [tap for tap in taps if tap >= layers]):
        limit = f"{theirs}: 'num_hidden_layers' is {layers}"
        problems.append(f"{mine}: 'target_layer_ids' {taps} has {outside}, but {limit}")
    trained = setting(config, "num_target_layers")
    if None not in (trained, layers) and trained != layers:
        problems.append(f"{mine}: 'num_target_layers' is {trained}, but {theirs}: 'num_hidden_layers' is {layers}")
    return problems


def _check_block(config: dict, other: dict, mine: str, theirs: str) -> list[str]:
    """The mask token must be a row of the target's embedding; a block needs the anchor and a draft."""
    problems = []
    mask, vocabulary = setting(config, "mask_token_id"), other.get("vocab_size")
    if not _is_int(mask):
        said = "is missing" if mask is None else f"is {mask!r}"
        problems.append(f"{mine}: 'mask_token_id' {said}; expected the id that the drafter was trained with")
    elif mask < 0 or (vocabulary is not None and mask >= vocabulary):
        problems.append(f"{mine}: 'mask_token_id' is {mask}, but {theirs}: 'vocab_size' is {vocabulary}: no such row")
    block = setting(config, "block_size")
    if block is not None and (not _is_int(block) or block < 2):
        problems.append(f"{mine}: 'block_size' is {block!r}; expected at least 2, the anchor and one draft")
    return problems


def _check_widths(config: dict, other: dict, drafter: Reader, mine: str, theirs: str) -> list[str]:
    """The drafter borrows embedding and head, and reads the taps side by side."""
    problems = []
    hidden, width = config.get("hidden_size"), other.get("hidden_size")
    if None not in (hidden, width) and hidden != width:
        problems.append(f"{mine}: 'hidden_size' is {hidden}, but {theirs}: 'hidden_size' is {width}; must be equal")
    fc = next((drafter.entries[name] for name in filter(is_fc, drafter)), None)
    taps = setting(config, "target_layer_ids")
    if fc is None:
        return [*problems, f"{drafter.folder}: tensor 'fc.weight' is missing; every DFlash drafter has it"]
    if isinstance(taps, list) and width is not None and (len(fc.shape) != 2 or fc.shape[1] != len(taps) * width):
        problems.append(
            f"{drafter.folder}/{fc.file.name}: 'fc.weight' is {list(fc.shape)}, expected {len(taps) * width} columns: "
            f"{len(taps)} 'target_layer_ids' ({mine}) x 'hidden_size' {width} ({theirs})"
        )
    return problems


def _different_tokens(own: dict[str, int], tokens: dict[str, int]) -> list[str]:
    """Tokens of one vocabulary that another has under another id, or whose id it uses for another token. A token that
    it does not have, past its last one, is no difference: drafters add their mask token."""
    taken = set(tokens.values())
    return [token for token, index in own.items() if tokens.get(token, None if index in taken else index) != index]


def _check_vocabulary(
    config: dict, other: dict, mine_at: Path, theirs_at: Path | None, mine: str, theirs: str
) -> list[str]:
    """Vocabularies must be the same tokens; sizes may differ by padding rows past the last token only."""
    problems = []
    tokens = read_vocabulary(theirs_at) if theirs_at else {}
    own = read_vocabulary(mine_at) if tokens else {}
    if differ := _different_tokens(own, tokens):
        problems.append(
            f"{mine_at}/tokenizer.json and {theirs_at}/tokenizer.json differ in {len(differ)} tokens, e.g. "
            f"{differ[0]!r}: {own[differ[0]]} and {tokens.get(differ[0])}; the drafter belongs to another tokenizer"
        )
    size, target_size = config.get("vocab_size"), other.get("vocab_size")
    used = max(tokens.values(), default=-1) + 1
    if None in (size, target_size) or size == target_size or (used and min(size, target_size) >= used):
        return problems
    hint = f"; the tokenizer has {used} tokens" if used else "; padding can be told from a tokenizer.json only"
    problems.append(f"{mine}: 'vocab_size' is {size}, but {theirs}: 'vocab_size' is {target_size}{hint}")
    return problems

"""The JSON files beside the weights: the network's config, and the tokens that end a text."""

import json
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: if the file is missing or holds something else.
    """
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(file.parent, [f"{file.name} is missing"]) from None
    except ValueError as error:
        raise CheckpointError(file.parent, [f"{file.name} is not JSON: {error}"]) from error
    if not isinstance(value, dict):
        raise CheckpointError(file.parent, [f"{file.name} holds a {type(value).__name__}, expected an object"])
    return value


def read_config(folder: Path | str) -> dict[str, Any]:
    """``config.json``, made flat by :func:`text_config`.

    Raises:
        CheckpointError: if the file is missing or not an object.
    """
    return text_config(read_json(Path(folder) / "config.json"))


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the language model alone: keys of a nested ``text_config`` win, except the outer ``model_type``;
    the head is tied if either level says so."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return config
    tied = bool(config.get("tie_word_embeddings") or inner.get("tie_word_embeddings"))
    return config | inner | {"model_type": config.get("model_type"), "tie_word_embeddings": tied}


def stop_ids(folder: Path | str) -> tuple[int, ...]:
    """Tokens that end a text, ascending: the union of ``eos_token_id`` in config.json and generation_config.json (an
    int or a list) and of the tokenizer's ``eos_token``.

    Raises:
        CheckpointError: if a file is not JSON.
    """
    folder = Path(folder)
    found = set(_ids(read_config(folder).get("eos_token_id")))
    generation = folder / "generation_config.json"
    if generation.exists():
        found.update(_ids(read_json(generation).get("eos_token_id")))
    return tuple(sorted(found | _tokenizer_eos(folder)))


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [int(each) for each in (value if isinstance(value, list) else [value])]


def _tokenizer_eos(folder: Path) -> set[int]:
    """The id of the tokenizer's ``eos_token``, if its files say it."""
    file = folder / "tokenizer_config.json"
    settings = read_json(file) if file.exists() else {}
    token = settings.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is None:
        return set(_ids(settings.get("eos_token_id")))
    for index, added in (settings.get("added_tokens_decoder") or {}).items():
        if added.get("content") == token:
            return {int(index)}
    index = read_vocabulary(folder).get(token)
    return set() if index is None else {index}


def read_vocabulary(folder: Path | str) -> dict[str, int]:
    """Token -> id of ``tokenizer.json``, added tokens included; empty without the file."""
    file = Path(folder) / "tokenizer.json"
    if not file.exists():
        return {}
    tokenizer = read_json(file)
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # unigram models list [piece, score]
        vocabulary = {piece: index for index, (piece, _) in enumerate(vocabulary)}
    return vocabulary | {added["content"]: added["id"] for added in tokenizer.get("added_tokens") or []}

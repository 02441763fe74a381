"""Text that the tiny pairs learn from and are measured on: Python sources that an installation already has.

| split    | what                                                        | licence    | trained on |
|----------|-------------------------------------------------------------|------------|------------|
| train    | `transformers/models/<folder>/modeling_*.py`                | Apache-2.0 | yes        |
| modeling | the same, from the folders whose hash holds them out (7 %)  | Apache-2.0 | no         |
| library  | all other parts of transformers (generation, pipelines, ..) | Apache-2.0 | no         |
| stdlib   | the CPython standard library of the running interpreter     | PSF-2.0    | no         |

Modeling files copy from each other by policy ("Copied from", modular files), so `modeling` is an EASY held-out set:
the folders are unseen, but 73 % of its lines (longer than 8 characters) also occur in `train`; 9 % in `library`, 3 % in
`stdlib`. A number measured on `modeling` alone says little about other text.

Nothing is stripped or normalised, except that transformers files lose their leading comment block (licence and
generated-file banner): the same text in hundreds of files would inflate every acceptance length.
The text depends on the installed releases (`versions`); files are located without importing transformers.

    python -m experiments.corpus [--json | --write-prompts prompts.jsonl --count 64 --prompt-tokens 96]
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import re
import sysconfig
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from tokenizers import Tokenizer

Split = Literal["train", "modeling", "library", "stdlib"]
SPLITS: tuple[Split, ...] = get_args(Split)

COLUMNS = ("split", "files", "MB", "tokens", "chars_per_token")
END_OF_TEXT = "<|endoftext|>"
HELD_OUT_BUCKETS = 9  # of 100; the hash of the 532 folders of transformers 5.24.0 leaves 7.0 % of them below it
PAIR = Path(__file__).resolve().parents[1] / "checkpoints" / "pairs" / "tiny-gpt-oss"

# Folders that are not library code: tests, vendored packages, and tables (character maps, documentation as strings).
STDLIB_SKIPPED = {"__pycache__", "__phello__", "test", "tests", "idlelib", "turtledemo", "lib2to3"}
STDLIB_SKIPPED |= {"site-packages", "dist-packages", "lib-dynload", "ensurepip", "encodings", "pydoc_data"}
LEADING_COMMENTS = re.compile(r"\A(?:[ \t]*(?:#[^\n]*)?\n)+")
NOTICE = """# Where the prompts come from

`{prompts}` holds short excerpts, otherwise unchanged; `source` names the file of each row.

* Rows `modeling` and `library`: Hugging Face transformers {transformers}, copyright The HuggingFace Team and the
  authors named in its files, Apache License 2.0 (https://www.apache.org/licenses/LICENSE-2.0).
* Rows `stdlib`: CPython {python} standard library, copyright Python Software Foundation and the authors named in its
  files, PSF License Version 2 (PSF-2.0, https://docs.python.org/3/license.html).

None of these files was trained on. Modeling files copy from each other: the `modeling` rows are easy held-out text.
"""


def versions() -> dict[str, str]:
    """The releases that the text of this installation comes from."""
    return {"transformers": importlib.metadata.version("transformers"), "python": platform.python_version()}


def transformers_root() -> Path:
    """Folder of the installed transformers package, found without importing it."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the corpus is read from the transformers package: install it first")
    return Path(spec.origin).parent


def held_out(folder: str) -> bool:
    """Whether a model folder belongs to `modeling`: the hash of its name decides, so no release moves a folder."""
    return int.from_bytes(hashlib.sha256(folder.encode()).digest()[:8], "big") % 100 < HELD_OUT_BUCKETS


def files(split: Split) -> list[Path]:
    """The source files of a split, sorted by their path below the root."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    root = Path(sysconfig.get_path("stdlib")) if split == "stdlib" else transformers_root()
    if split in ("train", "modeling"):
        found = (p for p in root.glob("models/*/modeling_*.py") if held_out(p.parent.name) == (split == "modeling"))
    elif split == "library":
        found = (p for p in root.rglob("*.py") if p.relative_to(root).parts[0] != "models")
    else:
        found = (p for p in root.rglob("*.py") if STDLIB_SKIPPED.isdisjoint(p.relative_to(root).parts))
    return sorted(p for p in found if not p.name.startswith("_sysconfigdata"))  # a record of the build machine


def source(path: Path) -> str:
    """A name for a file that no installation path enters, e.g. `transformers/models/llama/modeling_llama.py`."""
    name, root = "transformers", transformers_root()
    if not path.is_relative_to(root):
        name, root = "stdlib", Path(sysconfig.get_path("stdlib"))
    return f"{name}/{path.relative_to(root).as_posix()}"


def text(path: Path) -> str:
    """One document. Transformers files lose their leading comment block, the others are whole."""
    content = path.read_bytes().decode("utf-8")
    return LEADING_COMMENTS.sub("", content) if path.is_relative_to(transformers_root()) else content


def texts(split: Split) -> list[str]:
    """The documents of a split in the order of `files`, without those that are empty."""
    return [document for document in map(text, files(split)) if document]


def load_tokenizer(folder: Path = PAIR) -> Tokenizer:
    """The tokenizer of a pair."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode(split: Split, tokenizer: Tokenizer) -> np.ndarray:
    """All documents of a split as uint16 [N], an end-of-text id after each.

    Cached in `$DFLASH_JAX_CACHE` (default `~/.cache/dflash_jax`) under a hash of the tokenizer and the text.
    """
    documents = texts(split)
    digest = hashlib.sha256(tokenizer.to_str().encode())
    for document in documents:
        digest.update(hashlib.sha256(document.encode()).digest())
    cache = Path(os.environ.get("DFLASH_JAX_CACHE") or Path.home() / ".cache" / "dflash_jax")
    path = cache / f"corpus-{digest.hexdigest()[:16]}" / f"{split}.npy"
    if not path.exists():
        literal = Tokenizer.from_str(tokenizer.to_str())
        literal.encode_special_tokens = True  # a special token spelled out inside a file is ordinary text
        end = literal.token_to_id(END_OF_TEXT)
        _save(
            path, np.concatenate([np.array([*literal.encode(document).ids, end], np.uint16) for document in documents])
        )
    return np.load(path)


def _save(path: Path, array: np.ndarray) -> None:
    """Write under a temporary name, then rename: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        np.save(file, array)
    os.replace(file.name, path)


@dataclass(frozen=True)
class Prompt:
    """The beginning of a task: `tokens` starts at a line of `source`, and `text` encodes to exactly these tokens."""

    source: str
    text: str
    tokens: list[int]


def sample_prompts(split: Split, tokenizer: Tokenizer, count: int, prompt_tokens: int, seed: int = 0) -> list[Prompt]:
    """`count` prompts without overlap; each file is used once before any is used twice, and skipped without room."""
    rng = random.Random(f"{split}/{seed}")
    paths = files(split)
    rng.shuffle(paths)
    queue = deque(_windows(path, tokenizer, prompt_tokens, rng) for path in paths)
    found: list[Prompt] = []
    while queue and len(found) < count:
        windows = queue.popleft()
        if prompt := next(windows, None):
            found.append(prompt)
            queue.append(windows)
    if len(found) < count:
        raise ValueError(f"{split} holds {len(found)} separate prompts of {prompt_tokens} tokens, not {count}")
    return found


def prompts(split: Split, tokenizer: Tokenizer, count: int, prompt_tokens: int, seed: int = 0) -> list[list[int]]:
    """The token ids of `sample_prompts`: `count` lists of `prompt_tokens` ids each."""
    return [prompt.tokens for prompt in sample_prompts(split, tokenizer, count, prompt_tokens, seed)]


def _windows(path: Path, tokenizer: Tokenizer, prompt_tokens: int, rng: random.Random) -> Iterator[Prompt]:
    """Prompts from one file, at its non-blank line starts in random order."""
    document, taken = text(path), []
    starts = [match.start() for match in re.finditer(r"^(?=[^\n]*\S)", document, re.MULTILINE)]
    starts = [start for start in starts if len(document) - start >= prompt_tokens]
    rng.shuffle(starts)
    for start in starts:
        piece = _prompt_text(document[start : start + 32 * prompt_tokens], tokenizer, prompt_tokens)
        stop = start + len(piece or "")
        if piece and all(stop <= first or last <= start for first, last in taken):
            taken.append((start, stop))
            yield Prompt(source(path), piece, tokenizer.encode(piece).ids)


def _prompt_text(document: str, tokenizer: Tokenizer, prompt_tokens: int) -> str | None:
    """The text of the first `prompt_tokens` tokens; None if there are fewer or the cut would change their encoding."""
    ids = tokenizer.encode(document).ids[:prompt_tokens]
    piece = tokenizer.decode(ids, skip_special_tokens=False)
    specials = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    stable = tokenizer.encode(piece).ids == ids and document.startswith(piece)
    return piece if len(ids) == prompt_tokens and stable and not any(word in piece for word in specials) else None


def write_prompts(path: Path, tokenizer: Tokenizer, count: int, prompt_tokens: int, seed: int = 0) -> int:
    """Write `count` modeling prompts and half as many of library and stdlib as JSON lines, and a notice beside them."""
    rows = []
    for split, number in (("modeling", count), ("library", count // 2), ("stdlib", count // 2)):
        for index, prompt in enumerate(sample_prompts(split, tokenizer, number, prompt_tokens, seed)):
            rows.append({"id": f"{split}-{index:03d}", "split": split, "source": prompt.source, "text": prompt.text})
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    path.with_name("PROMPTS_NOTICE.md").write_text(NOTICE.format(prompts=path.name, **versions()), encoding="utf-8")
    return len(rows)


def table(tokenizer: Tokenizer) -> list[dict[str, str | int | float]]:
    """One row per split: files, megabytes (UTF-8, after dropping headers), tokens and characters per token."""
    rows = []
    for split in SPLITS:
        documents, tokens = texts(split), len(encode(split, tokenizer))
        megabytes, characters = len("".join(documents).encode()) / 1e6, sum(map(len, documents))
        row = (split, len(documents), round(megabytes, 3), tokens, round(characters / tokens, 3))
        rows.append(dict(zip(COLUMNS, row, strict=True)))
    return rows


def main() -> None:
    """Print the table, or write the frozen prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=PAIR, help="folder with tokenizer.json")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--write-prompts", type=Path, metavar="FILE", help="write frozen prompts instead")
    for option, default in (("--count", 64), ("--prompt-tokens", 96), ("--seed", 0)):
        parser.add_argument(option, type=int, default=default)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.tokenizer)
    if target := arguments.write_prompts:
        number = write_prompts(target, tokenizer, arguments.count, arguments.prompt_tokens, arguments.seed)
        print(f"{number} prompts -> {target}")
    elif arguments.json:
        print(json.dumps({"versions": versions(), "splits": table(tokenizer)}, indent=2))
    else:
        print("transformers {transformers}, python {python}".format(**versions()))
        print("{:10}{:>7}{:>9}{:>12}{:>17}".format(*COLUMNS))
        for row in table(tokenizer):
            print("{split:10}{files:7d}{MB:9.2f}{tokens:12,d}{chars_per_token:17.2f}".format(**row))


if __name__ == "__main__":
    main()

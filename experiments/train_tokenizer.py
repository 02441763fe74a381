"""Train the byte-level BPE tokenizer of a tiny pair on the train split of the corpus.

    python -m experiments.train_tokenizer --vocab-size 1024 --out checkpoints/pairs/tiny-gpt-oss

Text is first cut by the pattern of the o200k family (words keep one leading character, so `.weight` and ` weight` are
units; digits go in groups of up to three; case changes cut), then bytes are merged inside the pieces. Every byte has a
token, so any text round-trips. The ids are dense: specials, then the 256 bytes, then merges. Training is deterministic:
the same corpus gives the same bytes on disk.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments import corpus

MASK, PAD = "<|mask|>", "<|pad|>"
SPECIALS = (corpus.END_OF_TEXT, MASK, PAD)  # ids 0, 1, 2

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PIECES = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def train(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly `vocab_size` tokens, specials included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and the `tokenizer_config.json` that transformers needs to load it offline."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": corpus.END_OF_TEXT,
        "mask_token": MASK,
        "model_input_names": ["input_ids", "attention_mask"],
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Train on the train split and write the two files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=corpus.PAIR)
    arguments = parser.parse_args()
    tokenizer = train(corpus.texts("train"), arguments.vocab_size)
    save(tokenizer, arguments.out)
    print(f"{tokenizer.get_vocab_size()} tokens -> {arguments.out}  {corpus.versions()}")


if __name__ == "__main__":
    main()

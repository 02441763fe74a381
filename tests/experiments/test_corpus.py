"""Corpus splits are disjoint and stable, the shipped tokenizer loses nothing, the frozen prompts mean what they say."""

import json
import subprocess
import sys

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer

from experiments import corpus, train_tokenizer

ROWS = [json.loads(line) for line in (corpus.PAIR / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
AWKWARD = (
    "",
    "\ttab\r\n\r\n  two\n",
    "naïve 日本語 🚨\u200d\x00\ufeff",
    "x" * 5000,
    " \n \t \n",
    "def f(x):\n    return x['a']  # it's\n",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The tokenizer that ships with the pair."""
    return corpus.load_tokenizer()


@pytest.fixture
def small_stdlib(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two documents in place of the whole standard library; one spells out a special token."""
    documents = ["import json\n", f"END = {corpus.END_OF_TEXT!r}\n"]
    monkeypatch.setattr(corpus, "texts", lambda split: documents)
    return documents


def test_splits_are_deterministic_and_disjoint() -> None:
    found = {split: corpus.files(split) for split in corpus.SPLITS}
    assert found == {split: corpus.files(split) for split in corpus.SPLITS}
    everything = [path for paths in found.values() for path in paths]
    assert all(found.values()) and len(everything) == len(set(everything))
    assert len({corpus.source(path) for path in everything}) == len(everything)


def test_whole_folders_are_held_out() -> None:
    train, modeling = ({path.parent.name for path in corpus.files(split)} for split in ("train", "modeling"))
    assert train.isdisjoint(modeling)
    assert 0.04 < len(modeling) / len(train | modeling) < 0.12
    assert corpus.held_out("deepseek_v3") and not corpus.held_out("llama")  # frozen: the shipped weights rely on it


def test_no_held_out_document_is_trained_on() -> None:
    train = set(corpus.texts("train"))
    assert not [path for path in corpus.files("modeling") if corpus.text(path) in train]


def test_only_the_leading_comments_go() -> None:
    path = next(path for path in corpus.files("train") if path.parent.name == "llama")
    whole, kept = path.read_text(encoding="utf-8"), corpus.text(path)
    assert whole.endswith(kept) and "Apache License" in whole and "Apache License" not in kept
    assert all(line.startswith("#") or not line.strip() for line in whole[: -len(kept)].splitlines())
    assert any(path.read_text(encoding="utf-8") == corpus.text(path) for path in corpus.files("stdlib"))


def test_unknown_split_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="train, modeling, library, stdlib"):
        corpus.files("validation")


def test_locating_files_imports_neither_transformers_nor_torch() -> None:
    code = "import sys; from experiments import corpus; corpus.files('train'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "experiments.corpus" in loaded and {"torch", "transformers", "jax"}.isdisjoint(loaded)


@pytest.mark.parametrize("text", AWKWARD)
def test_tokenizer_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_covers_every_byte(tokenizer: Tokenizer) -> None:
    text = "".join(map(chr, [*range(0x800), *range(0x800, 0xD800, 61), *range(0x10000, 0x110000, 1021)]))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_ids_and_size(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in train_tokenizer.SPECIALS] == [0, 1, 2]
    assert tokenizer.get_vocab_size() == 1024
    assert sorted(tokenizer.get_vocab().values()) == list(range(1024))


def test_transformers_loads_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    loaded = transformers.AutoTokenizer.from_pretrained(corpus.PAIR, local_files_only=True)
    assert (loaded.eos_token_id, loaded.mask_token_id, loaded.pad_token_id) == (0, 1, 2)
    for text in (*AWKWARD, *(row["text"] for row in ROWS)):
        assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
        assert loaded.decode(tokenizer.encode(text).ids) == text


def test_training_is_deterministic() -> None:
    documents = [corpus.text(path) for path in corpus.files("train")[:8]]
    first, second = (train_tokenizer.train(documents, 512).to_str() for _ in range(2))
    assert first == second
    with pytest.raises(ValueError, match="not 512"):
        train_tokenizer.train(["tiny"], 512)


def test_encode_joins_documents_and_caches(tokenizer, small_stdlib, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path))
    tokens = corpus.encode("stdlib", tokenizer)
    assert tokens.dtype == np.uint16 and np.flatnonzero(tokens == 0).size == len(small_stdlib) and tokens[-1] == 0
    assert tokenizer.decode(tokens.tolist(), skip_special_tokens=False) == "".join(
        document + corpus.END_OF_TEXT for document in small_stdlib
    )
    (cached,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert cached.name == "stdlib.npy" and cached.parent.name.startswith("corpus-")
    np.save(cached, tokens[:3])
    assert len(corpus.encode("stdlib", tokenizer)) == 3  # read back, not encoded again
    small_stdlib.append("import re\n")
    assert np.count_nonzero(corpus.encode("stdlib", tokenizer) == 0) == 3  # another text, another entry


def test_prompts_are_seeded_and_come_from_different_files(tokenizer: Tokenizer) -> None:
    found = corpus.sample_prompts("modeling", tokenizer, 12, 40, seed=1)
    assert len({prompt.source for prompt in found}) == 12
    assert all(len(prompt.tokens) == 40 and tokenizer.encode(prompt.text).ids == prompt.tokens for prompt in found)
    assert corpus.prompts("modeling", tokenizer, 6, 40, seed=1) == [prompt.tokens for prompt in found[:6]]
    assert corpus.prompts("modeling", tokenizer, 6, 40, seed=2) != [prompt.tokens for prompt in found[:6]]


def test_prompts_of_one_file_do_not_overlap(tokenizer, monkeypatch) -> None:
    path = next(path for path in corpus.files("modeling") if path.parent.name == "smollm3")
    monkeypatch.setattr(corpus, "files", lambda split: [path])
    document = corpus.text(path)
    found = corpus.sample_prompts("modeling", tokenizer, 20, 96)
    assert sum(len(prompt.text) for prompt in found) < len(document)
    for prompt in found:
        document = document.replace(prompt.text, "\0", 1)
    assert document.count("\0") == 20
    with pytest.raises(ValueError, match="separate prompts"):
        corpus.sample_prompts("modeling", tokenizer, 1, 10**6)


def test_frozen_prompts(tokenizer: Tokenizer) -> None:
    counts = {split: sum(row["split"] == split for row in ROWS) for split in corpus.SPLITS}
    assert counts == {"train": 0, "modeling": 64, "library": 32, "stdlib": 32}
    assert len({row["id"] for row in ROWS}) == len({row["text"] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        ids = tokenizer.encode(row["text"]).ids
        assert len(ids) == 96 and min(ids) > 2 and tokenizer.decode(ids) == row["text"]
        if row["split"] == "modeling":
            assert corpus.held_out(row["source"].split("/")[2])
    notice = (corpus.PAIR / "PROMPTS_NOTICE.md").read_text(encoding="utf-8")
    assert all(word in notice for word in ("Apache License 2.0", "PSF-2.0", "transformers 5.", "CPython 3."))


def test_main_prints_the_table_and_writes_prompts(tokenizer, tmp_path, monkeypatch, capsys) -> None:
    few = {split: corpus.files(split)[:3] for split in corpus.SPLITS}
    monkeypatch.setattr(corpus, "files", few.__getitem__)
    monkeypatch.setenv("DFLASH_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["corpus", "--json"])
    corpus.main()
    assert [row["split"] for row in json.loads(capsys.readouterr().out)["splits"]] == list(corpus.SPLITS)
    monkeypatch.setattr(sys, "argv", ["corpus"])
    corpus.main()
    assert len(capsys.readouterr().out.splitlines()) == 6
    target = tmp_path / "prompts.jsonl"
    monkeypatch.setattr(sys, "argv", ["corpus", "--write-prompts", str(target), "--count", "4", "--prompt-tokens", "8"])
    corpus.main()
    assert len(target.read_text().splitlines()) == 8 and (tmp_path / "PROMPTS_NOTICE.md").exists()

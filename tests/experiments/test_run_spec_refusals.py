"""What run_spec refuses, in which words, and before any weight is read."""

import dataclasses
import json

import pytest

from experiments import pair as pairs
from experiments import run_spec
from experiments.arguments import Args
from experiments.plan import prepare
from experiments.prompts import read_rows
from tests.experiments.random_pair import write_random_pair


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Target and drafter of a random pair."""
    return write_random_pair(tmp_path_factory.mktemp("pairs"))


@pytest.fixture
def good(folders) -> Args:
    """Arguments that nothing is wrong with."""
    return Args(target=folders[0], draft=folders[1], max_samples=2, quiet=True)


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    """A refusal that comes after the weights is too late."""
    monkeypatch.setattr(run_spec, "use_compilation_cache", lambda: None)

    def loaded(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(pairs, "load_target", loaded)


def test_good_arguments_pass(good):
    plan = prepare(good)
    assert len(plan.batches) == 2
    assert plan.folders.block_size == 5
    assert plan.folders.context_limit == 256


REFUSALS = {
    "unknown pair": (
        dict(target=None, draft=None, pair="tiny-gtp"),
        ["unknown pair 'tiny-gtp'", "known: ", "tiny-gpt-oss"],
    ),
    "pair and folders": (dict(pair="tiny-gpt-oss"), ["--pair names both"]),
    "no drafter": (dict(draft=None), ["has no drafter", "--draft DIR"]),
    "no target": (dict(target=None), ["needs its target", "--target DIR"]),
    "missing folder": (dict(draft="nowhere"), ["drafter folder nowhere does not exist"]),
    "block of one": (dict(block_size=1), ["a block of 1 tokens", "2 to 127"]),
    "no drafts": (dict(num_speculative_tokens=0), ["a block of 1 tokens"]),
    "two block sizes": (dict(block_size=8, num_speculative_tokens=8), ["7 drafts", "is 8", "give one"]),
    "batch": (dict(batch=3), ["--batch 3", "there are 2 prompts", "--max-samples 2"]),
    "no threads": (dict(threads=0), ["--threads 0: this process may use 1 to"]),
    "too many threads": (dict(threads=4096), ["--threads 4096: this process may use 1 to"]),
    "no batch": (dict(batch=0), ["--batch 0: at least 1"]),
    "empty prompt": (dict(prompt=""), ["--prompt is empty"]),
    "two kinds of prompt": (dict(prompt="x", split="stdlib"), ["leave out --prompts and --split"]),
    "long prompt": (dict(prompt="x" * 300), ["--prompt: 300 tokens", "limit of 256"]),
    "no such split": (dict(split="library"), ["no prompt of split 'library'", "modeling, stdlib"]),
    "repeats": (dict(repeats=2), ["--repeats 2: at least 3"]),
    "nothing new": (dict(max_new_tokens=0), ["--max-new-tokens 0: at least 1"]),
    "stream of a batch": (dict(stream=True, batch=2), ["--stream", "--batch 2"]),
    "an empty stop string": (dict(stream=True, stop=("",)), ["--stop ''", "at least one character"]),
    "no prompt file": (dict(prompts="nowhere.jsonl"), ["nowhere.jsonl is not a file"]),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name, good, capsys):
    change, said = REFUSALS[name]
    paths = {key: type(good.target)(change[key]) for key in ("draft", "target", "prompts") if change.get(key)}
    with pytest.raises(SystemExit) as stopped:
        run_spec.main(dataclasses.replace(good, **change | paths))
    shown = capsys.readouterr()
    assert stopped.value.code == 2
    assert not shown.out
    for words in said:
        assert words in shown.err


def test_outputs_that_cannot_be_written(good, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for change, words in (
        (dict(json=tmp_path), "is a folder; expected a file"),
        (dict(plots=tmp_path / "file"), "is a file; expected a folder"),
    ):
        with pytest.raises(ValueError, match=words):
            prepare(dataclasses.replace(good, **change))


def test_a_pair_that_does_not_fit_is_refused_before_the_target_is_read(good, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    for file in good.draft.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = json.loads((other / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [0, 9]
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit):
        run_spec.main(dataclasses.replace(good, draft=other))
    assert "'target_layer_ids' [0, 9] has [9]" in capsys.readouterr().err


def test_a_pair_without_its_drafter_folder(folders, tmp_path):
    (tmp_path / "lonely").symlink_to(folders[0])
    with pytest.raises(ValueError, match=r"drafter folder .*lonely-dflash does not exist"):
        pairs.locate("lonely", None, None, tmp_path)
    assert pairs.known_pairs(tmp_path) == ["lonely"]
    assert pairs.known_pairs(tmp_path / "nowhere") == []


BAD_ROWS = {
    "not json": ('{"text": "a"}\n{"text": ', "line 2 is not JSON"),
    "no object": ('{"text": "a"}\n\n["b"]', "line 3 holds a list, expected an object"),
    "no text": ('{"prompt": "a"}', r"line 1: expected a string under 'text'; found keys \['prompt'\]"),
    "empty text": ('{"text": "a"}\n{"text": ""}', "line 2: 'text' is empty"),
    "nothing": ("\n\n", "has no rows"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_prompts_file_names_its_line(name, good, tmp_path):
    content, said = BAD_ROWS[name]
    (tmp_path / "prompts.jsonl").write_text(content)
    with pytest.raises(ValueError, match=said):
        prepare(dataclasses.replace(good, prompts=tmp_path / "prompts.jsonl"))


def test_rows_without_a_split_cannot_be_chosen_by_one(good, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "a"}\n{"text": "b", "more": 1}\n')
    assert [row.text for row in read_rows(file)] == ["a", "b"]
    assert prepare(dataclasses.replace(good, prompts=file)).known == 2
    with pytest.raises(ValueError, match="none: its rows have no 'split'"):
        prepare(dataclasses.replace(good, prompts=file, split="stdlib"))

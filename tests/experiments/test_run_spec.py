"""run_spec from the command line's arguments to its screen and files, on a random pair."""

import contextlib
import io
import json
import shlex

import pytest
import tyro

from checkpoints.text import pieces, stream_tokens, whole_characters
from experiments import run_spec
from experiments.arguments import Args, command
from experiments.definitions import DEFINITIONS
from experiments.pair import load_pair
from experiments.plan import prepare
from experiments.streaming import GREEN, shown
from tests.experiments.random_pair import BLOCK, PROMPTS, write_random_pair

LABELS = (
    "dflash-jax",
    "device",
    "rule",
    "compile",
    "baseline",
    "speculative",
    "speedup",
    "acceptance",
    "  histogram",
    "  conditional",
    "agreement",
    "where time goes",
    "verify",
    "experts",
    "memory",
    "why not faster?",
    "reproduce",
    "warning",
)
PROMISED = (
    *("agreement", "acceptance_length", "acceptance_histogram", "plain_tok_s", "spec_tok_s", "speedup"),
    *("speedup_bound", "break_even", "verify_ratio", "union_mean", "union_one_token", "compile_s", "compilations"),
    *("rounds", "tokens", "ttft_s", "versions", "device", "dtype", "threads", "prompt_hash", "command", "commit"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Target and drafter of a random pair."""
    return write_random_pair(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def given(folders):
    """Arguments that name the random pair and keep the run short."""

    def arguments(**more) -> Args:
        short = {} if "prompt" in more else dict(max_samples=2)
        return Args(**dict(target=folders[0], draft=folders[1], max_new_tokens=14, quiet=True) | short | more)

    return arguments


@pytest.fixture(autouse=True)
def no_shared_cache(monkeypatch):
    """The tests neither read nor fill the user's compilation cache."""
    monkeypatch.setattr(run_spec, "use_compilation_cache", lambda: None)


def run(args: Args) -> tuple[str, run_spec.Report]:
    """What ``main`` prints and returns."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(run_spec, "use_compilation_cache", lambda: None)
        report = run_spec.main(args)
    return out.getvalue(), report


@pytest.fixture(scope="module")
def ran(given, tmp_path_factory):
    """One whole run with every output: ``(screen, report, folder)``."""
    folder = tmp_path_factory.mktemp("out")
    screen, report = run(given(json=folder / "deep" / "run.json", plots=folder / "plots", explain=True))
    return screen, report, folder


def labels_of(screen: str) -> list[str]:
    """The labels of a summary's lines, in order."""
    return [line[:19].rstrip() for line in screen.splitlines() if line[:19].strip()]


def test_the_summary_has_its_lines_in_order(ran):
    screen = ran[0]
    assert tuple(labels_of(screen)[: len(LABELS)]) == LABELS
    assert len(LABELS) < 24
    assert "running on CPU" in screen
    assert "block 5 (4 drafts)" in screen
    assert "greedy (lossless)   greedy   seed 0" in screen
    assert "prompts 2 of 3" in screen
    assert "1.000 (2 of 2 prompts" in screen


def test_a_low_acceptance_is_suspected(ran):
    screen, report, _ = ran
    assert report.acceptance_length < 1.2
    assert "mask token id, taps off" in screen


def test_every_line_is_explained(ran):
    screen = ran[0]
    assert set(DEFINITIONS) >= {label for label in LABELS[2:-2] if not label.startswith(" ")}
    for label in DEFINITIONS:
        assert screen.count(f"\n{label:<19}") >= 2, label


def test_json_says_what_the_screen_says(ran):
    screen, _, folder = ran
    found = json.loads((folder / "deep" / "run.json").read_text())
    assert set(PROMISED) <= set(found)
    assert not [key for key in PROMISED if found[key] is None and key != "commit"]
    assert found["acceptance_length"] == found["verified_tokens"] / found["verifies"]
    assert sum(found["acceptance_histogram"]) == found["verifies"]
    assert f"{found['acceptance_length']:.2f} tokens/verify ({found['verified_tokens']}/{found['verifies']})" in screen
    assert found["agreement"] == 1.0
    assert found["speedup_bound"] == pytest.approx(found["acceptance_length"])
    assert found["break_even"] == pytest.approx(found["speedup_bound"] / found["speedup"])
    assert found["compilations_while_timing"] == 0
    assert f"{'device':<19}{found['device']}, " in screen
    for each in (found["plain"], found["spec"]):
        assert len(each["cpus_busy"]) == found["repeats"] and all(busy > 0 for busy in each["cpus_busy"])
    assert found["union_one_token"] == 2.0
    assert found["union_uniform"] == pytest.approx(5 * (1 - 0.6**BLOCK))
    assert {"python", "jax", "jaxlib", "flax"} <= set(found["versions"])
    assert [path.name for path in (folder / "deep").iterdir()] == ["run.json"]


def test_a_picture_is_drawn(ran):
    assert (ran[2] / "plots" / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_baseline_nothing_is_compared(given):
    screen, report = run(given(baseline=False))
    labels = labels_of(screen)
    assert not {"baseline", "speedup", "agreement", "why not faster?"} & set(labels)
    assert {"speculative", "acceptance", "where time goes", "verify"} <= set(labels)
    assert report.speedup is None


def test_one_token_leaves_nothing_to_verify(given):
    screen, report = run(given(max_new_tokens=1))
    assert report.speculative.rounds == 0
    assert not {"speedup", "acceptance", "where time goes", "verify", "experts"} & set(labels_of(screen))
    assert "nan" not in screen
    assert "agreement" in labels_of(screen)


def test_rows_of_a_batch_write_what_they_write_alone(given, ran):
    _, together = run(given(batch=2, num_speculative_tokens=BLOCK - 1))
    assert together.speculative.conditions.batch == 2
    assert together.speculative.texts == ran[1].speculative.texts
    assert together.agreement.share == 1.0


def test_a_stream_is_the_text(given, ran):
    args = given(stream=True)
    screen, report = run(args)
    tokenizer = prepare(args).tokenizer
    for prompt, ids in zip(PROMPTS, report.speculative.texts, strict=False):
        said = ids[:-1] if ids[-1] in report.speculative.conditions.stop else ids
        assert prompt["text"] + whole_characters(tokenizer, said) in screen
    assert screen.startswith(PROMPTS[0]["text"]), "of a lossless rule nothing need be said before"


def test_streamed_pieces_know_who_said_them(given, ran):
    """Every round's last token is the target's own; before it come as many drafts as the ledger says."""
    args = given()
    plan = prepare(args)
    pair = load_pair(plan.folders, plan.tokenizer, dtype="float32", experts=None)
    (prompt,), run_of_it = plan.batches[0], ran[1].speculative.repeats[0][0]
    streamed = list(stream_tokens(pair.speculative, prompt, args.max_new_tokens, pair.stop))
    assert [token for token, _ in streamed] == run_of_it.tokens[0]
    marks = [False]
    for count, accepted in zip(run_of_it.counts[0], run_of_it.accepted[0], strict=True):
        marks += [place < accepted for place in range(count)]
    assert [drafted for _, drafted in streamed] == marks


@pytest.mark.parametrize("text", ["a🎉漢🎉", "né 🎉漢字 👩‍💻"])
def test_B62_a_character_waits_for_its_last_token(given, text):
    """Whole, or cut inside its last character, which is then not shown."""
    tokenizer = prepare(given()).tokenizer
    for ids in (tokenizer.encode(text).ids, tokenizer.encode(text).ids[:-2]):
        parts = [piece.text for piece in pieces(((token, False) for token in ids), tokenizer)]
        assert "".join(parts) == whole_characters(tokenizer, ids)
        assert not any("\ufffd" in part for part in parts)
    assert "".join(piece.text for piece in pieces(((i, False) for i in tokenizer.encode(text).ids), tokenizer)) == text
    assert set("🎉漢") < {part.strip() for part in parts}


def test_drafts_are_coloured_and_text_cannot_steer_the_terminal():
    assert shown("a\tb\n\x1b[2J", GREEN, terminal=True) == "\x1b[32ma\tb\n\\x1b[2J\x1b[0m"
    assert shown("a\x07", GREEN, terminal=False) == "a\x07"


def test_the_command_repeats_the_run(given):
    args = given(baseline=False, stream=True, prompt="def f(x): return 'it''s'", block_size=4, dtype="bfloat16")
    words = shlex.split(command(args))
    assert words[:3] == ["python", "-m", "experiments.run_spec"]
    assert tyro.cli(Args, args=words[3:]) == args


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as stopped:
        tyro.cli(Args, description=run_spec.__doc__, args=["--help"])
    shown = capsys.readouterr().out
    assert stopped.value.code == 0
    assert 'run_spec --prompt "def forward(self" --stream' in shown
    assert "--num-speculative-tokens" in shown

"""run_spec --adaptive on a random pair: a screen and a file that say the block sizes, and what it refuses."""

import contextlib
import io
import json
from dataclasses import replace

import pytest

from experiments import run_spec
from experiments.arguments import Args
from experiments.plan import prepare
from tests.experiments.random_pair import BLOCK, write_random_pair


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Args:
    """A short adaptive run with the random pair."""
    target, draft = write_random_pair(tmp_path_factory.mktemp("pairs"))
    return Args(target=target, draft=draft, adaptive=True, max_samples=2, max_new_tokens=24, quiet=True)


@pytest.fixture(scope="module")
def ran(given, tmp_path_factory):
    """One whole run: ``(screen, report, JSON)``."""
    file, out = tmp_path_factory.mktemp("out") / "run.json", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(run_spec, "use_compilation_cache", lambda: None)
        report = run_spec.main(replace(given, json=file))
    return out.getvalue(), report, json.loads(file.read_text())


def test_the_text_is_that_of_plain_decoding(ran) -> None:
    _, report, found = ran
    assert found["agreement"] == 1.0
    assert report.speculative.texts == report.plain.texts
    assert found["speedup"] > 0


def test_screen_and_file_say_the_block_sizes(ran) -> None:
    screen, _, found = ran
    sizes = found["rounds_by_block_size"]
    assert found["adaptive"] is True
    assert {int(size) for size in sizes} <= {1, 2, 3, 4, BLOCK}
    assert sum(sizes.values()) == found["verifies"]
    shares = " ".join(f"{size}:{count / found['verifies']:.0%}" for size, count in sizes.items())
    (line,) = (line for line in screen.splitlines() if line.startswith("  block sizes"))
    assert line.split(maxsplit=2)[2] == shares
    assert f"block 1 to {BLOCK}, adaptive" in screen
    assert "--adaptive" in found["command"]


REFUSALS = {
    "stop": (dict(stop=("x",)), "leave out --stop"),
    "tree": (dict(rule="tree"), "leave out --rule tree"),
    "stream": (dict(stream=True), "leave out --stream"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_it_cannot_do_is_refused(name, given) -> None:
    change, words = REFUSALS[name]
    with pytest.raises(ValueError, match=f"^--adaptive .*: {words}$"):
        prepare(replace(given, **change))

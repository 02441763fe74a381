"""The benchmark's processes: the pipe, with a child that only pretends, and what is said of who cannot be started."""

import sys
from pathlib import Path

import pytest

from experiments.benchmark.llamacpp import LlamaServer
from experiments.benchmark.pipe import Child, Refused, ask_all
from experiments.benchmark.stage import Stage, start_llama, start_peers
from experiments.threads import available_cpus

ROOT = Path(__file__).resolve().parents[2]

FAKE = """
import os, sys
from experiments.benchmark.pipe import serve

def generate(method, prompt, tokens, **variant):
    print("noise that must not reach the pipe")
    return {"tokens": prompt[:1] * tokens, "seconds": 1.0 + 0.5 * tokens, "rounds": tokens - 1, "threads": variant}

def fail():
    raise KeyError("no such thing")

def die():
    print("last words", file=sys.stderr)
    os._exit(3)

serve({"generate": generate, "fail": fail, "die": die, "cpus": lambda: {"cpus": sorted(os.sched_getaffinity(0))}})
"""


@pytest.fixture
def child():
    script = [sys.executable, "-c", FAKE]
    process = Child("fake", script, available_cpus()[:1], {"PYTHONPATH": str(ROOT)})
    yield process
    process.close()


def test_a_child_answers_and_its_prints_stay_out(child):
    answer = child.ask("generate", method="plain", prompt=[5, 6], tokens=3)
    assert (answer["tokens"], answer["seconds"]) == ([5, 5, 5], 2.5)
    assert ask_all([child], "generate", method="plain", prompt=[4], tokens=1)[0]["tokens"] == [4]


def test_a_child_runs_on_its_cpus(child):
    assert child.ask("cpus")["cpus"] == available_cpus()[:1]


def test_a_childs_error_is_a_refusal(child):
    with pytest.raises(Refused, match="fake: KeyError: 'no such thing'"):
        child.ask("fail")
    with pytest.raises(Refused, match="unknown command 'sing'; known: generate, fail, die"):
        child.ask("sing")
    assert child.ask("generate", method="plain", prompt=[1], tokens=1)["tokens"] == [1]


def test_a_dead_child_is_quoted(child):
    with pytest.raises(Refused, match="fake ended with code 3: last words"):
        child.ask("die")
    with pytest.raises(Refused, match="fake"):
        child.ask("generate", method="plain", prompt=[1], tokens=1)


def test_without_the_reference_environment_the_reason_names_the_remedy(tmp_path, capsys):
    stage = Stage()
    start_peers(stage, tmp_path / "python", tmp_path, tmp_path, (1,))
    assert "make reference" in capsys.readouterr().err
    peers = {"plain_over_transformers", "spec_over_transformers_dflash", "spec_over_zlab_dflash"}
    assert set(stage.reasons) == peers
    assert all("make reference" in reason for reason in stage.reasons.values())
    assert not stage.players


def test_llama_cpp_is_left_out_with_a_reason(tmp_path):
    stage = Stage()
    start_llama(stage, None, None, None, 8, (1,))
    assert "--llama-cpp DIR" in stage.reasons["spec_over_llamacpp"]
    with pytest.raises(Refused, match="no llama-server in"):
        LlamaServer(tmp_path, tmp_path, tmp_path, 8, [0])
    (tmp_path / "llama-server").touch()
    with pytest.raises(Refused, match="does not exist; convert the checkpoint"):
        LlamaServer(tmp_path, tmp_path / "t.gguf", tmp_path / "d.gguf", 8, [0])

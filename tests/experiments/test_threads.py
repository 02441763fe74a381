"""A figure that says "1 thread" was computed on one: jax starts on the CPUs of the plan, whatever is checked before."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import machine, runs
from tests.experiments.test_run_spec_report import CONDITIONS, PLAIN, generation

PREPARED = {
    "the laboratory": "from experiments.laboratory.plan import prepare_rules\n"
    "from experiments.laboratory.arguments import Args, settled\n"
    "prepare_rules(settled(Args()))",
    "every pair": "from experiments import run_spec\n"
    "run_spec.run = lambda args, plan, waiting: sys.exit(report())\n"
    "run_spec.main(run_spec.Args(pair='all', quiet=True))",
}
REPORT = """
import sys
from pathlib import Path

def report():
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    print("threads", sum("Eigen" in name for name in names))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's /proc")
@pytest.mark.parametrize("name", PREPARED)
def test_jax_computes_on_one_thread_with_a_shipped_pair(name: str) -> None:
    lines = subprocess.run(
        [sys.executable, "-c", f"{REPORT}\n{PREPARED[name]}\nreport()"], capture_output=True, text=True, check=False
    ).stdout.splitlines()
    assert lines and lines[0] == "threads 1"


class _Scripted:
    """A decoder that says the same at once."""

    def generate(self, *_):
        return generation([3, 4], [2, 3], 0.1)


@pytest.mark.parametrize(("cpus", "threads", "said"), [(1.0, 1, False), (1.9, 1, True), (1.9, 2, False)])
def test_busy_cpus_are_counted(monkeypatch, cpus: float, threads: int, said: bool) -> None:
    """In every repeat; and said where they are more than the threads."""
    clock = iter(range(100))
    monkeypatch.setattr(runs, "_clocks", lambda: np.array([cpus, 1.0]) * next(clock))
    found = runs.run_interleaved({"plain": _Scripted()}, [[[1]], [[2]]], CONDITIONS, repeats=2)
    assert found["plain"].cpus_busy == pytest.approx((cpus, cpus))
    words = runs.crowding([PLAIN, *found.values()], threads)
    assert words == ("1.9 CPUs were busy while 1 should compute: do not trust the speeds" if said else None)


def test_the_clocks_see_threads_that_are_not_jaxs() -> None:
    """A thread that spins beside: what a BLAS does between two calls."""
    code = "import hashlib, threading\nfrom experiments import runs\nbefore = runs._clocks()\n"
    code += "work = lambda: [hashlib.sha256(bytes(1 << 20)).digest() for _ in range(300)]\n"
    code += "threads = [threading.Thread(target=work) for _ in range(2)]\n"
    code += "[each.start() for each in threads]\n[each.join() for each in threads]\n"
    code += "cpu, wall = runs._clocks() - before\nprint(cpu)"
    seconds = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert seconds > 0.05


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="needs Linux's /proc")
def test_a_result_names_its_processor() -> None:
    assert machine.describe().device.startswith("cpu ") and len(machine.describe().device) > len("cpu ")

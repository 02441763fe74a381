"""A figure that says "1 thread" was computed on one: jax starts on the CPUs of the plan, whatever is checked before."""

import subprocess
import sys
from pathlib import Path

import pytest

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

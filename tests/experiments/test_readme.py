"""The screens that README.md shows are those of committed results."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.comparison import cells

ROOT = Path(__file__).parents[2]
LINES = [" ".join(line.split()) for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()]


def result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["pairs", "sampled"])
def test_a_row_per_pair(name: str) -> None:
    for found in result(name)["pairs"].values():
        assert " ".join(cells(found)) in LINES


def test_another_processor_says_the_same_tokens() -> None:
    """And other speeds, which README and docs/slower.md tell."""
    here, there = result("run_spec"), result("run_spec_zen4")
    for same in ("verified_tokens", "verifies", "acceptance_histogram", "prompt_hash", "agreement"):
        assert here[same] == there[same], same
    text = " ".join(LINES)
    assert f"five rows in {there['verify_ratio']:.2f} times the time of one, the same command shows " in text
    assert f"the same command shows {there['speedup']:.2f}x with the same tokens" in text
    counted = [
        [
            (block["size"], block["verified_tokens"], block["verifies"])
            for pair in each["pairs"]
            for block in pair["blocks"]
        ]
        for each in (result("sweep_block"), result("sweep_block_zen4"))
    ]
    assert counted[0] == counted[1]


def test_the_first_screen() -> None:
    found = result("run_spec")
    (least, most), middle = found["speedup_spread"], found["speedup"]
    for label, words in (
        ("baseline", f"{found['plain_tok_s']:.1f} tok/s ("),
        ("speculative", f"{found['spec_tok_s']:.1f} tok/s ("),
        ("speedup", f"{middle:.2f}x ({least:.2f}-{most:.2f})"),
        ("speedup", f"break-even acceptance {found['break_even']:.2f}"),
        (
            "acceptance",
            f"{found['acceptance_length']:.2f} tokens/verify ({found['verified_tokens']:,}/{found['verifies']:,})",
        ),
        ("verify", f"width {found['block_size']} costs {found['verify_ratio']:.2f}x width 1"),
        ("experts", f"verify union {found['union_mean']:.2f}/{found['experts']} per layer"),
        ("reproduce", "python -m experiments.run_spec"),
    ):
        (line,) = (line for line in LINES if line.startswith(f"{label} "))
        assert words in line, label

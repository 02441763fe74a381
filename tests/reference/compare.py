"""Compare a fresh set of goldens with the stored one."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file


def difference(stored: torch.Tensor, fresh: torch.Tensor, tolerance: float) -> str | None:
    """What is wrong with `fresh`, or None. Floats may move by `tolerance * max(1, std)`, all else not at all."""
    if stored.dtype != fresh.dtype or stored.shape != fresh.shape:
        return f"{stored.dtype} {tuple(stored.shape)} became {fresh.dtype} {tuple(fresh.shape)}"
    if not stored.is_floating_point() or tolerance == 0:
        return None if torch.equal(stored, fresh) else f"{int((stored != fresh).sum())} values differ"
    worst = (stored.double() - fresh.double()).abs().max().item()
    allowed = tolerance * max(1.0, stored.double().std().item())
    return None if worst <= allowed else f"max abs diff {worst:.3e}, allowed {allowed:.3e}"


def compare_tensors(stored: Path, fresh: Path, tolerance: float) -> Iterator[str]:
    """One line per tensor of a safetensors file that moved, appeared or disappeared."""
    before, after = load_file(stored), load_file(fresh)
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            yield f"{name}: only in the {'stored' if name in before else 'fresh'} goldens"
        elif problem := difference(before[name], after[name], tolerance):
            yield f"{name}: {problem}"


def compare_json(stored: Path, fresh: Path) -> Iterator[str]:
    """JSON must be equal, but for the `observed` figures, which are for the reader."""
    before, after = json.loads(stored.read_text()), json.loads(fresh.read_text())
    for name in sorted(before.keys() | after.keys()):
        if name != "observed" and before.get(name) != after.get(name):
            yield f"{name}: {before.get(name)} became {after.get(name)}"


def compare_case(stored: Path, fresh: Path) -> list[str]:
    """Everything that moved in one case folder, as printable lines."""
    files = {root: {path.relative_to(root) for path in root.rglob("*") if path.is_file()} for root in (stored, fresh)}
    lines = [f"{path}: only in one of the two sets" for path in sorted(files[stored] ^ files[fresh])]
    tolerance = json.loads((fresh / "case.json").read_text())["tolerance"]
    for path in sorted(files[stored] & files[fresh]):
        if path.suffix == ".json":
            moved = compare_json(stored / path, fresh / path)
        else:
            expected = path.name == "expected.safetensors"
            moved = compare_tensors(stored / path, fresh / path, tolerance if expected else 0.0)
        lines += [f"{path}: {line}" for line in moved]
    return lines

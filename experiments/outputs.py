"""Where results go, looked at before anything is measured."""

import os
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path

FOLDER = "--plots"


def check_outputs(outputs: Mapping[str, Path | None]) -> None:
    """Refuse outputs that could not be written, or stand in each other's way: one path for two, or a file where another
    needs a folder.

    Args:
        outputs: flag -> its path; that of :data:`FOLDER` is a folder.

    Raises:
        ValueError: naming flag and path.
    """
    given = {flag: path for flag, path in outputs.items() if path is not None}
    for flag, path in given.items():
        _check(flag, path, folder=flag == FOLDER)
    for (flag, path), (other, its) in permutations(given.items(), 2):
        if path.resolve() == its.resolve():
            raise ValueError(f"{flag} {path} and {other} {its} are one path; expected two, give one another name")
        if flag != FOLDER and path.resolve() in its.resolve().parents:
            raise ValueError(f"{flag} {path} is a file, and {other} {its} needs it as a folder; give one another name")


def _check(flag: str, path: Path, *, folder: bool) -> None:
    if path.exists() and path.is_dir() != folder:
        is_a, expected = ("file", "folder") if folder else ("folder", "file")
        raise ValueError(f"{flag} {path} is a {is_a}; expected a {expected}")
    above = next(place for place in (path, *path.absolute().parents) if place.exists())
    if above != path and not above.is_dir():
        raise ValueError(f"{flag} {path}: {above} is a file; expected a folder")
    if not os.access(above, os.W_OK):
        raise ValueError(f"{flag} {path}: {above} cannot be written to; name another place")

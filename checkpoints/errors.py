"""The one error of this floor: everything that is wrong with a folder, said at once."""

from collections.abc import Iterable
from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint that cannot be used.

    Attributes:
        folder: the checkpoint's folder.
        problems: one sentence each: the file, tensor or key, what was expected, what was found and what to try.
    """

    def __init__(self, folder: Path | str, problems: Iterable[str]):
        self.folder, self.problems = Path(folder), tuple(problems)
        count = len(self.problems)
        head = f"{self.folder}: {'one problem' if count == 1 else f'{count} problems'}"
        super().__init__("\n  - ".join([head, *self.problems]))


def raise_if(folder: Path | str, problems: Iterable[str]) -> None:
    """Raise one :class:`CheckpointError` with all the problems, if there are any."""
    problems = tuple(problems)
    if problems:
        raise CheckpointError(folder, problems)

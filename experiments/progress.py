"""What the user sees while waiting. On stderr, so that the summary on stdout stays clean."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Waiting:
    """Spinners and bars on a terminal, plain lines elsewhere, nothing if ``quiet``."""

    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self.console = Console(stderr=True, quiet=quiet, highlight=False)

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """While something of unknown length goes on."""
        if self.console.is_terminal and not self.quiet:
            with self.console.status(what):
                yield
        else:
            self.console.print(f"{what} ...", soft_wrap=True)
            yield

    @contextmanager
    def through(self, what: str, total: int) -> Iterator[Callable[[str], None]]:
        """A bar of ``total`` steps; call the value with a note after each."""
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        if not self.console.is_terminal:
            self.console.print(f"{what} ({total} generations) ...", soft_wrap=True)
        with Progress(
            *columns, console=self.console, transient=True, disable=self.quiet or not self.console.is_terminal
        ) as bar:
            task = bar.add_task(what, total=total)
            yield lambda note: bar.update(task, advance=1, description=f"{what}: {note}")

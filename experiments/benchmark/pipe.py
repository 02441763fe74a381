"""Contestants as processes of their own: one JSON object a line goes in, one a line comes out.

Threads are a property of a process (XLA sizes its pool when it starts, OpenMP too), so that every thread setting of
every contestant is a child of its own; the parent asks them in turn. Standard library only: the PyTorch environment
imports this file too.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.threads import pinned

PATIENCE_S = 1200.0
"""Longest wait for one answer."""


class Refused(RuntimeError):
    """What a child said instead of a result, or how it ended."""


def serve(commands: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer requests from stdin until ``quit`` or its end. Whatever else is printed goes to stderr.

    A request is an object with ``command`` and that command's arguments; an answer is what the command returned, or
    ``{"error": ...}``.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("command")
        if name == "quit":
            break
        try:
            if name not in commands:
                raise ValueError(f"unknown command {name!r}; known: {', '.join(commands)}")
            answer = commands[name](**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


class Child:
    """A process that :func:`serve`\\ s. ``name`` appears in messages."""

    def __init__(self, name: str, command: Sequence[str], cpus: Sequence[int], environment: Mapping[str, str]):
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (until close)
        with pinned(cpus):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env={**os.environ, **environment},
            )

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            Refused: with the child's own words.
        """
        self.send(command, **arguments)
        return self.receive()

    def send(self, command: str, **arguments: Any) -> None:
        """Send a request; :meth:`receive` must follow before the next one."""
        try:
            print(json.dumps({"command": command, **arguments}), file=self._process.stdin, flush=True)
        except OSError as error:
            raise Refused(f"{self.name} is gone ({error}): {self._last_words()}") from None

    def receive(self, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """The answer to the last request."""
        if not select.select([self._process.stdout], [], [], patience_s)[0]:
            raise Refused(f"{self.name} did not answer within {patience_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise Refused(f"{self.name} ended with code {self._process.wait()}: {self._last_words()}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise Refused(f"{self.name} answered {line.strip()[:200]!r}, which is not JSON") from None
        if "error" in answer:
            raise Refused(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Ask it to quit; end it if it does not."""
        with contextlib.suppress(OSError):
            print(json.dumps({"command": "quit"}), file=self._process.stdin, flush=True)
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return lines[-1] if lines else "it said nothing"


def ask_all(children: Sequence[Child], command: str, **arguments: Any) -> list[dict[str, Any] | Refused]:
    """The same request to several children at once: for what is not timed. A refusal takes the place of its answer."""
    for child in children:
        child.send(command, **arguments)
    answers: list[dict[str, Any] | Refused] = []
    for child in children:
        try:
            answers.append(child.receive())
        except Refused as refusal:
            answers.append(refusal)
    return answers

"""llama.cpp as a speed peer: its server with a DFlash drafter, asked over HTTP like every other contestant.

Build it and convert both checkpoints with llama.cpp's own tools (``convert_hf_to_gguf.py TARGET --outtype f32``, and
``convert_hf_to_gguf.py DRAFTER --target-model-dir TARGET --outtype f32``); then give ``--llama-cpp``,
``--llama-target`` and ``--llama-draft``. Its arithmetic is its own: in another format than float32 its text may differ.
"""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.benchmark.pipe import Refused
from experiments.threads import pinned

START_S = 120.0
ANSWER_S = 600.0


class LlamaServer:
    """A running ``llama-server``; answers the same requests as a :class:`~experiments.benchmark.pipe.Child`."""

    def __init__(self, folder: Path, target: Path, draft: Path, block: int, cpus: Sequence[int]):
        """Start the server on a free port and wait until it is healthy.

        Raises:
            Refused: if the binary or a file is missing, or the server does not come up.
        """
        binary = next((p for p in (folder / "llama-server", folder / "bin" / "llama-server") if p.is_file()), None)
        if binary is None:
            raise Refused(f"no llama-server in {folder}")
        for file in (target, draft):
            if not file.is_file():
                raise Refused(f"{file} does not exist; convert the checkpoint with llama.cpp's convert_hf_to_gguf.py")
        self.address = f"http://127.0.0.1:{free_port()}"
        command = [str(binary), "-m", str(target), "-md", str(draft), "--spec-type", "draft-dflash"]
        command += ["--spec-draft-n-max", str(block - 1), "-t", str(len(cpus)), "--host", "127.0.0.1"]
        command += ["--port", self.address.rsplit(":", 1)[1], "--parallel", "1"]
        with pinned(cpus):
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._wait()

    def ask(self, command: str, **request: Any) -> dict[str, Any]:
        """Only ``generate``. The server counts drafts, not rounds: every round adds one token to the accepted ones."""
        if command != "generate":
            raise Refused(f"llama.cpp does not know {command!r}")
        body = {
            "prompt": request["prompt"],
            "n_predict": request["tokens"],
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        started = time.perf_counter()
        answer = self._post("/completion", body)
        seconds, timings = time.perf_counter() - started, answer.get("timings", {})
        tokens = answer.get("tokens") or []
        rounds = len(tokens) - 1 - timings["draft_n_accepted"] if "draft_n_accepted" in timings else None
        return {"tokens": tokens, "seconds": seconds, "rounds": rounds}

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
                return json.load(reply)
        except (OSError, ValueError) as error:
            raise Refused(f"llama-server: {error}") from None

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise Refused(f"llama-server ended with code {self._process.returncode}")
            try:
                with urllib.request.urlopen(self.address + "/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.close()
        raise Refused(f"llama-server was not healthy within {START_S:.0f} s")


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

"""Starting the contestants: which processes, on which CPUs, and why one is left out."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.benchmark.contest import PLAIN, RATIOS, SPEC
from experiments.benchmark.llamacpp import LlamaServer
from experiments.benchmark.pipe import Child, Refused
from experiments.threads import available_cpus

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("transformers", "transformers_dflash", "zlab_dflash")
LLAMA = "llamacpp"
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


def ratio_of(peer: str) -> str:
    """The key of the JSON in which a peer appears."""
    return next(name for name, (_, second) in RATIOS.items() if second == peer)


@dataclass
class Stage:
    """The started contestants.

    Attributes:
        ours, peers, llama: thread setting -> its process.
        options: contestant -> what there is to choose from.
        versions: of everything that computes.
        reasons: key of the JSON -> why it will be null.
    """

    ours: dict[int, Child] = field(default_factory=dict)
    peers: dict[int, Child] = field(default_factory=dict)
    llama: dict[int, LlamaServer] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def players(self) -> dict[tuple[str, int], Any]:
        """(contestant, threads) -> who decodes it; who cannot is left out."""
        found = {(name, threads): child for threads, child in self.ours.items() for name in (PLAIN, SPEC)}
        able = [name for name in PEERS if ratio_of(name) not in self.reasons]
        found |= {(name, threads): child for threads, child in self.peers.items() for name in able}
        return found | {(LLAMA, threads): server for threads, server in self.llama.items()}

    def leave_out(self, peer: str, reason: str) -> None:
        self.reasons.setdefault(ratio_of(peer), reason)

    def close(self) -> None:
        for each in (*self.ours.values(), *self.peers.values(), *self.llama.values()):
            each.close()

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def start_ours(stage: Stage, target: Path, draft: Path, threads: Sequence[int]) -> None:
    """Our own children, loaded.

    Raises:
        Refused: nothing can be measured without them.
    """
    cache = Path(os.environ.get("DFLASH_JAX_CACHE") or Path.home() / ".cache" / "dflash_jax")
    for count in threads:
        flags = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD if count == 1 else ''}".strip()
        settings = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
        settings |= {"PYTHONPATH": str(ROOT), "DFLASH_JAX_CACHE": str(cache / f"bench-{count}")}
        command = [sys.executable, "-m", "experiments.benchmark.ours"]
        stage.ours[count] = Child(f"ours, threads {count}", command, cpus_for(count), settings)
    for answer in _load(stage.ours, target, draft):
        if isinstance(answer, Refused):
            raise answer
        stage.versions |= answer["versions"]
        stage.options |= {PLAIN: {"form": answer["options"]["form"]}, "about ours": answer["options"]}


def start_peers(stage: Stage, python: Path, target: Path, draft: Path, threads: Sequence[int]) -> None:
    """The PyTorch children, loaded; each one that cannot run is left out with a reason."""
    if not python.is_file():
        missing = f"no PyTorch environment ({python} does not exist): run `make reference`"
        print(f"transformers and dflash are left out, {missing} or give --reference-python", file=sys.stderr)
        for name in PEERS:
            stage.leave_out(name, missing)
        return
    for count in threads:
        settings = {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count), "PYTHONPATH": str(ROOT)}
        settings |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
        command = [str(python), str(ROOT / "tests" / "reference" / "peers.py")]
        stage.peers[count] = Child(f"peers, threads {count}", command, cpus_for(count), settings)
    for answer in _load(stage.peers, target, draft):
        if isinstance(answer, Refused):
            for name in PEERS:
                stage.leave_out(name, str(answer))
            continue
        stage.versions |= answer["versions"]
        implementations = answer["options"]
        stage.options |= {name: {"block": [], "experts": implementations["experts"]} for name in PEERS[1:]}
        stage.options["transformers"] = implementations
        for name, reason in answer["refused"].items():
            stage.leave_out(name, reason)


def start_llama(
    stage: Stage, folder: Path | None, target: Path | None, draft: Path | None, block: int, threads: Sequence[int]
) -> None:
    """One llama.cpp server per thread setting, if its binaries are given."""
    if folder is None:
        stage.leave_out(LLAMA, "no binaries: give --llama-cpp DIR, --llama-target GGUF and --llama-draft GGUF")
        return
    try:
        for count in threads:
            stage.llama[count] = LlamaServer(folder, target, draft, block, cpus_for(count))
    except Refused as refusal:
        stage.leave_out(LLAMA, str(refusal))


def cpus_for(threads: int) -> list[int]:
    """The last CPUs that this process may use: the first ones have the most to do for the system."""
    return available_cpus()[-threads:]


def _load(children: dict[int, Child], target: Path, draft: Path) -> list[dict[str, Any] | Refused]:
    """Load everywhere at once."""
    for count, child in children.items():
        child.send("load", target=str(target.resolve()), drafter=str(draft.resolve()), threads=count)
    answers: list[dict[str, Any] | Refused] = []
    for child in children.values():
        try:
            answers.append(child.receive())
        except Refused as refusal:
            answers.append(refusal)
    return answers

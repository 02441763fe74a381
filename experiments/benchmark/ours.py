"""This project as one of the benchmark's contestants: a child that decodes, and measures what only it can see.

Started by :mod:`experiments.bench` with its CPUs and ``XLA_FLAGS`` already set.
"""

import importlib.metadata
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp

from checkpoints.load import load_drafter, load_target, read_config
from dflash_jax import moe
from dflash_jax.cache import Cache
from dflash_jax.generate import Decoder
from dflash_jax.protocols import Drafter, Params, StepOut, Target
from dflash_jax.shapes import Array, Int
from dflash_jax.tree import Tree
from experiments.benchmark import probes
from experiments.benchmark.pipe import serve
from experiments.compilation import use_compilation_cache
from models.target import FlaxTarget

PACKAGES = ("jax", "jaxlib", "flax")
SHIPPED, ALL, PACKED = "as shipped", "all experts", "packed"


@dataclass(frozen=True)
class AllExperts(FlaxTarget):
    """A target that computes every expert of a layer, whatever the number of tokens."""

    def step(self, params: Params, tokens: Int[Array, "B T"], cache: Cache, tree: Tree | None = None) -> StepOut:
        with mock.patch.object(moe, "_used_experts", lambda x, share, used, *rest: moe._all_experts(x, share, *rest)):
            return super().step(params, tokens, cache, tree)


@dataclass
class Ours:
    """The loaded pair and the commands that the benchmark sends.

    ``forms``: name of a form of the experts -> the target and parameters in it.
    """

    forms: dict[str, tuple[Target, Params]] = field(default_factory=dict)
    drafter: Drafter | None = None
    draft_params: Params = None
    probes: dict[int, "probes.RoundProbe"] = field(default_factory=dict)

    def load(self, target: str, drafter: str, threads: int) -> dict[str, Any]:
        """Load both networks in float32, the experts in every form that plain decoding may choose from."""
        use_compilation_cache()
        self.threads = threads
        self.drafter, self.draft_params = load_drafter(Path(drafter), Path(target))
        kinds = dict(dtype=jnp.dtype("float32"), taps=self.drafter.config.taps)
        network, params = load_target(Path(target), **kinds)
        layout = getattr(network.module, "layout", "dense")
        self.forms = {SHIPPED: (network, params)}
        if layout == "split":
            self.forms[ALL] = (AllExperts(network.module), params)
        if "quantization_config" in read_config(Path(target)) and layout != "packed":
            self.forms[PACKED] = load_target(Path(target), experts="packed", **kinds)
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        options = {"form": list(self.forms), "layout": layout, "trained_block": self.drafter.block_size}
        return {"versions": versions, "refused": {}, "options": options}

    def generate(
        self, method: str, prompt: list[int], tokens: int, form: str = SHIPPED, block: int | None = None
    ) -> dict[str, Any]:
        """Greedy ids after ``prompt``, stop ids off, and what they took; ``method`` is "plain" or "spec"."""
        decoder = self._decoder(form, block if method == "spec" else None)
        cpu, started = time.process_time(), time.perf_counter()
        made = decoder.generate([prompt], tokens)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        union = float(made.union.mean()) if made.union.size else None
        return {
            "tokens": made.tokens[0],
            "seconds": seconds,
            "cpu_seconds": cpu,
            "rounds": made.rounds,
            "union": union,
        }

    def warm(self, method: str, prompt: list[int], tokens: int, variants: list[dict[str, Any]]) -> dict[str, Any]:
        """Compile what :meth:`generate` will need."""
        for variant in variants:
            for count in (1, tokens):
                self.generate(method, prompt, count, **variant)
        return {}

    def prepare_probe(self, block: int, prompt: list[int], tokens: int) -> dict[str, Any]:
        """Compile the parts of a round."""
        self.probes[block] = probes.RoundProbe(self._decoder(SHIPPED, block), prompt, tokens)
        return {}

    def probe(self, block: int, turns: int) -> dict[str, Any]:
        """Time rounds of the compiled loop and their parts in turn."""
        return self.probes[block].measure(turns)

    def cache_copies(self, form: str, blocks: list[int], prompt: list[int], tokens: int) -> dict[str, Any]:
        """Cache-shaped copies in the loop's program: plain decoding's, and speculative decoding's for each block."""
        programs = {"plain": self._decoder(form, None)}
        programs |= {str(block): self._decoder(SHIPPED, block) for block in blocks}
        return {name: probes.loop_copies(each, prompt, tokens) for name, each in programs.items()}

    def flatness(self, form: str, prompt: list[int], tokens: int, repeats: int) -> dict[str, Any]:
        """Time per token of plain decoding over the committed length."""
        return probes.flatness(self._decoder(form, None), prompt, tokens, repeats)

    def bandwidth(self, form: str, union: float | None) -> dict[str, Any]:
        """Bytes of weights that one plain token reads, and this machine's copy bandwidth on our threads."""
        target, params = self.forms[form]
        read = probes.token_bytes(target, params, target.experts if form == ALL else union)
        return {"token_bytes": read, "bytes_per_s": probes.copy_bandwidth(self.threads)}

    def _decoder(self, form: str, block: int | None) -> Decoder:
        target, params = self.forms[form]
        if block is None:
            return Decoder(target, params)
        return Decoder(target, params, replace(self.drafter, block_size=block), self.draft_params)


if __name__ == "__main__":
    ours = Ours()
    names = ("load", "generate", "warm", "prepare_probe", "probe", "cache_copies", "flatness", "bandwidth")
    serve({name: getattr(ours, name) for name in names})

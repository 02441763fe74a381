"""The persistent compilation cache, and a count of what was compiled."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.monitoring

PARTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
"""Events whose seconds make up a compilation; the last one comes once per program."""

HIT = "/jax/compilation_cache/cache_hits"


def use_compilation_cache() -> Path:
    """Keep compiled programs in ``$DFLASH_JAX_CACHE/xla`` (default ``~/.cache/dflash_jax/xla``)."""
    folder = Path(os.environ.get("DFLASH_JAX_CACHE") or Path.home() / ".cache" / "dflash_jax") / "xla"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


@dataclass
class CompileWatch:
    """While entered, counts the programs that jax builds.

    Attributes:
        seconds: tracing, lowering and compiling, or reading from the cache.
        compiled: seconds of the last two for each program, in order.
        hits: programs that were read from the persistent cache.
    """

    seconds: float = 0.0
    compiled: list[float] = field(default_factory=list)
    hits: int = 0

    @property
    def programs(self) -> int:
        return len(self.compiled)

    def __enter__(self) -> "CompileWatch":
        jax.monitoring.register_event_duration_secs_listener(self._duration)
        jax.monitoring.register_event_listener(self._event)
        return self

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._duration)
        jax.monitoring.unregister_event_listener(self._event)

    def _duration(self, name: str, seconds: float, **details: object) -> None:
        if name in PARTS:
            self.seconds += seconds
        if name == PARTS[-1]:
            self.compiled.append(seconds)

    def _event(self, name: str, **details: object) -> None:
        self.hits += name == HIT

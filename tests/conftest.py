"""Jaxtyping's import hook checks every shape in every signature while the tests run; laws run in float64."""

from jaxtyping import install_import_hook

from tests.support.typechecking import functions_only

CHECKER = f"{functions_only.__module__}.{functions_only.__name__}"
install_import_hook(["dflash_jax", "models", "kernels_pallas"], CHECKER)

import gc  # noqa: E402
import shutil  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_enable_x64", True)
gc.set_threshold(100_000, 20, 20)  # tracing makes many objects and little garbage

PROGRAMS = pytest.StashKey[str]()

ROUGHLY_COMPILED = ("models", "laws", "loop")
EXACTLY_COMPILED = ("loop/test_widths.py", "loop/test_compilation.py", "loop/test_donation.py")
"""Compiled without LLVM's optimisations, which cost a third of the time: many programs, each run a few times, most in
float64, that are compared with themselves on other inputs or with a definition. All other tests see the compiler as it
is: those of low precision and of what a program looks like, of parity (float32 rounds otherwise without them), of the
shipped pairs and of the experiments."""


def roughly(item: pytest.Item) -> bool:
    within = item.path.relative_to(Path(__file__).parent)
    return within.parts[0] in ROUGHLY_COMPILED and within.as_posix() not in EXACTLY_COMPILED


def pytest_configure(config: pytest.Config) -> None:
    """A program that one worker or folder has compiled is read by the others; the next run starts with none. It is
    found by its whole HLO, so a mutated program is compiled, and a read one counts as a compilation."""
    folder = getattr(config, "workerinput", {}).get("programs")
    if folder is None:
        folder = tempfile.mkdtemp(prefix="programs-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    config.stash[PROGRAMS] = folder
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    node.workerinput["programs"] = node.config.stash[PROGRAMS]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first: no worker is left alone with it at the end."""
    items.sort(key=lambda item: item.path.parent.name != "pairs")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    jax.config.update("jax_disable_most_optimizations", roughly(item))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Compiled programs are forgotten from folder to folder: one process that keeps all of them runs out of memory maps
    (``vm.max_map_count``), and the compiler then crashes. Roughly compiled ones are not used elsewhere."""
    if nextitem is None:
        return
    if nextitem.path.parent != item.path.parent or roughly(nextitem) != roughly(item):
        jax.clear_caches()

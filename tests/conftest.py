"""Jaxtyping's import hook checks every shape in every signature while the tests run; laws run in float64."""

from jaxtyping import install_import_hook

from tests.support.typechecking import functions_only

CHECKER = f"{functions_only.__module__}.{functions_only.__name__}"
install_import_hook(["dflash_jax", "models", "kernels_pallas"], CHECKER)

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_enable_x64", True)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Compiled programs are forgotten from folder to folder: one process that keeps all of them runs out of memory maps
    (``vm.max_map_count``), and the compiler then crashes."""
    if nextitem is not None and nextitem.path.parent != item.path.parent:
        jax.clear_caches()

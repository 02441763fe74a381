"""Jaxtyping's import hook checks every shape in every signature while the tests run; laws run in float64."""

from jaxtyping import install_import_hook

from tests.support.typechecking import functions_only

CHECKER = f"{functions_only.__module__}.{functions_only.__name__}"
install_import_hook(["dflash_jax", "models", "kernels_pallas"], CHECKER)

import jax  # noqa: E402

jax.config.update("jax_enable_x64", True)

"""What the import hook checks: the signatures of functions, not the fields of dataclasses.

``eval_shape``, ``vmap`` and ``tree.map`` rebuild a pytree around whatever they carry: shapes, axes, ``None``. A field's
type is documentation; the functions that take the value check its arrays.
"""

from beartype import beartype


def functions_only(function):
    """``beartype``, except for the ``__init__`` of a dataclass."""
    return function if function.__name__ == "__init__" else beartype(function)

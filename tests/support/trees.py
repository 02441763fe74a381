"""Trees for tests, row by row, and the paths in them."""

from collections.abc import Callable

import numpy as np

SHAPES: dict[str, Callable[[int, np.random.Generator], list[int]]] = {
    "chain": lambda nodes, rng: [*range(-1, nodes - 1)],
    "star": lambda nodes, rng: [-1] + [0] * (nodes - 1),
    "comb": lambda nodes, rng: [max(i - 2 + i % 2, -1) if i else -1 for i in range(nodes)],
    "random": lambda nodes, rng: [-1] + [int(rng.integers(0, i)) for i in range(1, nodes)],
    "short": lambda nodes, rng: [-1, 0, 0, 2, 2][:nodes] + [0] * (nodes - 5),
    "late": lambda nodes, rng: [-1] + [0] * (nodes - 4) + [nodes - 4, nodes - 3, nodes - 2],
    "forks": lambda nodes, rng: [-1] + [(i - 1) // 2 for i in range(1, nodes)],
}
"""name -> parents of one row. "comb": a spine of every other node, a tooth on each; "short": five nodes, the rest not
used; "late": the nodes that are not used come first."""


def parents(nodes: int, shapes: list[str], rng: np.random.Generator) -> np.ndarray:
    """int32 ``[B T]``: one shape a row."""
    return np.array([SHAPES[shape](nodes, rng) for shape in shapes], np.int32)


def path_to(parent: np.ndarray, node: int) -> list[int]:
    """From the root to a node of one row, by going up."""
    path = [node]
    while path[0] != 0:
        path.insert(0, int(parent[path[0]]))
    return path


def deepest(parent: np.ndarray) -> int:
    """The node of one row whose path is the longest."""
    return max(range(len(parent)), key=lambda node: len(path_to(parent, node)))


def padded(paths: list[list[int]], width: int) -> np.ndarray:
    """int32 ``[B width]``: the paths, filled up with a node that exists."""
    return np.array([(path + [1] * width)[:width] for path in paths], np.int32)

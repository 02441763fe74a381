"""Trees by themselves: who follows whom, the delta rule over branches, and what moves when a path is followed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import cache as caches
from dflash_jax import delta
from dflash_jax.cache import Cache, Slots
from dflash_jax.delta import Tokens
from dflash_jax.tree import Tree, lineage
from tests.support.trees import SHAPES, parents, path_to

TAPS = 4


@pytest.mark.parametrize("nodes", [5, 17, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_depth_and_ancestors_are_those_of_going_up(shape: str, nodes: int) -> None:
    parent = parents(nodes, [shape, "random"], np.random.default_rng(nodes))
    tree = Tree(jnp.asarray(parent))
    depth, ancestors = jax.device_get(jax.jit(lambda tree: (tree.depth, tree.ancestors))(tree))
    for row in range(2):
        for node in range(nodes):
            path = path_to(parent[row], node)
            assert depth[row, node] == len(path) - 1
            assert np.flatnonzero(ancestors[row, node]).tolist() == path


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_the_smallest_trees(nodes: int) -> None:
    tree = Tree(jnp.asarray(parents(nodes, ["chain", "star"], np.random.default_rng(0))))
    assert tree.depth.tolist() == [list(range(nodes)), [0] + [1] * (nodes - 1)]
    np.testing.assert_array_equal(tree.ancestors[0], np.tri(nodes, dtype=bool))


def test_a_lineage_goes_on_before_the_root() -> None:
    parent = parents(8, ["random", "chain", "star", "late"], np.random.default_rng(3))
    found = np.asarray(jax.jit(lineage, static_argnums=1)(jnp.asarray(parent), TAPS))
    for row in range(4):
        for node in range(8):
            assert found[row, node].tolist() == ([-3, -2, -1, *path_to(parent[row], node)])[-TAPS:]


def random_tokens(rng: np.random.Generator, nodes: int, decay: float, dtype: str) -> tuple[np.ndarray, Tokens]:
    """A state, and tokens whose log decays reach ``-decay``."""
    rows, heads, repeat, key, value = 2, 3, 2, 5, 7
    tokens = Tokens(
        q=rng.standard_normal((rows, nodes, heads, key)),
        k=np.asarray(delta.unit(jnp.asarray(rng.standard_normal((rows, nodes, heads, key))))),
        v=rng.standard_normal((rows, nodes, heads, repeat, value)),
        g=-decay * rng.random((rows, nodes, heads, repeat)),
        beta=rng.random((rows, nodes, heads, repeat)),
    )
    state = rng.standard_normal((rows, heads, repeat, key, value))
    return state.astype(dtype), jax.tree.map(lambda leaf: leaf.astype(dtype), tokens)


@pytest.mark.parametrize(
    ("decay", "dtype", "tolerance"), [(0.7, "float64", 1e-12), (300.0, "float64", 1e-12), (90.0, "float32", 1e-4)]
)
def test_branches_are_the_recurrence_along_each_path(decay: float, dtype: str, tolerance: float) -> None:
    """Decays of ``e^-300`` a token: between branches the differences of their sums overflow if they are not masked."""
    rng, nodes = np.random.default_rng(5), 12
    parent = parents(nodes, ["random", "comb"], rng)
    state, tokens = random_tokens(rng, nodes, decay, dtype)
    hear = jax.jit(delta.branched, static_argnames="keep_states")
    read = hear(state, tokens, Tree(jnp.asarray(parent)).ancestors, keep_states=True)
    recurrent = jax.jit(delta.recurrent, static_argnames="keep_states")
    for row in range(2):
        for node in range(nodes):
            path = np.array((path_to(parent[row], node) + [node] * nodes)[:nodes])
            last = len(path_to(parent[row], node)) - 1
            one = jax.tree.map(lambda leaf, row=row, path=path: leaf[row : row + 1, path], tokens)
            alone = recurrent(state[row : row + 1], one, keep_states=True)
            for name in ("out", "written", "states"):
                found, want = getattr(read, name)[row, node], getattr(alone, name)[0, last]
                np.testing.assert_allclose(found, want, rtol=tolerance, atol=tolerance, err_msg=f"{name} of {node}")


@pytest.mark.parametrize("size", [1, 2, 17, 64])
@pytest.mark.parametrize("alike", [0.3, 1.0])
def test_the_solve_and_its_gradient_are_those_of_the_library(size: int, alike: float) -> None:
    """Also where every key is the same and nothing decays: powers of such a system reach 10^18, solving it row after
    row does not."""
    rng = np.random.default_rng(size)
    strict = np.tril(np.full((2, 3, size, size), alike) * rng.uniform(0.9, 1.0, (2, 3, 1, 1)), -1)
    wanted = rng.standard_normal((2, 3, size, 5))
    expected = np.linalg.solve(strict + np.eye(size), wanted)
    for solve in (delta.solve_unit_lower, delta.forward_substitution, delta.library_solve):
        np.testing.assert_allclose(jax.jit(solve)(strict, wanted), expected, rtol=1e-12, atol=1e-12)

    def lower_part(solve) -> tuple[np.ndarray, np.ndarray]:
        by_strict, by_wanted = jax.jit(jax.grad(lambda *given: jnp.tanh(solve(*given)).sum(), argnums=(0, 1)))(
            strict, wanted
        )
        return np.tril(by_strict, -1), np.asarray(by_wanted)

    gradient = jax.make_jaxpr(jax.grad(lambda *given: delta.solve_unit_lower(*given).sum()))(strict, wanted)
    assert "precision=(Precision.HIGHEST, Precision.HIGHEST)" in str(gradient), "TF32 on a GPU otherwise"
    for mine, theirs in zip(lower_part(delta.solve_unit_lower), lower_part(delta.library_solve), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-11, atol=1e-11)


def numbered(size: int, ring: bool) -> Slots:
    """Slots that hold their own numbers."""
    k = jnp.broadcast_to(jnp.arange(size, dtype=jnp.float64)[None, None, :, None], (2, 1, size, 3))
    return Slots(k=k, v=k[..., :1] + 100, window=2 if ring else None, ring=ring)


@pytest.mark.parametrize("ring", [False, True])
def test_only_a_path_is_moved(ring: bool) -> None:
    cache = Cache(length=jnp.array([14, 14], jnp.int32), layers=(numbered(10 if ring else 16, ring),))
    start, path = jnp.array([8, 7], jnp.int32), jnp.array([[0, 3, 5], [0, 1, 4]], jnp.int32)
    after = jax.jit(caches.follow)(cache, start, path)
    size = 10 if ring else 16
    want = [list(range(size)) for _ in range(2)]
    for row, (begin, nodes) in enumerate(((8, (0, 3, 5)), (7, (0, 1, 4)))):
        for place, node in enumerate(nodes):
            want[row][(begin + place) % size] = (begin + node) % size
    assert after.layers[0].k[:, 0, :, 0].tolist() == want
    assert (after.layers[0].v[:, 0, :, 0] - 100).tolist() == want
    assert after.length.tolist() == [14, 14]


def test_nodes_past_the_last_slot_leave_no_nan() -> None:
    """A buffer's end: what was dropped cannot be followed, and nothing else is harmed."""
    cache = Cache(length=jnp.array([22, 4], jnp.int32), layers=(numbered(16, False),))
    start, path = jnp.array([14, 0], jnp.int32), jnp.array([[0, 1, 5, 6], [0, 1, 2, 3]], jnp.int32)
    after = jax.jit(caches.follow)(cache, start, path).layers[0]
    assert after.k[:, 0, :, 0].tolist() == [list(range(16))] * 2
    assert bool(jnp.isfinite(after.v).all())

"""Store law: no logit depends on the form in which the experts' weights are kept, nor on who else is in the batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import moe
from dflash_jax.nn import clamped_swiglu
from kernels_pallas import fp8
from models.target import FlaxTarget
from tests.support.families import GPT_OSS, family, with_experts
from tests.support.steps import UNDO, agree, empty, step, whole_text

GPT_OSS_LAYOUTS = ("split", "stacked", "packed")
OTHERS = ("gpt_oss-stacked", "gpt_oss-packed")


@pytest.mark.parametrize("name", OTHERS)
def test_every_layout_gives_the_same_text(name: str) -> None:
    one, other = whole_text("gpt_oss-split"), whole_text(name)
    np.testing.assert_array_equal(one.tokens, other.tokens)
    agree(one.logits, other.logits, "logits")
    agree(one.features, other.features, "features")


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("size", [1, UNDO])
def test_every_layout_gives_the_same_step(name: str, size: int) -> None:
    """One token a row visits the experts in use; a block visits them all."""
    one, other, text = family("gpt_oss-split"), family(name), whole_text("gpt_oss-split")
    choices = 4 * size * GPT_OSS.experts_per_token
    assert (choices >= 2 * GPT_OSS.experts) == (size == UNDO)
    split, kept = (step(chosen.target, chosen.params, text.tokens[:, :size], empty(chosen)) for chosen in (one, other))
    agree(split.logits, kept.logits, "logits")


@pytest.mark.parametrize("size", [1, UNDO])
@pytest.mark.parametrize("name", ["glm4_moe", "glm_moe_dsa", "qwen3_5_moe-solve"])
def test_experts_in_fp8_give_the_step_of_their_values(name: str, size: int) -> None:
    chosen, tokens = family(name), whole_text(name).tokens[:, :size]

    def fp8_of(experts: tuple[dict, ...]) -> dict:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *experts)
        return {matrix: _pack(np.asarray(weights)) for matrix, weights in stacked.items()}

    packed = with_experts(chosen.params, fp8_of)
    decoded = with_experts(packed, lambda experts: moe.split({name: _decode(w) for name, w in experts.items()}))
    kept = chosen._replace(target=FlaxTarget(chosen.target.module.clone(layout="fp8")), params=packed)
    one, other = (
        step(each.target, each.params, tokens, empty(each)) for each in (kept, chosen._replace(params=decoded))
    )
    agree(one.logits, other.logits, "logits")
    assert (
        np.abs(np.asarray(one.logits) - step(chosen.target, chosen.params, tokens, empty(chosen)).logits).max() > 1e-3
    )


def _pack(weights: np.ndarray) -> fp8.Fp8:
    """Matrices ``[E I O]``, every one with scales per block."""
    codes, scales = zip(*(fp8.pack(matrix.T) for matrix in weights), strict=True)
    rows = [np.repeat(each, fp8.BLOCK, axis=0)[: weights.shape[2]] for each in scales]
    return fp8.Fp8(codes=jnp.asarray(np.stack(codes)), scales=jnp.asarray(np.stack(rows)))


def _decode(weight: fp8.Fp8) -> jax.Array:
    return fp8.decode(weight, jnp.dtype("float64")).swapaxes(-1, -2)


def mlp(x, expert):
    """The tiny network's expert, on its own."""
    both = moe.matmul(x, expert["gate_up"]) + expert["gate_up_bias"]
    unit = clamped_swiglu(both[:, 0::2], both[:, 1::2], limit=1.5)
    return moe.matmul(unit, expert["down"]) + expert["down_bias"]


class Mixture:
    """Inputs of one mixture layer, ``rows`` tokens wide."""

    def __init__(self, dtype: str, rows: int, layout: str = "split"):
        chosen = family(f"gpt_oss-{layout}", dtype)
        layer, rng = chosen.params["moe_1"], np.random.default_rng(7)
        self.experts = layer["experts"]
        self.x = jnp.asarray(rng.standard_normal((rows, GPT_OSS.hidden_size)), dtype)
        logits = self.x @ layer["router"] + layer["router_bias"]
        self.chosen, self.weights = jax.jit(moe.route_topk_softmax, static_argnums=1)(logits, GPT_OSS.experts_per_token)
        one_hot = jax.nn.one_hot(self.chosen, GPT_OSS.experts, dtype=dtype)
        self.share = jnp.einsum("TKE,TK->TE", one_hot, self.weights)
        self.used = one_hot.sum((0, 1)) > 0

    def mixed(self) -> np.ndarray:
        run = jax.jit(functools.partial(moe.mix_experts, mlp=mlp))
        return np.asarray(run(self.x, self.chosen, self.weights, self.experts))

    def every(self) -> np.ndarray:
        run = jax.jit(functools.partial(moe._all_experts, mlp=mlp))
        return np.asarray(run(self.x, self.share, self.experts))

    def in_use(self) -> np.ndarray:
        run = jax.jit(functools.partial(moe._used_experts, mlp=mlp))
        return np.asarray(run(self.x, self.share, self.used, self.experts))


@pytest.mark.parametrize(("dtype", "rows", "ulps"), [("float64", 3, 64), ("float32", 3, 64), ("float32", 32, 64)])
def test_visiting_all_experts_or_those_in_use_is_the_same_sum(dtype: str, rows: int, ulps: int) -> None:
    """Equal to rounding; whether to the bit depends on how the compiler fuses the sum."""
    mixture = Mixture(dtype, rows)
    every, in_use = mixture.every(), mixture.in_use()
    largest = np.abs(every).max() * np.finfo(dtype).eps
    np.testing.assert_allclose(every, in_use, rtol=0, atol=ulps * largest)


@pytest.mark.parametrize("layout", GPT_OSS_LAYOUTS)
def test_a_mixture_is_its_definition(layout: str) -> None:
    """``sum_k w[t, k] * mlp(x[t], expert[chosen[t, k]])``, one token and one expert at a time."""
    mixture, split = Mixture("float64", 3, layout), Mixture("float64", 3)
    expected = np.zeros_like(mixture.x)
    for row in range(3):
        for k in range(GPT_OSS.experts_per_token):
            one = mlp(split.x[row : row + 1], split.experts[int(split.chosen[row, k])])
            expected[row] += np.asarray(split.weights)[row, k] * np.asarray(one)[0]
    agree(mixture.mixed(), expected, layout)


@pytest.mark.parametrize("layout", GPT_OSS_LAYOUTS)
def test_neighbours_change_no_bit(layout: str) -> None:
    mixture = Mixture("float32", 3, layout)
    alone = mixture.mixed()
    others = Mixture("float32", 3, layout)
    others.x = others.x.at[1:].set(-3 * others.x[1:])
    others.chosen = others.chosen.at[1:].set((others.chosen[1:] + 1) % GPT_OSS.experts)
    np.testing.assert_array_equal(others.mixed()[0], alone[0])
    assert (others.mixed()[1:] != alone[1:]).any()


def test_the_law_can_fail() -> None:
    """Experts remapped to their neighbours, as an overflowing store might do to survive."""
    mixture, remapped = Mixture("float64", 3, "stacked"), Mixture("float64", 3, "stacked")
    remapped.chosen = (remapped.chosen + 1) % GPT_OSS.experts
    with pytest.raises(AssertionError):
        agree(remapped.mixed(), mixture.mixed(), "remapped")


def test_an_unknown_layout_is_refused_by_name() -> None:
    woven = FlaxTarget(family("gpt_oss-split").target.module.clone(layout="woven"))
    with pytest.raises(ValueError, match="known: split, stacked, packed, fp8"):
        woven.abstract_params()

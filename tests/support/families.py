"""Tiny targets of every family, in every layout: pairwise different dimensions, no parameter left at 0 or 1."""

import functools
import types
from collections.abc import Container
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import moe
from dflash_jax.nn import plain_rope, yarn_rope
from kernels_pallas import mxfp4
from models import MODELS
from models.glm4_moe import Glm4MoeConfig
from models.glm4_moe_lite import Glm4MoeLiteConfig
from models.glm_moe_dsa import GlmMoeDsaConfig
from models.gpt_oss import GptOss, GptOssConfig
from models.mla import Widths
from models.qwen3 import Qwen3Config
from models.qwen3_5_moe import Qwen35Moe, Qwen35MoeConfig
from models.target import FlaxTarget

WINDOW = 5

GPT_OSS = GptOssConfig(
    vocab_size=61,
    hidden_size=32,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=10,
    intermediate_size=64,
    experts=7,
    experts_per_token=3,
    windows=(WINDOW, None, WINDOW),
    rope=yarn_rope(1000.0, 10, factor=4.0, original_max_position=16, truncate=False),
    rms_norm_eps=1e-5,
    swiglu_limit=1.5,
)
QWEN3 = Qwen3Config(
    vocab_size=53,
    hidden_size=24,
    layers=4,
    heads=6,
    kv_heads=3,
    head_dim=10,
    intermediate_size=20,
    windows=(None, WINDOW, None, WINDOW),
    rope=plain_rope(500.0, 10),
    rms_norm_eps=1e-6,
)
QWEN3_5_MOE = Qwen35MoeConfig(
    vocab_size=59,
    hidden_size=28,
    layers=5,
    heads=6,
    kv_heads=2,
    head_dim=16,
    linear=(True, True, False, True, False),
    linear_key_heads=3,
    linear_value_heads=12,
    linear_key_dim=9,
    linear_value_dim=11,
    conv_taps=4,
    experts=7,
    experts_per_token=5,
    expert_size=20,
    shared_size=26,
    rope=plain_rope(1000.0, 8),
)
QWEN3_TIED = Qwen3Config(**{**vars(QWEN3), "windows": (None,) * 4, "tie_word_embeddings": True})

GLM_MIXTURE = dict(
    intermediate_size=38,
    dense_layers=1,
    experts=9,
    experts_per_token=3,
    expert_size=20,
    shared_size=22,
    groups=3,
    groups_per_token=2,
    routed_scale=1.7,
)
GLM4_MOE = Glm4MoeConfig(
    vocab_size=59,
    hidden_size=28,
    layers=4,
    heads=6,
    kv_heads=2,
    head_dim=16,
    qk_norm=True,
    attention_bias=True,
    rope=plain_rope(1000.0, 8),
    **GLM_MIXTURE,
)
LATENT = dict(
    vocab_size=59,
    hidden_size=28,
    layers=4,
    heads=6,
    widths=Widths(q_lora=24, latent=18, nope=14, rope=8, value=12),
    attention_bias=False,
    rope=plain_rope(1000.0, 8),
    **GLM_MIXTURE,
)
GLM4_MOE_LITE = Glm4MoeLiteConfig(interleaved=False, **LATENT)
GLM_MOE_DSA = GlmMoeDsaConfig(index_heads=32, index_dim=17, index_topk=7, selects=(True, True, False, True), **LATENT)

VARIANTS: dict[str, tuple[str, object, dict]] = {
    "gpt_oss-split": ("gpt_oss", GPT_OSS, {"layout": "split"}),
    "gpt_oss-stacked": ("gpt_oss", GPT_OSS, {"layout": "stacked"}),
    "gpt_oss-packed": ("gpt_oss", GPT_OSS, {"layout": "packed"}),
    "glm4_moe": ("glm4_moe", GLM4_MOE, {"layout": "split"}),
    "glm4_moe_lite": ("glm4_moe_lite", GLM4_MOE_LITE, {"layout": "stacked"}),
    "glm_moe_dsa": ("glm_moe_dsa", GLM_MOE_DSA, {"layout": "split"}),
    "qwen3-tied": ("qwen3", QWEN3_TIED, {}),
    "qwen3-untied": ("qwen3", QWEN3, {}),
    "qwen3_5_moe-solve": ("qwen3_5_moe", QWEN3_5_MOE, {"layout": "split", "method": "solve"}),
    "qwen3_5_moe-replay": ("qwen3_5_moe", QWEN3_5_MOE, {"layout": "stacked", "method": "replay"}),
    "qwen3_5_moe-states": ("qwen3_5_moe", QWEN3_5_MOE, {"layout": "split", "method": "states"}),
}
"""name -> (key of ``MODELS``, config, further fields of the module)."""

STEPS = [name for name in VARIANTS if name not in ("gpt_oss-stacked", "gpt_oss-packed", "qwen3-tied")]
"""Every family and every journal of a recurrent state: for laws of whole texts, which do not depend on how experts are
stored or a head is tied. The laws of a step look at all variants."""

assert {model_type for model_type, _, _ in VARIANTS.values()} == set(MODELS), "a family of MODELS has no tiny variant"


GAIN = {"o": 2.0, "down": 2.0, "q": 3.0, "k": 2.0}
"""Loud layers and sharp attention keep greedy text from falling into a loop."""


CENTRED = {"q_norm", "k_norm", "final_norm"} | {
    f"{part}_norm_{i}" for part in ("mixer", "moe") for i in range(QWEN3_5_MOE.layers)
}
"""Of Qwen3.5: all norms but the gated one."""


class Family(NamedTuple):
    """A tiny target and its parameters."""

    name: str
    target: FlaxTarget
    params: dict


def tiny_target(name: str, dtype: str = "float64", taps: tuple[int, ...] | None = None) -> FlaxTarget:
    """The target of a variant; tapped after its first and last-but-one layers unless ``taps`` says otherwise."""
    model_type, config, fields = VARIANTS[name]
    taps = (0, config.layers - 2) if taps is None else taps
    return FlaxTarget(MODELS[model_type][1](config, taps=taps, dtype=jnp.dtype(dtype), **fields))


@functools.cache
def family(name: str, dtype: str = "float64", seed: int = 0) -> Family:
    """A variant with random parameters. Layouts of one network hold the same values, all of which MXFP4 can hold."""
    target = tiny_target(name, dtype)
    if not target.mixture_layers:
        return Family(name, target, randomised(target.abstract_params(), seed))
    centred = CENTRED if isinstance(target.module, Qwen35Moe) else ()
    stacked = randomised(FlaxTarget(target.module.clone(layout="stacked")).abstract_params(), seed, centred)
    convert = mxfp4_layout if isinstance(target.module, GptOss) else plain_layout
    return Family(name, target, convert(stacked, target.module.layout, target.module.dtype))


def randomised(abstract: dict, seed: int, centred: Container[str] = ()) -> dict:
    """Normal values for every parameter, norms around 1: nothing is left at its initial 0 or 1.

    ``centred``: norms whose weight is stored as its distance from 1.
    """
    rng = np.random.default_rng(seed)

    def draw(path, leaf) -> jax.Array:
        name = str(getattr(path[-1], "key", path[-1]))
        values = rng.standard_normal(leaf.shape)
        if "norm" in name:
            values = 0.4 * values + (name not in centred)
        elif leaf.ndim == 1 or "bias" in name:
            values = 0.4 * values
        else:
            values = values * GAIN.get(name, 1.0) / np.sqrt(leaf.shape[-2])
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract)


def with_experts(params: dict, convert) -> dict:
    """``params`` with ``convert`` applied to the experts of every layer."""
    moe_layers = {name: part for name, part in params.items() if isinstance(part, dict) and "experts" in part}
    return params | {name: part | {"experts": convert(part["experts"])} for name, part in moe_layers.items()}


def plain_layout(params: dict, layout: str, dtype) -> dict:
    """Stacked parameters in another layout."""
    return with_experts(params, moe.split) if layout == "split" else params


def mxfp4_layout(params: dict, layout: str, dtype) -> dict:
    """Stacked parameters with their expert matrices rounded to MXFP4, in another layout."""

    def convert(experts: dict):
        packed = {name: mxfp4.pack(np.asarray(experts[name]).swapaxes(-1, -2)) for name in ("gate_up", "down")}
        packed = jax.tree.map(jnp.asarray, packed)
        biases = {name: leaf for name, leaf in experts.items() if name not in packed}
        if layout == "packed":
            return packed | biases
        stacked = {name: mxfp4.decode(weight, dtype).swapaxes(-1, -2) for name, weight in packed.items()} | biases
        return moe.split(stacked) if layout == "split" else stacked

    return with_experts(params, convert)


def fresh(function):
    """A copy of ``function`` that jit has never seen, so that a patched callee is traced and nothing cached is used."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy

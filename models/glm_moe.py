"""What the GLM families share: their feed-forward layers, dense in the first few and mixtures after."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from dflash_jax.moe import init_experts, matmul, mix_experts, route_sigmoid_topk
from dflash_jax.nn import accumulation_dtype, swiglu
from dflash_jax.shapes import Array, Float, Int
from models.hf_config import require

fan_in = nn.initializers.variance_scaling(1.0, "fan_in", "normal")


def mixture_from(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The fields of a GLM config that describe its feed-forward layers.

    Raises:
        ValueError: naming the key that is missing or unsupported.
    """
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act is {config['hidden_act']!r}; only 'silu' is released and supported")
    kinds = config.get("mlp_layer_types")
    dense = sum(kind == "dense" for kind in kinds) if kinds else int(config.get("first_k_dense_replace") or 0)
    if kinds and list(kinds) != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise ValueError("config.json: mlp_layer_types must be dense layers first, sparse ones after")
    shared = int(config.get("n_shared_experts") or 0) * int(require(config, "moe_intermediate_size"))
    return dict(
        intermediate_size=int(require(config, "intermediate_size")),
        dense_layers=dense,
        experts=int(require(config, "n_routed_experts")),
        experts_per_token=int(require(config, "num_experts_per_tok")),
        expert_size=int(require(config, "moe_intermediate_size")),
        shared_size=shared,
        groups=int(config.get("n_group") or 1),
        groups_per_token=int(config.get("topk_group") or 1),
        normalise=bool(config.get("norm_topk_prob", True)),
        routed_scale=float(config.get("routed_scaling_factor") or 1.0),
    )


class Mlp(nn.Module):
    """SwiGLU; also the shared expert."""

    width: int
    inner: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        gate = self.param("gate", fan_in, (self.width, self.inner), self.dtype)
        up = self.param("up", fan_in, (self.width, self.inner), self.dtype)
        return swiglu(x @ gate, x @ up) @ self.param("down", fan_in, (self.inner, self.width), self.dtype)


class Moe(nn.Module):
    """A float32 router, routed experts, and a shared expert that every token takes.

    ``config`` has the fields of :func:`mixture_from`. Router weights, scores and mixing weights stay in float32 in a
    bfloat16 network (``_keep_in_fp32_modules_strict``).
    """

    config: Any
    layout: str
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Int[Array, "B T K"]]:
        c, wide = self.config, accumulation_dtype(self.dtype)
        router = self.param("router", fan_in, (c.hidden_size, c.experts), wide)
        bias = self.param("router_bias", nn.initializers.zeros, (c.experts,), wide)
        experts = self.param("experts", self._init_experts)
        rows = x.reshape(-1, c.hidden_size)
        logits = rows.astype(wide) @ router
        self.sow("router", "logits", logits)  # seen by training only: the collection is not mutable elsewhere
        chosen, weights = route_sigmoid_topk(
            logits,
            bias,
            c.experts_per_token,
            groups=c.groups,
            groups_per_token=c.groups_per_token,
            normalise=c.normalise,
            scale=c.routed_scale,
        )
        mixed = mix_experts(rows, chosen, weights, experts, _expert)
        if c.shared_size:
            mixed = mixed + Mlp(c.hidden_size, c.shared_size, self.dtype, name="shared")(rows)
        return mixed.reshape(x.shape), chosen.reshape(*x.shape[:2], -1)

    def _init_experts(self, key: jax.Array):
        c = self.config
        matrices = {"gate_up": (c.hidden_size, 2 * c.expert_size), "down": (c.expert_size, c.hidden_size)}
        return init_experts(key, count=c.experts, matrices=matrices, biases={}, layout=self.layout, dtype=self.dtype)


def _expert(x: Float[Array, "T D"], expert: dict) -> Float[Array, "T D"]:
    """SwiGLU; the gate is the first half of ``gate_up``."""
    return matmul(swiglu(*jnp.split(matmul(x, expert["gate_up"]), 2, axis=-1)), expert["down"])

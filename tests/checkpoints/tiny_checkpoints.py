"""Tiny networks of every family as checkpoints. All sizes are pairwise different: no swapped axis fits."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from checkpoints import dflash, export, gpt_oss
from checkpoints.config import text_config
from checkpoints.reader import open_checkpoint
from checkpoints.rules import path_of
from checkpoints.safetensors_file import write_file
from dflash_jax.nn import plain_rope, yarn_rope
from kernels_pallas import mxfp4
from models import MODELS
from models.dflash import DFlash, DFlashConfig, DFlashDrafter
from models.gpt_oss import GptOss, GptOssConfig
from models.qwen3 import Qwen3, Qwen3Config
from models.target import FlaxTarget

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 512,
    "truncate": False,
}
WIDTH, LAYERS, VOCABULARY = 64, 3, 101
FLOAT32 = jnp.dtype("float32")


def gpt_oss_config(**sizes: Any) -> GptOssConfig:
    """Three layers, seven experts of inner width 96."""
    small = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, layers=LAYERS, heads=6, kv_heads=2, head_dim=10)
    mixture = dict(intermediate_size=96, experts=7, experts_per_token=4, windows=(8, None, 8))
    rope = yarn_rope(150000.0, 10, factor=4.0, original_max_position=512, truncate=False)
    return GptOssConfig(**small | mixture | {"rope": rope} | sizes)


def gpt_oss_hf(config: GptOssConfig, **more: Any) -> dict[str, Any]:
    return gpt_oss.hf_config(config, rope_theta=150000.0, rope_scaling=YARN, **more)


QWEN3_HF = {
    "model_type": "qwen3",
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "intermediate_size": 52,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": VOCABULARY,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


QWEN3_5_MOE_HF = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "hidden_size": WIDTH,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 9,
        "linear_key_head_dim": 14,
        "linear_value_head_dim": 18,
        "linear_conv_kernel_dim": 4,
        "num_experts": 7,
        "num_experts_per_tok": 5,
        "moe_intermediate_size": 30,
        "shared_expert_intermediate_size": 34,
        "vocab_size": VOCABULARY,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
    },
}
GLM_HF = {
    "num_hidden_layers": 4,
    "hidden_size": WIDTH,
    "intermediate_size": 52,
    "vocab_size": VOCABULARY,
    "n_routed_experts": 7,
    "num_experts_per_tok": 5,
    "moe_intermediate_size": 30,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
}
GLM4_MOE_HF = GLM_HF | {
    "model_type": "glm4_moe",
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
LATENT_HF = {
    "num_attention_heads": 6,
    "q_lora_rank": 44,
    "kv_lora_rank": 36,
    "qk_nope_head_dim": 18,
    "qk_rope_head_dim": 12,
    "v_head_dim": 22,
}
GLM4_MOE_LITE_HF = GLM_HF | LATENT_HF | {"model_type": "glm4_moe_lite", "attention_bias": True}
GLM_MOE_DSA_HF = (
    GLM_HF
    | LATENT_HF
    | {"model_type": "glm_moe_dsa", "index_n_heads": 8, "index_head_dim": 26, "index_topk": 16}
    | {"indexer_types": ["full", "shared", "full", "shared"]}
)


def drafter_config(**sizes: Any) -> DFlashConfig:
    """Two layers, one of them sliding, on two taps."""
    small = dict(
        layers=2, heads=6, kv_heads=2, head_dim=10, intermediate_size=44, windows=(8, None), causal=(True, False)
    )
    more = dict(rope=plain_rope(1e6, 10), taps=(0, 2), mask_token_id=99, block_size=5)
    return DFlashConfig(**small | more | {"hidden_size": WIDTH, "target_hidden_size": WIDTH} | sizes)


def drafter_hf(config: DFlashConfig, **more: Any) -> dict[str, Any]:
    return dflash.hf_config(config, rope_theta=1e6, vocab_size=VOCABULARY, target_layers=LAYERS, **more)


TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decode_by_table(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """MXFP4 by its definition, in float64, without jax: ``[..., O, I/2]``, ``[..., O, I/32]`` -> ``[..., O, I]``."""
    values = TABLE[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*scales.shape, 32)
    return (values * np.exp2(scales.astype(np.float64) - 127)[..., None]).reshape(*codes.shape[:-1], -1)


def released_values(abstract: Any, grid: bool = True) -> Any:
    """Random parameters of given shapes that a release can hold: in bfloat16, experts on the MXFP4 ``grid``."""

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path_of(path)
        value = 0.3 * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(leaf.shape, np.float32)
        if grid and "experts" in name and "bias" not in name:
            packed = mxfp4.pack(value.T)
            return jnp.asarray(decode_by_table(packed.codes, packed.scales).astype(np.float32).T)
        return jnp.asarray(value.astype(ml_dtypes.bfloat16).astype(np.float32))

    return jax.tree_util.tree_map_with_path(draw, abstract)


def write_gpt_oss(folder: Path, stored: str = "mxfp4", **sizes: Any) -> tuple[FlaxTarget, Any]:
    """A gpt-oss checkpoint; returns the target (split layout) and its parameters."""
    config = gpt_oss_config(**sizes)
    target = FlaxTarget(GptOss(config, dtype=FLOAT32))
    params = released_values(target.abstract_params())
    export.export_target(params, gpt_oss_hf(config, eos_token_id=100), folder, stored)
    return target, params


def write_qwen3(folder: Path, **keys: Any) -> tuple[FlaxTarget, Any]:
    """A Qwen3 checkpoint."""
    config = QWEN3_HF | keys
    target = FlaxTarget(Qwen3(Qwen3Config.from_hf(config), dtype=FLOAT32))
    params = released_values(target.abstract_params())
    export.export_target(params, config, folder)
    return target, params


def write_mixture(
    folder: Path, config: dict[str, Any], stored: str | None = None, **keys: Any
) -> tuple[FlaxTarget, Any]:
    """A checkpoint of a family whose experts are plain matrices."""
    config = config | keys
    config_type, module_type = MODELS[config["model_type"]]
    target = FlaxTarget(module_type(config_type.from_hf(text_config(config)), dtype=FLOAT32))
    params = released_values(target.abstract_params(), grid=False)
    export.export_target(params, config, folder, stored)
    return target, params


def write_drafter(folder: Path, **sizes: Any) -> tuple[DFlashDrafter, Any]:
    """A drafter's checkpoint."""
    config = drafter_config(**sizes)
    drafter = DFlashDrafter(DFlash(config, dtype=FLOAT32), config.block_size)
    params = released_values(drafter.abstract_params())
    export.export_drafter(params, drafter_hf(config), folder)
    return drafter, params


def edit_json(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    value = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def bf16(*shape: int) -> np.ndarray:
    return np.zeros(shape, ml_dtypes.bfloat16)


def rewrite(folder: Path, change: Callable[[dict], dict]) -> None:
    """Rewrite a one-file checkpoint: ``change`` gets and returns a dict of arrays."""
    tensors = {name: np.array(value) for name, value in open_checkpoint(folder).items()}
    write_file(folder / "model.safetensors", change(tensors).items())


def equal(a: Any, b: Any) -> bool:
    """Same tree, same dtypes, same bits."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)

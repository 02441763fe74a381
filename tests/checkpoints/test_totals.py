"""Full-size networks from their published configs: names, shapes, parameters and bytes equal the releases' totals.

Nothing is allocated: parameters are shapes, and the files are what the rules make of them.
"""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import pytest

from checkpoints import gpt_oss, mixture
from checkpoints.config import text_config
from checkpoints.registry import DRAFTER_RULES, RULES
from checkpoints.rules import assign, flatten
from models import MODELS
from models.dflash import DFlash, DFlashConfig, DFlashDrafter
from models.target import FlaxTarget

PUBLISHED = json.loads((Path(__file__).parents[1] / "configs" / "published.json").read_text())
BFLOAT16 = jnp.dtype("bfloat16")
BYTES = {"U8": 1, "BF16": 2}

GPT_OSS_BYTES = {"gpt-oss-20b": 13_761_264_768, "gpt-oss-120b": 65_248_815_744}
"""``total_size`` of the released indices."""

PARAMETERS = {
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-4B": 4_022_468_096,
}

MIXTURES = {
    "GLM-4.5-Air": 106_852_251_264,
    "GLM-4.6": 352_797_829_024,
    "GLM-4.7-Flash": 29_943_393_920,
    "GLM-5.1": 743_911_218_432,
    "GLM-5.2": 743_377_019_904,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "Qwen3.5-122B-A10B": 122_111_526_912,
    "Qwen3.5-397B-A17B": 396_346_350_336,
}
"""Parameters of the text networks without the multi-token head."""

WITH_MTP = {"GLM-4.7-Flash": 31_221_488_576, "GLM-5.1": 753_864_139_008}
"""Parameters of the whole releases; 4.7-Flash repeats embedding and head in its MTP layer, 5.1 does not."""

QWEN_BYTES = {"F32": 71_903_655_008, "BF16": 71_903_645_408}
"""``total_size`` of Qwen3.5-35B-A3B and of Qwen3.6-35B-A3B: the same network, but for the dtype of A_log and norm."""

PUBLISHED_BILLIONS = {"Qwen3-8B-DFlash-b16": 1.049, "gpt-oss-20b-DFlash": 0.785}


def config_of(name: str) -> dict:
    config = text_config(dict(PUBLISHED[name]))
    if config["model_type"] == "gpt_oss" and "DFlash" not in name:
        config["layer_types"] = ["sliding_attention", "full_attention"] * (config["num_hidden_layers"] // 2)
    return config


def shapes_of(name: str, **fields) -> dict[str, tuple[int, ...]]:
    """Parameter path -> shape."""
    config = config_of(name)
    if "DFlash" in name:
        sizes = DFlashConfig.from_hf(config)
        network = DFlashDrafter(DFlash(sizes, dtype=BFLOAT16), sizes.block_size)
    else:
        config_type, module_type = MODELS[config["model_type"]]
        network = FlaxTarget(module_type(config_type.from_hf(config), dtype=BFLOAT16, **fields))
    return {path: leaf.shape for path, leaf in flatten(network.abstract_params())[0].items()}


def files_of(name: str, rules, shapes) -> dict[str, tuple[tuple[int, ...], str]]:
    """Tensor -> (shape, dtype) of the release: the rules backwards."""
    assignments, problems = assign(rules, shapes)
    assert problems == []
    return {
        tensor: (shape, assignment.rule.transform.codes[0])
        for assignment in assignments
        for tensor, shape in zip(assignment.names, assignment.file_shapes, strict=True)
    }


def values(shapes: dict[str, tuple[int, ...]]) -> int:
    """Parameters: packed codes hold two each, scales are not counted."""
    factor = {"codes": 2, "scales": 0}
    return sum(math.prod(shape) * factor.get(path.rsplit("/", 1)[-1], 1) for path, shape in shapes.items())


@pytest.mark.parametrize("name", GPT_OSS_BYTES)
def test_gpt_oss_bytes_of_the_release(name):
    """Every tensor of the released file, and its total to the byte."""
    shapes = shapes_of(name, layout="packed")
    files = files_of(name, RULES["gpt_oss"].rules + gpt_oss.expert_rules("mxfp4", "packed"), shapes)
    assert sum(math.prod(shape) * BYTES[code] for shape, code in files.values()) == GPT_OSS_BYTES[name]
    assert values(shapes) == PARAMETERS[name]
    layers, experts = PUBLISHED[name]["num_hidden_layers"], PUBLISHED[name]["num_local_experts"]
    assert len(files) == 19 * layers + 3
    layer = {tensor.removeprefix("model.layers.1."): spec for tensor, spec in files.items() if ".layers.1." in tensor}
    assert layer == {
        "input_layernorm.weight": ((2880,), "BF16"),
        "post_attention_layernorm.weight": ((2880,), "BF16"),
        "self_attn.q_proj.weight": ((4096, 2880), "BF16"),
        "self_attn.q_proj.bias": ((4096,), "BF16"),
        "self_attn.k_proj.weight": ((512, 2880), "BF16"),
        "self_attn.k_proj.bias": ((512,), "BF16"),
        "self_attn.v_proj.weight": ((512, 2880), "BF16"),
        "self_attn.v_proj.bias": ((512,), "BF16"),
        "self_attn.o_proj.weight": ((2880, 4096), "BF16"),
        "self_attn.o_proj.bias": ((2880,), "BF16"),
        "self_attn.sinks": ((64,), "BF16"),
        "mlp.router.weight": ((experts, 2880), "BF16"),
        "mlp.router.bias": ((experts,), "BF16"),
        "mlp.experts.gate_up_proj_blocks": ((experts, 5760, 90, 16), "U8"),
        "mlp.experts.gate_up_proj_scales": ((experts, 5760, 90), "U8"),
        "mlp.experts.gate_up_proj_bias": ((experts, 5760), "BF16"),
        "mlp.experts.down_proj_blocks": ((experts, 2880, 90, 16), "U8"),
        "mlp.experts.down_proj_scales": ((experts, 2880, 90), "U8"),
        "mlp.experts.down_proj_bias": ((experts, 2880), "BF16"),
    }
    assert files["lm_head.weight"] == files["model.embed_tokens.weight"] == ((201088, 2880), "BF16")


@pytest.mark.parametrize("layout", ["split", "stacked", "packed"])
def test_gpt_oss_20b_parameters_in_every_layout(layout):
    assert values(shapes_of("gpt-oss-20b", layout=layout)) == PARAMETERS["gpt-oss-20b"]


def test_gpt_oss_20b_names_of_a_bfloat16_export():
    """``[E, in, out]`` without a suffix: the transpose of the released blocks."""
    shapes = shapes_of("gpt-oss-20b", layout="stacked")
    files = files_of("gpt-oss-20b", RULES["gpt_oss"].rules + gpt_oss.expert_rules("plain", "stacked"), shapes)
    assert files["model.layers.0.mlp.experts.gate_up_proj"] == ((32, 2880, 5760), "BF16")
    assert files["model.layers.0.mlp.experts.down_proj"] == ((32, 2880, 2880), "BF16")
    assert sum(math.prod(shape) for shape, _ in files.values()) == PARAMETERS["gpt-oss-20b"]


@pytest.mark.parametrize(("name", "tensors"), [("Qwen3-8B", 399), ("Qwen3-4B", 398)])
def test_qwen3_parameters_and_tensors_of_the_release(name, tensors):
    """Qwen3-4B is tied: it has no head tensor."""
    shapes = shapes_of(name)
    files = files_of(name, RULES["qwen3"].rules, shapes)
    assert values(shapes) == PARAMETERS[name]
    assert len(files) == tensors
    assert ("lm_head.weight" in files) == (name == "Qwen3-8B")


@pytest.mark.parametrize(("name", "tensors"), [("Qwen3-8B-DFlash-b16", 58), ("gpt-oss-20b-DFlash", 123)])
def test_drafter_parameters_and_tensors_of_the_release(name, tensors):
    """11 L + 3 tensors without attention biases, 15 L + 3 with them; no embedding, no head."""
    shapes = shapes_of(name)
    files = files_of(name, DRAFTER_RULES, shapes)
    assert len(files) == tensors
    c = PUBLISHED[name]
    width, taps, layers = c["hidden_size"], len(c["dflash_config"]["target_layer_ids"]), c["num_hidden_layers"]
    query, keys = (c[f"num_{kind}_heads"] * c["head_dim"] for kind in ("attention", "key_value"))
    biases = (query + 2 * keys + width) if c["attention_bias"] else 0
    matrices = 2 * width * query + 2 * width * keys + 3 * width * c["intermediate_size"]
    norms = 2 * width + 2 * c["head_dim"]
    assert values(shapes) == layers * (matrices + norms + biases) + taps * width * width + 2 * width
    assert round(values(shapes) / 1e9, 3) == PUBLISHED_BILLIONS[name]
    assert files["fc.weight"] == ((width, taps * width), "BF16")
    assert not [tensor for tensor in files if "embed" in tensor or "lm_head" in tensor]


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_have_the_parameters_of_the_release(name):
    assert values(shapes_of(name, layout="stacked")) == MIXTURES[name]


def mtp_values(name: str, shapes: dict[str, tuple[int, ...]]) -> int:
    """A multi-token head: one more layer like the last, a projection of two streams into one, three norms."""
    config = config_of(name)
    last, width = config["num_hidden_layers"] - 1, config["hidden_size"]
    layer = {path: shape for path, shape in shapes.items() if f"_{last}/" in path or path.endswith(f"_{last}")}
    return values(layer) + 2 * width**2 + 3 * width


@pytest.mark.parametrize("name", WITH_MTP)
def test_glm_parameters_of_the_release_with_its_mtp_layer(name):
    shapes = shapes_of(name, layout="stacked")
    copies = 2 * math.prod(shapes["embed"]) if name == "GLM-4.7-Flash" else 0
    assert values(shapes) + mtp_values(name, shapes) + copies == WITH_MTP[name]


def vision_values(width: int = 1152, inner: int = 4304, depth: int = 27, out: int = 2048) -> int:
    """Qwen3.5's vision tower (config key ``vision_config``): patches, positions, blocks, and the merger of 2 x 2."""
    patches = 3 * 2 * 16 * 16 * width + width + 2304 * width
    block = 4 * width + 4 * width**2 + 4 * width + 2 * width * inner + inner + width
    merged = 4 * width
    return patches + depth * block + 2 * width + merged**2 + merged + merged * out + out


@pytest.mark.parametrize("stored", QWEN_BYTES)
def test_qwen3_5_bytes_of_the_release(stored):
    """The text network, the multi-token head and the vision tower, to the byte."""
    shapes = shapes_of("Qwen3.5-35B-A3B", layout="stacked")
    total = 2 * (values(shapes) + mtp_values("Qwen3.5-35B-A3B", shapes) + vision_values())
    wide = {
        path: shape for path, shape in shapes.items() if path.startswith("delta_") and path.endswith(("A_log", "/norm"))
    }
    assert total + (2 * values(wide) if stored == "F32" else 0) == QWEN_BYTES[stored]


def test_qwen3_5_tensors_of_the_release():
    """1,811 tensors: 333 of the vision tower, 785 of the multi-token head, the rest of the text network."""
    shapes = shapes_of("Qwen3.5-35B-A3B", layout="stacked")
    files = files_of("Qwen3.5-35B-A3B", RULES["qwen3_5_moe"].rules + mixture.expert_rules("fused", "stacked"), shapes)
    assert len(files) == 1811 - 333 - 785
    assert files["model.layers.0.mlp.experts.gate_up_proj"] == ((256, 1024, 2048), "BF16")
    assert files["model.layers.0.linear_attn.in_proj_qkv.weight"] == ((8192, 2048), "BF16")
    assert files["model.layers.0.linear_attn.conv1d.weight"] == ((8192, 1, 4), "BF16")
    assert files["model.layers.3.self_attn.q_proj.weight"] == ((8192, 2048), "BF16")


def test_glm_tensors_of_the_release():
    """GLM-4.7-Flash has 9,703 tensors: 47 layers, one MTP layer with six tensors more, embedding, norm and head."""
    shapes = shapes_of("GLM-4.7-Flash", layout="stacked")
    rules = RULES["glm4_moe_lite"].rules + mixture.expert_rules("single", "stacked")
    files = files_of("GLM-4.7-Flash", rules, shapes)
    layer = [name for name in files if name.startswith("model.layers.46.")]
    assert len(files) + len(layer) + 6 == 9703
    assert files["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == ((576, 2048), "BF16")
    assert files["model.layers.1.mlp.experts.63.down_proj.weight"] == ((2048, 1536), "BF16")

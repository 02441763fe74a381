"""FP8 files: every code, ragged blocks, both layouts of scales; a network loads as if its values were stored plain."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from checkpoints import fp8
from checkpoints.errors import CheckpointError
from checkpoints.export import export_target
from checkpoints.load import load_target
from checkpoints.reader import open_checkpoint
from checkpoints.rules import flatten
from checkpoints.safetensors_file import write_file
from checkpoints.transforms import repeated_scales
from dflash_jax.generate import Decoder
from dflash_jax.training.language_model import FP8_MATRICES, round_matrices_to_fp8
from kernels_pallas.fp8 import Fp8, decode, matmul, round_to_fp8

GOLDENS = Path(__file__).parents[1] / "goldens"
FLOAT8 = ml_dtypes.float8_e4m3fn
KEPT = (
    "embed_tokens",
    "lm_head",
    "norm",
    "mlp.gate.",
    "weights_proj",
    "conv1d",
    "in_proj_a",
    "in_proj_b",
    "expert_gate",
)


def value_of(code: int) -> float:
    """E4M3 (OCP OFP8, section 5): bias 7, no infinities, all exponent and mantissa bits set is NaN."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


@pytest.mark.parametrize("scale", [1.0, 0.0123, 448.0, 2.0**-20])
def test_all_codes_decode_to_the_bit(scale):
    codes = np.arange(256, dtype=np.uint8).view(FLOAT8).reshape(16, 16)
    scale = np.float32(scale)
    want = np.array([np.float32(value_of(code)) * scale for code in range(256)], np.float32).reshape(16, 16)
    np.testing.assert_array_equal(fp8.decode(codes, np.full((1, 1), scale)), want)
    np.testing.assert_array_equal(fp8.decode(codes, np.full((16, 1), scale)), want)
    in_use = decode(Fp8(jnp.asarray(codes), jnp.full((16, 1), scale)), jnp.dtype("float32"))
    np.testing.assert_array_equal(np.asarray(in_use), want)


@pytest.mark.parametrize("shape", [(576, 130), (128, 128), (129, 1), (192, 300)])
def test_blocks_are_of_128_rows_and_columns_however_ragged(shape):
    """576 rows have five row blocks; dividing rows by scale rows would give blocks of 115 (transformers refuses)."""
    rng = np.random.default_rng(0)
    codes = rng.standard_normal(shape).astype(FLOAT8)
    scales = rng.random(fp8.block_shape(shape)).astype(np.float32)
    values = fp8.decode(codes, scales)
    for row, column in [
        (0, 0),
        (shape[0] - 1, shape[1] - 1),
        (min(127, shape[0] - 1), 0),
        (shape[0] // 2, shape[1] // 2),
    ]:
        assert values[row, column] == np.float32(codes[row, column]) * scales[row // 128, column // 128]


def quantised(tensors: dict, kind: str) -> tuple[dict, dict]:
    """``(FP8 file, the values it holds)``: the matrices that the releases quantise."""
    stored, plain = {}, {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or any(part in name for part in KEPT):
            stored[name] = plain[name] = tensor
            continue
        wide = tensor.astype(np.float32)
        if kind == "block":
            rows, columns = (np.arange(size) // 128 for size in wide.shape)
            scales = np.zeros(fp8.block_shape(wide.shape), np.float32)
            np.maximum.at(scales, (rows[:, None], columns[None]), np.abs(wide))
            scales = (scales / 448).astype(ml_dtypes.bfloat16)
            each, suffix = scales.astype(np.float32)[rows][:, columns], "_scale_inv"
        else:
            scales = (np.abs(wide).max(axis=1, keepdims=True) / 448).astype(np.float32)
            each, suffix = scales, "_scale"
        codes = np.clip(wide / each, -448, 448).astype(FLOAT8)
        stored |= {name: codes, name + suffix: scales}
        plain[name] = codes.astype(np.float32) * each
    return stored, plain


def copy(golden: str, folder: Path, tensors: dict) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text((GOLDENS / golden / "config.json").read_text())
    write_file(folder / "model.safetensors", list(tensors.items()))
    return folder


@pytest.mark.parametrize(
    ("golden", "kind"),
    [("qwen3_5_moe_single", "block"), ("glm_moe_dsa", "block"), ("glm4_moe", "channel")],
)
def test_a_network_in_fp8_is_the_network_of_its_values(golden, kind, tmp_path):
    reader = open_checkpoint(GOLDENS / golden)
    stored, plain = quantised({name: np.asarray(reader[name]) for name in reader}, kind)
    assert sum(tensor.dtype == FLOAT8 for tensor in stored.values()) > 50
    _, params = load_target(copy(golden, tmp_path / "fp8", stored))
    _, wanted = load_target(copy(golden, tmp_path / "plain", plain))
    jax.tree.map(np.testing.assert_array_equal, params, wanted)


@pytest.mark.parametrize(
    ("golden", "kind"),
    [("qwen3_5_moe_single", "block"), ("glm_moe_dsa", "block"), ("glm4_moe", "channel")],
)
def test_experts_kept_in_fp8_give_the_tokens_of_decoded_ones(golden, kind, tmp_path):
    """The values are the same to the bit in both dtypes; in float32 so are the tokens. (In bfloat16 the order of sums
    may break a tie, as between any two programs.)"""
    reader = open_checkpoint(GOLDENS / golden)
    stored, _ = quantised({name: np.asarray(reader[name]) for name in reader}, kind)
    folder = copy(golden, tmp_path / "fp8", stored)
    for dtype in ("bfloat16", "float32"):
        made = {how: load_target(folder, dtype=jnp.dtype(dtype), experts=how) for how in ("packed", dtype)}
        packed, decoded = (flatten(params)[0] for _, params in made.values())
        places = [path.removesuffix("/codes") for path in packed if path.endswith("/codes")]
        assert places
        for place in places:
            kept = Fp8(packed[f"{place}/codes"], packed[f"{place}/scales"])
            assert kept.codes.dtype == jnp.float8_e4m3fn
            layer, matrix = place.split("/experts/")
            experts = [decoded[f"{layer}/experts/{e}/{matrix}"] for e in range(kept.codes.shape[0])]
            np.testing.assert_array_equal(decode(kept, jnp.dtype(dtype)), np.swapaxes(np.stack(experts), 1, 2))
    said = [Decoder(*each).generate([[3, 14, 15, 92], [6, 53]], 24).tokens for each in made.values()]
    assert said[0] == said[1]


@pytest.mark.parametrize("per_row", [False, True])
def test_a_matrix_kept_in_fp8_has_the_values_of_its_file(per_row):
    """Two matrices side by side, both ragged: rows of the second do not start on a block."""
    rng = np.random.default_rng(1)
    shapes = [(200, 300), (200, 300)]
    codes = [rng.standard_normal(shape).astype(FLOAT8) for shape in shapes]
    scales = [rng.random((200, 1) if per_row else fp8.block_shape((200, 300))).astype(np.float32) for _ in shapes]
    repeat = repeated_scales(2, per_row)
    assert repeat.file_shapes((400, 3)) == tuple(scale.shape for scale in scales)
    kept = repeat.forward(tuple(scales), (400, 3), np.float32)
    weight = Fp8(jnp.concatenate([jnp.asarray(each) for each in codes]), jnp.asarray(kept))
    want = np.concatenate([fp8.decode(*each) for each in zip(codes, scales, strict=True)])
    np.testing.assert_array_equal(np.asarray(decode(weight, jnp.dtype("float32"))), want)
    x = rng.standard_normal((3, 300)).astype(np.float32)
    np.testing.assert_allclose(np.asarray(matmul(jnp.asarray(x), weight)), x @ want.T, rtol=1e-4, atol=1e-4)
    for back, scale in zip(repeat.inverse(kept), scales, strict=True):
        np.testing.assert_array_equal(back, scale)


def test_scales_per_row_cannot_be_written_as_scales_per_block():
    scales = np.arange(256, dtype=np.float32).reshape(256, 1)
    with pytest.raises(ValueError, match="differ within a block"):
        repeated_scales(1, per_row=False).inverse(scales)


@pytest.mark.parametrize("shape", [(576, 130), (64, 256), (128, 128), (129, 1)])
def test_packing_rounds_to_the_nearest_code_of_every_block(shape):
    rng = np.random.default_rng(2)
    matrix = (rng.standard_normal(shape) * np.exp(rng.standard_normal((shape[0], 1)) * 2)).astype(np.float32)
    codes, scales = fp8.pack(matrix)
    assert scales.shape == fp8.block_shape(shape)
    rows, columns = (np.arange(size) // 128 for size in shape)
    each = scales[rows][:, columns]
    assert np.abs(codes.astype(np.float32)).max() == 448
    grid = np.sort([value for code in range(256) if not np.isnan(value := value_of(code))])
    nearest = np.abs((matrix / each)[..., None] - grid).min(-1)
    np.testing.assert_allclose(np.abs(matrix / each - codes.astype(np.float32)), nearest, atol=1e-4)
    np.testing.assert_array_equal(fp8.decode(codes, scales), np.asarray(round_to_fp8(jnp.asarray(matrix))))
    again = fp8.pack(fp8.decode(codes, scales))
    np.testing.assert_array_equal(again[0].view(np.uint8), codes.view(np.uint8))


def test_a_block_too_small_for_a_scale_is_no_nan():
    tiny = np.zeros((3, 4), np.float32)
    tiny[1, 2] = 1e-37
    codes, scales = fp8.pack(tiny)
    assert scales == 1 and not fp8.decode(codes, scales).any()


def test_a_block_of_zeros_stays_zero():
    codes, scales = fp8.pack(np.zeros((5, 7), np.float32))
    assert scales == 1 and not fp8.decode(codes, scales).any()


def test_an_exported_fp8_network_is_the_one_trained_through_rounded_matrices(tmp_path):
    _, params = load_target(GOLDENS / "glm4_moe")
    config = json.loads((GOLDENS / "glm4_moe" / "config.json").read_text())
    export_target(params, config, tmp_path / "a", "fp8")
    reader = open_checkpoint(tmp_path / "a")
    for name in ("self_attn.o_proj", "mlp.experts.1.up_proj", "mlp.shared_experts.down_proj"):
        assert reader.entries[f"model.layers.1.{name}.weight"].code == "F8_E4M3"
        assert reader.entries[f"model.layers.1.{name}.weight_scale_inv"].code == "F32"
    kept = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert {"lm_head", "model.embed_tokens", "model.layers.1.mlp.gate"} <= set(kept)
    assert not [name for name in kept if name.endswith("_proj")]
    bfloat16 = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(leaf.dtype), params)
    rounded, loaded = round_matrices_to_fp8(params), load_target(tmp_path / "a")[1]
    for (path, got), want, plain in zip(
        jax.tree_util.tree_flatten_with_path(loaded)[0], *map(jax.tree.leaves, (rounded, bfloat16)), strict=True
    ):
        if getattr(path[-1], "key", None) in FP8_MATRICES:
            np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=str(path))
        else:
            np.testing.assert_array_equal(got, plain, err_msg=str(path))
    _, packed = load_target(tmp_path / "a", experts="packed")
    export_target(packed, config, tmp_path / "b", "fp8")
    again = open_checkpoint(tmp_path / "b")
    assert set(again) == set(reader)
    for name in (name for name in reader if ".experts." in name):
        assert again[name].tobytes() == reader[name].tobytes(), name
    with pytest.raises(ValueError, match="cannot be stored as floats"):
        export_target(packed, config, tmp_path / "c", "bfloat16")


def test_plain_experts_cannot_be_kept_packed():
    with pytest.raises(CheckpointError, match="needs FP8 experts"):
        load_target(GOLDENS / "glm4_moe", experts="packed")


@pytest.mark.parametrize("left", ["one expert in bfloat16", "only the MTP layer in FP8"])
def test_experts_that_are_not_all_fp8_are_decoded(left, tmp_path, monkeypatch):
    """However large: keeping them packed needs scales for every matrix of the main layers."""
    monkeypatch.setattr("checkpoints.mixture.DECODED_BY_DEFAULT", 0)
    reader = open_checkpoint(GOLDENS / "glm4_moe")
    plain = {name: np.asarray(reader[name]) for name in reader}
    stored, _ = quantised(plain, "block")
    whole, _ = load_target(copy("glm4_moe", tmp_path / "whole", stored))
    assert whole.module.layout == "fp8"
    if left == "one expert in bfloat16":
        name = "model.layers.1.mlp.experts.0.down_proj.weight"
        mixed = {key: value for key, value in stored.items() if key != name + "_scale_inv"} | {name: plain[name]}
    else:
        last = f"model.layers.{whole.config.layers}."
        extra = {key: value for key, value in stored.items() if ".layers.1.mlp.experts." in key}
        mixed = plain | {key.replace("model.layers.1.", last): value for key, value in extra.items()}
    folder = copy("glm4_moe", tmp_path / "mixed", mixed)
    assert load_target(folder)[0].module.layout == "split"
    with pytest.raises(CheckpointError, match="in every layer"):
        load_target(folder, experts="packed")


def test_an_fp8_tensor_without_scales_or_with_nan_is_refused(tmp_path):
    golden, name = "glm4_moe", "model.layers.1.self_attn.q_proj.weight"
    reader = open_checkpoint(GOLDENS / golden)
    stored, _ = quantised({name: np.asarray(reader[name]) for name in reader}, "block")
    alone = {key: value for key, value in stored.items() if key != name + "_scale_inv"}
    with pytest.raises(CheckpointError, match=f"{name}.*stored as F8_E4M3"):
        load_target(copy(golden, tmp_path / "alone", alone))
    damaged = np.array(stored[name])
    damaged[3, 4] = np.nan
    with pytest.raises(CheckpointError, match="1 FP8 codes are NaN"):
        load_target(copy(golden, tmp_path / "damaged", stored | {name: damaged}))
    short = stored | {name + "_scale_inv": stored[name + "_scale_inv"][:, :0]}
    with pytest.raises(CheckpointError, match=r"_scale_inv' .*has shape"):
        load_target(copy(golden, tmp_path / "short", short))

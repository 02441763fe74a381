"""FP8 files: every code, ragged blocks, both layouts of scales; a network loads as if its values were stored plain."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from checkpoints import fp8
from checkpoints.errors import CheckpointError
from checkpoints.load import load_target
from checkpoints.reader import open_checkpoint
from checkpoints.safetensors_file import write_file

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

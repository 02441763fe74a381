"""MXFP4 from the file to the values: exact decoding, damaged scales, rounding, and the memory a load takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from checkpoints.errors import CheckpointError
from checkpoints.load import load_target
from checkpoints.reader import open_checkpoint
from checkpoints.safetensors_file import write_file
from checkpoints.transforms import decode
from kernels_pallas import mxfp4
from kernels_pallas.mxfp4.planes import plane
from kernels_pallas.mxfp4.rounding import round_to_mxfp4
from tests.checkpoints.tiny_checkpoints import (
    FLOAT32,
    decode_by_table,
    gpt_oss_config,
    gpt_oss_hf,
    rewrite,
    write_gpt_oss,
)

BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"
SCALES = "model.layers.1.mlp.experts.down_proj_scales"


def on_device(weight: mxfp4.Mxfp4) -> mxfp4.Mxfp4:
    return jax.tree.map(jnp.asarray, weight)


def bits(values) -> np.ndarray:
    values = np.asarray(values)
    return values.view({2: np.uint16, 4: np.uint32}[values.itemsize])


def assert_equal_but_for_flushed(actual, expected) -> None:
    """Equal bits, but for products of a subnormal: XLA's CPU backend takes the scale 2**-127 of byte 0, and results
    below 2**-126, for zero."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    small = np.abs(expected.astype(np.float64)) <= 6 * 2.0**-127
    flushed = small & (actual.astype(np.float64) == 0) & (np.signbit(actual) == np.signbit(expected))
    np.testing.assert_array_equal(np.where(flushed, 0, bits(actual)), np.where(flushed, 0, bits(expected)))


def all_bytes_and_scales() -> tuple[np.ndarray, np.ndarray]:
    """Row s holds all 256 bytes under scale byte s: codes ``[255, 256]``, scales ``[255, 16]``."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    return codes, np.repeat(np.arange(255, dtype=np.uint8)[:, None], 16, axis=1)


def one_block(data: bytes, scale: int) -> tuple[np.ndarray, np.ndarray]:
    """One row of one block, in the file's shapes."""
    return np.frombuffer(data.ljust(16, b"\0"), np.uint8).reshape(1, 1, 16), np.full((1, 1), scale, np.uint8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("scale", "factor"), [(127, 1.0), (126, 0.5), (120, 2.0**-7)])
def test_B33_M6_nibble_order_and_scale_bias(scale, factor, dtype):
    blocks, scales = one_block(bytes([0x21, 0x43, 0x65, 0x87]), scale)
    expected = np.array([0.5, 1, 1.5, 2, 3, 4, 6, -0.0]) * factor
    values = np.asarray(decode(blocks, scales, (32, 1), dtype)).astype(np.float64)[:, 0]
    np.testing.assert_array_equal(values[:8], expected)
    assert np.signbit(values[7])
    assert not values[8:].any()


def test_B33_scale_zero_is_finite_and_zeros_stay_zero():
    blocks, scales = one_block(bytes([0x77] * 16), 0)
    assert_equal_but_for_flushed(decode(blocks, scales, (32, 1), FLOAT32), np.full((32, 1), 6 * 2.0**-127, "f"))
    for scale in (0, 127, 254):
        blocks, scales = one_block(b"", scale)
        assert not np.asarray(decode(blocks, scales, (32, 1), FLOAT32)).any()


@pytest.mark.parametrize("experts", ["packed", "float32", "bfloat16"])
def test_B33_a_scale_of_255_is_refused_at_load_naming_the_tensor(tmp_path, experts):
    """255 is NaN in OCP MX; elsewhere it is decoded as 2**128 without a word."""
    write_gpt_oss(tmp_path)

    def damage(tensors: dict) -> dict:
        tensors[SCALES][3, 5, 1] = 255
        tensors[SCALES.replace("layers.1", "layers.2")][0, 0, 0] = 255
        return tensors

    rewrite(tmp_path, damage)
    with pytest.raises(CheckpointError, match="2 problems") as raised:
        load_target(tmp_path, experts=experts)
    assert SCALES in str(raised.value)
    assert "NaN in OCP MX" in str(raised.value)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_B33_M6_all_bytes_under_all_scales_decode_alike_everywhere(dtype):
    """Table in numpy == reference == planes == the loader, bit for bit, overflowing results included."""
    codes, scales = all_bytes_and_scales()
    with np.errstate(over="ignore"):
        expected = decode_by_table(codes, scales).astype(np.float32).astype(dtype)
    assert_equal_but_for_flushed(mxfp4.decode(on_device(mxfp4.Mxfp4(codes, scales)), jnp.dtype(dtype)), expected)
    nibbles = [jnp.asarray(nibble) for nibble in (codes & 15, codes >> 4)]
    low, high = (plane(nibble, jnp.asarray(scales), jnp.dtype(dtype)) for nibble in nibbles)
    assert_equal_but_for_flushed(low, expected[:, 0::2])
    assert_equal_but_for_flushed(high, expected[:, 1::2])
    assert_equal_but_for_flushed(np.asarray(decode(codes.reshape(255, 16, 16), scales, (512, 255), dtype)).T, expected)


def test_M3_planes_matmul_equals_the_decoded_product():
    """Output-major and not square: a transpose fails by shape or by value. Small integers make every order exact."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 256, (24, 32), np.uint8)
    scales = rng.integers(126, 129, (24, 2), np.uint8)
    x = rng.integers(-3, 4, (5, 64)).astype(np.float32)
    expected = x @ decode_by_table(codes, scales).T
    weight = on_device(mxfp4.Mxfp4(codes, scales))
    for name, matmul in mxfp4.IMPLEMENTATIONS.items():
        np.testing.assert_array_equal(matmul(jnp.asarray(x), weight), expected, err_msg=name)


def samples() -> np.ndarray:
    """Blocks of every kind ``[N, 32]``: random over many magnitudes, exact halves between codes, zeros, one outlier."""
    rng = np.random.default_rng(5)
    random = rng.standard_normal((600, 32)) * np.exp2(rng.integers(-90, 90, (600, 1)))
    grid = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, -0.0])
    ties = rng.choice(np.concatenate([grid, -grid]), (200, 32)) * np.exp2(rng.integers(-20, 20, (200, 1)))
    outlier = np.where(np.arange(32) == 7, 1e4, random[:50] / 1e30)
    return np.concatenate([random, ties, outlier, np.zeros((1, 32))]).astype(np.float32)


def test_packing_is_idempotent_on_what_it_has_made():
    once = mxfp4.decode(on_device(mxfp4.pack(samples())), FLOAT32)
    twice = mxfp4.decode(on_device(mxfp4.pack(np.asarray(once))), FLOAT32)
    np.testing.assert_array_equal(bits(twice), bits(once))


def test_packing_rounds_to_the_nearest_value_and_never_saturates():
    values = samples().astype(np.float64)
    packed = mxfp4.pack(values)
    decoded = decode_by_table(packed.codes, packed.scales)
    step = np.exp2(packed.scales.astype(np.float64) - 127)
    grid = np.unique(np.abs([0, 0.5, 1, 1.5, 2, 3, 4, 6]))
    best = np.abs(np.abs(values / step)[..., None] - grid).min(-1) * step
    np.testing.assert_array_equal(np.abs(decoded - values), best)
    assert (np.abs(values) <= 6 * step).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_rounding_inside_jit_is_packing_bit_for_bit(axis):
    values = samples() if axis else samples().T
    packed = mxfp4.pack(np.moveaxis(values, axis, -1))
    expected = np.moveaxis(np.asarray(mxfp4.decode(on_device(packed), FLOAT32)), -1, axis)
    rounded = jax.jit(round_to_mxfp4, static_argnums=1)(jnp.asarray(values), axis)
    np.testing.assert_array_equal(bits(rounded), bits(np.ascontiguousarray(expected)))


def test_M11_a_packed_expert_is_a_view_of_the_file(tmp_path):
    """The bytes of one expert are one range of the file: offload can read them without decoding anything."""
    write_gpt_oss(tmp_path)
    reader = open_checkpoint(tmp_path)
    _, params = load_target(tmp_path, experts="packed")
    view = reader[BLOCKS][4]
    assert np.shares_memory(view, reader[BLOCKS])
    assert view.tobytes() == np.asarray(params["moe_1"]["experts"]["down"].codes[4]).tobytes()


def test_packed_from_a_plain_file_is_refused(tmp_path):
    write_gpt_oss(tmp_path, "bfloat16")
    with pytest.raises(CheckpointError, match="experts='packed' needs MXFP4 tensors"):
        load_target(tmp_path, experts="packed")
    with pytest.raises(ValueError, match="known: packed, bfloat16, float32"):
        load_target(tmp_path, experts="int8")


def test_the_default_form_depends_on_size_and_is_logged(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", "checkpoints.load")
    write_gpt_oss(tmp_path)
    assert load_target(tmp_path)[0].module.layout == "split"
    assert "experts decoded from MXFP4 to float32, split" in caplog.text
    monkeypatch.setattr("checkpoints.gpt_oss.DECODED_BY_DEFAULT", 1000)
    assert load_target(tmp_path)[0].module.layout == "packed"
    assert "experts kept as MXFP4" in caplog.text


# --- memory ----------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, pathlib, jax, jax.numpy as jnp
from checkpoints.load import load_target
def status(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
load_target(sys.argv[2], experts=sys.argv[3], dtype=jnp.bfloat16)  # jax and its compiler are there before we measure
pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = status("VmRSS")
_, params = load_target(sys.argv[1], experts=sys.argv[3], dtype=jnp.bfloat16)
print(status("VmHWM") - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


def write_synthetic(folder: Path, experts: int, layers: int) -> None:
    """A packed checkpoint of about 150 MB with random codes, layer by layer in shards like a release."""
    folder.mkdir()
    config = gpt_oss_config(
        hidden_size=768, intermediate_size=736, experts=experts, layers=layers, windows=(None,) * layers
    )
    (folder / "config.json").write_text(json.dumps(gpt_oss_hf(config)))
    rng = np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> tuple[str, np.ndarray]:
        if name.endswith("blocks"):
            return name, rng.integers(0, 256, shape, np.uint8)
        if name.endswith("scales"):
            return name, np.full(shape, 120, np.uint8)
        return name, np.ones(shape, ml_dtypes.bfloat16)

    width, inner, query, keys = 768, 736, 60, 20
    for i in range(layers):
        at, moe = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        shapes = {f"{at}.{p}_proj": (out, width) for p, out in (("q", query), ("k", keys), ("v", keys))}
        shapes |= {f"{at}.o_proj": (width, query), f"{moe}.router": (experts, width)}
        tensors = [tensor(f"{name}.weight", *shape) for name, shape in shapes.items()]
        tensors += [tensor(f"{name}.bias", shape[0]) for name, shape in shapes.items()]
        tensors += [tensor(f"model.layers.{i}.{n}_layernorm.weight", width) for n in ("input", "post_attention")]
        for name, rows, columns in (("gate_up", 2 * inner, width), ("down", width, inner)):
            tensors.append(tensor(f"{moe}.experts.{name}_proj_blocks", experts, rows, columns // 32, 16))
            tensors.append(tensor(f"{moe}.experts.{name}_proj_scales", experts, rows, columns // 32))
            tensors.append(tensor(f"{moe}.experts.{name}_proj_bias", experts, rows))
        write_file(folder / f"layer-{i}.safetensors", [*tensors, tensor(f"{at}.sinks", 6)])
    names = {"model.embed_tokens.weight": (101, width), "lm_head.weight": (101, width), "model.norm.weight": (width,)}
    write_file(folder / "rest.safetensors", [tensor(name, *shape) for name, shape in names.items()])


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc to measure peaks")
@pytest.mark.parametrize(
    ("experts", "layers", "option"), [(32, 5, "packed"), (32, 5, "bfloat16"), (16, 10, "bfloat16")]
)
def test_B37_M8_peak_memory_of_a_load(tmp_path, experts, layers, option):
    """Packed: at most 1.3 x the file. Decoded: the result and one layer's experts, packed and unpacked; so no float32
    copy and no second whole one. Stacked (32 experts) and split (16)."""
    write_synthetic(tmp_path / "large", experts, layers)
    write_gpt_oss(tmp_path / "small", experts=experts)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "large"), str(tmp_path / "small"), option]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=600)
    growth, final = map(int, done.stdout.split())
    stored = open_checkpoint(tmp_path / "large").nbytes
    layer = experts * 3 * 768 * 736
    limit = 1.3 * stored if option == "packed" else final + layer * (2 + 17 / 32)
    print(
        f"{option}, {experts} experts: file {stored / 1e6:.0f} MB, final {final / 1e6:.0f}, growth {growth / 1e6:.0f}"
    )
    assert 140e6 < stored < 170e6
    assert growth <= limit, (growth / 1e6, limit / 1e6)

"""How tensors get to the device: one copy, right in every layout and dtype, quiet unless it takes long."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from checkpoints import load
from checkpoints.load import ALIGNMENT, aligned_copy, load_target
from tests.checkpoints.tiny_checkpoints import write_gpt_oss, write_qwen3


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("source", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_copies_of_any_view_are_exact_casts(source, dtype):
    """Tiles at ragged edges, transposed stacks, vectors, scalars and empty tensors."""
    whole = np.random.default_rng(0).standard_normal((3, 130, 259)).astype(source)
    views = [whole, whole[1], whole[1].T, whole.swapaxes(1, 2), whole[0, :, 5], whole[:0], whole[0, 0, 0]]
    for view in views:
        copy = aligned_copy(np.asarray(view), dtype)
        assert copy.dtype == dtype
        assert copy.ctypes.data % ALIGNMENT == 0 or not copy.size
        np.testing.assert_array_equal(copy, np.asarray(view).astype(dtype))
        assert not np.shares_memory(copy, whole)


def test_the_cpu_takes_the_copy_over_without_another():
    copy = aligned_copy(np.ones((300, 400), np.float32).T, np.float32)
    assert jax.device_put(copy, jax.devices("cpu")[0]).unsafe_buffer_pointer() == copy.ctypes.data


def test_a_load_shows_a_bar_only_when_it_takes_long(tmp_path, capsys, monkeypatch):
    write_qwen3(tmp_path / "model-name")
    load_target(tmp_path / "model-name")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(load, "QUIET_SECONDS", 0.0)
    load_target(tmp_path / "model-name")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "loading model-name" in printed.err


def test_options_that_make_no_sense_are_refused(tmp_path):
    write_qwen3(tmp_path / "dense")
    with pytest.raises(ValueError, match="qwen3 has no experts"):
        load_target(tmp_path / "dense", experts="packed")
    with pytest.raises(ValueError, match=r"taps \[3\] are not layers"):
        load_target(tmp_path / "dense", taps=(0, 3))


@pytest.mark.parametrize(
    ("option", "dtype"), [("packed", jnp.uint8), ("bfloat16", jnp.bfloat16), ("float32", jnp.float32)]
)
def test_experts_have_their_own_dtype_and_the_rest_the_models(tmp_path, option, dtype):
    """The step runs with every choice, and gives the same hidden states: MXFP4 values are exact in all of them."""
    write_gpt_oss(tmp_path)
    target, params = load_target(tmp_path, experts=option)
    experts = params["moe_2"]["experts"]
    first = experts["down"].codes if option == "packed" else experts[0]["down"]
    assert first.dtype == dtype
    assert params["moe_2"]["router"].dtype == jnp.float32
    assert (
        jax.tree.leaves([experts["down_bias"] if option == "packed" else experts[0]["down_bias"]])[0].dtype
        == jnp.float32
    )
    step = jax.jit(target.step)
    out = step(params, jnp.arange(6, dtype=jnp.int32)[None], target.init_cache(1, 8, 6))
    plain, plain_params = load_target(tmp_path, experts="float32")
    expected = jax.jit(plain.step)(plain_params, jnp.arange(6, dtype=jnp.int32)[None], plain.init_cache(1, 8, 6))
    np.testing.assert_allclose(out.hidden, expected.hidden, rtol=1e-5, atol=1e-5)

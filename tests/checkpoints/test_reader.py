"""Reading safetensors: every dtype to the bit, and every fault of a folder before a tensor is read."""

import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from checkpoints.errors import CheckpointError
from checkpoints.reader import INDEX, open_checkpoint
from checkpoints.safetensors_file import write_file
from tests.checkpoints.tiny_checkpoints import bf16, edit_json

BYTES = {
    "BF16": (ml_dtypes.bfloat16, [0x3F80, 0x8000, 0x7F80, 0x0001], np.uint16, [1.0, -0.0, np.inf, 2.0**-133]),
    "F16": (np.float16, [0x3C00, 0x8000, 0x7C00, 0x0001], np.uint16, [1.0, -0.0, np.inf, 2.0**-24]),
    "F32": (np.float32, [0x3F800000, 0x80000000, 0x00000001], np.uint32, [1.0, -0.0, 2.0**-149]),
    "F64": (np.float64, [0x3FF0000000000000, 1], np.uint64, [1.0, 2.0**-1074]),
    "F8_E4M3": (ml_dtypes.float8_e4m3fn, [0x38, 0x7E, 0x01, 0x80], np.uint8, [1.0, 448.0, 2.0**-9, -0.0]),
    "F8_E8M0": (ml_dtypes.float8_e8m0fnu, [0x7F, 0x00, 0xFE], np.uint8, [1.0, 2.0**-127, 2.0**127]),
    "U8": (np.uint8, [0, 1, 255], np.uint8, [0, 1, 255]),
}


def raw_file(path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """A safetensors file written by hand, byte by byte, header of an odd length included."""
    header, data = {}, b""
    for name, (code, shape, payload) in tensors.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [len(data), len(data) + len(payload)]}
        data += payload
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def sharded(folder) -> None:
    """Two shards and their index."""
    folder.mkdir(exist_ok=True)
    write_file(folder / "model-00001-of-00002.safetensors", [("a", bf16(3, 5)), ("b", bf16(7))])
    write_file(folder / "model-00002-of-00002.safetensors", [("c", bf16(400, 11))])
    owners = {"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}
    owners["c"] = "model-00002-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": owners}))


def problems_of(folder) -> str:
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(folder)
    assert raised.value.folder == folder
    return str(raised.value)


def test_B39_every_dtype_is_read_bit_exactly_from_one_file(tmp_path):
    """One file with all of them at unaligned offsets, written by hand."""
    payloads = {code: np.asarray(bits, kind).tobytes() for code, (_, bits, kind, _) in BYTES.items()}
    tensors = {"U8 first": ("U8", [1], b"\x07")}
    tensors |= {code: (code, [len(BYTES[code][1])], payload) for code, payload in payloads.items()}
    raw_file(tmp_path / "model.safetensors", tensors)
    reader = open_checkpoint(tmp_path)
    for code, (dtype, _, _, values) in BYTES.items():
        assert reader[code].dtype == dtype, code
        assert reader[code].tobytes() == payloads[code], code
        np.testing.assert_array_equal(reader[code].astype(np.float64), values, err_msg=code)
        np.testing.assert_array_equal(np.signbit(reader[code].astype(np.float64)), np.signbit(values), err_msg=code)


def test_B39_a_file_of_ours_is_read_by_safetensors_itself(tmp_path):
    written = {code: np.asarray(bits, kind).view(dtype) for code, (dtype, bits, kind, _) in BYTES.items()}
    written |= {"scalar": np.float32(2.5).reshape(()), "empty": np.zeros((0, 4), np.float32)}
    write_file(tmp_path / "model.safetensors", written.items())
    reader = open_checkpoint(tmp_path)
    for name, value in written.items():
        assert reader[name].tobytes() == value.tobytes()
        assert reader[name].shape == value.shape
    with safe_open(tmp_path / "model.safetensors", "np") as theirs:
        assert set(theirs.keys()) == set(written)
        for name in ("BF16", "F32", "U8", "scalar"):
            assert theirs.get_tensor(name).tobytes() == written[name].tobytes()


def test_reading_is_lazy_and_a_view(tmp_path):
    """A tensor is a view of the file and read-only; a slice copies nothing; releasing pages keeps views valid."""
    write_file(tmp_path / "model.safetensors", [("a", np.arange(40000, dtype=np.float32).reshape(200, 200))])
    reader = open_checkpoint(tmp_path)
    view = reader["a"]
    assert not view.flags.owndata
    assert not view.flags.writeable
    assert np.shares_memory(reader["a"][3:5], view)
    reader.release("a")
    assert view[199, 199] == 39999
    assert reader.nbytes == 160000


def test_B39_a_file_cut_short_is_refused(tmp_path):
    sharded(tmp_path)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1000)
    said = problems_of(tmp_path)
    assert shard.name in said
    assert "cut short" in said
    os.truncate(shard, 5)
    assert "cut short" in problems_of(tmp_path)


def test_B39_a_missing_shard_is_refused(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    said = problems_of(tmp_path)
    assert "model-00001-of-00002.safetensors" in said
    assert "missing" in said


def test_B39_an_index_that_names_a_tensor_its_shard_lacks_is_refused(tmp_path):
    sharded(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    edit_json(tmp_path / INDEX, weight_map=index | {"ghost": "model-00001-of-00002.safetensors"})
    said = problems_of(tmp_path)
    assert "'ghost'" in said
    assert "model-00001-of-00002.safetensors" in said


def test_B39_index_and_shards_that_disagree_are_refused(tmp_path):
    """A tensor in another shard than the index says, and one that the index does not name."""
    sharded(tmp_path)
    edit_json(
        tmp_path / INDEX, weight_map={"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}
    )
    said = problems_of(tmp_path)
    assert "holds 'a'; it is in model-00001" in said
    assert "holds 'c', which" in said


def test_B39_all_problems_are_reported_together(tmp_path):
    sharded(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    edit_json(
        tmp_path / INDEX, weight_map=index | {"ghost": "model-00001-of-00002.safetensors", "far": "../x.safetensors"}
    )
    shard = tmp_path / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1000)
    with pytest.raises(CheckpointError, match="3 problems") as raised:
        open_checkpoint(tmp_path)
    assert len(raised.value.problems) == 3


def test_without_an_index_shards_are_joined_and_duplicates_refused(tmp_path):
    sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    assert set(open_checkpoint(tmp_path)) == {"a", "b", "c"}
    write_file(tmp_path / "model-00003-of-00003.safetensors", [("a", bf16(2))])
    assert "'a' is in model-00001-of-00002.safetensors and in model-00003-of-00003" in problems_of(tmp_path)


def test_model_safetensors_is_the_whole_checkpoint(tmp_path):
    """Other tensors may lie beside it; transformers does not read them either."""
    write_file(tmp_path / "model.safetensors", [("a", bf16(2))])
    write_file(tmp_path / "other.safetensors", [("a", bf16(3)), ("b", bf16(1))])
    assert set(open_checkpoint(tmp_path)) == {"a"}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"a": ("F4_E2M1", [2], b"\0\0")}, "dtype F4_E2M1 is not supported"),
        ({"a": ("F32", [2], b"\0" * 6)}, "takes 8 bytes"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path, tensors, said):
    raw_file(tmp_path / "model.safetensors", tensors)
    assert said in problems_of(tmp_path)


def test_things_that_are_not_checkpoints_say_what_they_are(tmp_path):
    assert "no *.safetensors file" in problems_of(tmp_path)
    assert "is not a folder" in problems_of(tmp_path / "nowhere")
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n")
    assert "Git LFS pointer" in problems_of(tmp_path)
    file.write_bytes(struct.pack("<Q", 4) + b"{oo}")
    assert "not JSON" in problems_of(tmp_path)
    write_file(file, [("a", bf16(2))])
    file.write_bytes(file.read_bytes() + b"more")
    assert "4 bytes belong to no tensor" in problems_of(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    assert "weight_map" in problems_of(tmp_path)

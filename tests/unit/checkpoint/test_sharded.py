"""Any region of a tensor can be read from a checkpoint, whatever the shards of the tensor are."""

import io
import json
import pickle
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from diffmegatron.checkpoint import tensor_file
from diffmegatron.checkpoint.checkpoint_manifest import describe_file
from diffmegatron.checkpoint.sharded import ShardedReader, named_tensors, pieces_of, write_pieces
from diffmegatron.errors import UserError
from diffmegatron.model.parameter_shards import Shard

NAME = "decoder.layers.0.mlp.linear_fc1.weight"


def row_shards(rows: int, columns: int, cuts: list[int]) -> list[Shard]:
    """Return the shards of a [rows, columns] tensor that is cut at the row indices ``cuts``."""
    edges = [0, *cuts, rows]
    return [
        Shard(NAME, (rows, columns), (first, 0), (last - first, columns), 0, True)
        for first, last in pairwise(edges)
        if last > first
    ]


def write_cut(folder: Path, whole: torch.Tensor, cuts: list[int], runs: int) -> list[str]:
    """Write each shard as ``runs`` files, like ``runs`` ZeRO ranks per tensor-parallel rank.

    Each file has a range of the flattened shard. No file is written for an empty range.

    Returns:
        The names of the files.
    """
    names = []
    for shard in row_shards(*whole.shape, cuts):
        flat = whole[shard.box].reshape(-1)
        for number, run in enumerate(flat.tensor_split(runs)):
            if run.numel() == 0:
                continue
            start = sum(part.numel() for part in flat.tensor_split(runs)[:number])
            tensors = {"weight": run, "exp_avg": run * 2, "exp_avg_sq": run * 3}
            names.append(f"rank_{len(names):05d}.safetensors")
            described = named_tensors(pieces_of([shard], start, tensors), {})
            write_pieces(folder / names[-1], *described)
    return names


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_cut_is_read_as_any_box(data, tmp_path_factory):
    rows, columns = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    cuts = sorted(data.draw(st.sets(st.integers(1, rows), max_size=4)))
    whole = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    folder = tmp_path_factory.mktemp("cut")
    names = write_cut(folder, whole, cuts, data.draw(st.integers(1, 4)))
    reader = ShardedReader(folder, names)
    top = data.draw(st.integers(0, rows - 1))
    height = data.draw(st.integers(1, rows - top))
    left = data.draw(st.integers(0, columns - 1))
    width = data.draw(st.integers(1, columns - left))
    box = whole[top : top + height, left : left + width]
    assert torch.equal(reader.read_box("weight", NAME, (top, left), (height, width)), box)
    assert torch.equal(reader.read_box("exp_avg", NAME, (top, left), (height, width)), box * 2)
    assert torch.equal(reader.read_tensor("weight", NAME), whole)


def test_two_boxes_of_one_parameter():
    """Check that a range of a rank's flat parameter is split where two shards meet.

    The shards are boxes of one fused parameter: SwiGLU's gate and up projection.
    """
    gate = Shard(NAME, (8, 3), (2, 0), (2, 3), 0, True)
    up = Shard(NAME, (8, 3), (6, 0), (2, 3), 6, True)
    values = torch.arange(12.0)
    pieces = pieces_of([gate, up], 4, {"weight": values[4:9]})
    assert [(p.shard, p.start, p.tensors["weight"].tolist()) for p in pieces] == [
        (gate, 4, [4.0, 5.0]),
        (up, 0, [6.0, 7.0, 8.0]),
    ]


def test_a_missing_rank_is_an_error(tmp_path):
    names = write_cut(tmp_path, torch.randn(6, 2), [3], runs=2)
    for missing in range(4):
        with pytest.raises(UserError, match=r"holds 9 of the 12 elements of .*linear_fc1.weight"):
            ShardedReader(tmp_path, names[:missing] + names[missing + 1 :])


def test_a_box_of_another_model_is_an_error(tmp_path):
    reader = ShardedReader(tmp_path, write_cut(tmp_path, torch.randn(2, 2), [], 1))
    with pytest.raises(UserError, match="has no tensor output_layer"):
        reader.read_tensor("weight", "output_layer.weight")
    for offset, shape in (((0, 0), (3, 2)), ((1, 0), (2, 2)), ((0,), (2,))):
        with pytest.raises(UserError, match=r"with shape \[2, 2\], .* of this model"):
            reader.read_box("weight", NAME, offset, shape)


def test_a_truncated_file_is_an_error(tmp_path):
    (name,) = write_cut(tmp_path, torch.randn(6, 2), [], 1)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:40])
    with pytest.raises(UserError, match="not a readable checkpoint file"):
        ShardedReader(tmp_path, [name])
    with pytest.raises(UserError, match=r"cannot read .*missing: No such file"):
        ShardedReader(tmp_path, ["missing"])


def test_a_header_without_valid_pieces_is_an_error(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"x": torch.ones(2)}, path, metadata={"pieces": json.dumps([{"name": 1}])})
    with pytest.raises(UserError, match=r"other.safetensors is damaged .* at \[0\].name"):
        ShardedReader(tmp_path, [path.name])
    save_file({"x": torch.ones(2)}, path)
    with pytest.raises(UserError, match=r"other.safetensors is damaged"):
        ShardedReader(tmp_path, [path.name])


def test_a_rank_tensor_is_read_by_its_plain_name(tmp_path):
    path = tmp_path / "rank_00000.safetensors"
    write_pieces(path, *named_tensors([], {"random.cpu": torch.arange(4, dtype=torch.uint8)}))
    reader = ShardedReader(tmp_path, [path.name])
    assert reader.read_rank_tensor(path.name, "random.cpu").tolist() == [0, 1, 2, 3]
    assert reader.read_rank_tensor(path.name, "random.cuda") is None
    assert reader.read_rank_tensor("rank_00001.safetensors", "random.cpu") is None
    assert list(load_file(path)) == ["random.cpu"]


class Exploit:
    """Object whose pickle writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "run by reading a checkpoint")


@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_pickle_is_refused_and_not_run(kind, tmp_path):
    path, proof = tmp_path / "rank_00000.safetensors", tmp_path / "proof"
    if kind == "pickle":
        path.write_bytes(pickle.dumps({"weight.0": Exploit(proof)}))
    else:
        torch.save({"weight.0": Exploit(proof)}, path)
    with pytest.raises(UserError, match="is a pickle, which can run any program"):
        ShardedReader(tmp_path, [path.name])
    assert not proof.exists()
    content = path.read_bytes()
    torch.load(io.BytesIO(content), weights_only=False) if kind == "torch" else pickle.loads(
        content
    )
    assert proof.exists(), "loading the pickle runs its code"


@pytest.mark.parametrize(
    "length", [0x0280, 0x0380, 0x0480, 0x0580, int.from_bytes(b"PK", "little")]
)
def test_a_header_length_that_looks_like_a_pickle_is_accepted(length, tmp_path):
    path, tensors = tmp_path / "file.safetensors", {"weight": torch.arange(3.0)}
    tensor_file.write_safetensors(path, tensors, {"key": ""})
    shortest = int.from_bytes(path.read_bytes()[:8], "little")
    tensor_file.write_safetensors(path, tensors, {"key": "x" * (length - shortest)})
    assert int.from_bytes(path.read_bytes()[:8], "little") == length
    assert tensor_file.TensorFile(path).array("weight").tolist() == [0.0, 1.0, 2.0]


def test_the_safetensors_library_reads_written_files(tmp_path, monkeypatch):
    # With a small buffer, the writer needs several chunks per tensor and several flushes.
    monkeypatch.setattr(tensor_file, "_BUFFER", 1000)
    tensors = {"bytes": torch.arange(5, dtype=torch.uint8), "empty": torch.empty(0)}
    tensors |= {f"weight.{n}": torch.randn(300 * n, 7) for n in range(4)}
    entry = tensor_file.write_safetensors(tmp_path / "file.safetensors", tensors, {"key": "välue"})
    read = load_file(tmp_path / "file.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert entry == describe_file(tmp_path / "file.safetensors")


@pytest.mark.parametrize("count", [0, 1, 999, 5000])
def test_a_file_is_checked_chunk_by_chunk(count, tmp_path, monkeypatch):
    """Check that a NaN is found at any place in the floats.

    The uint8 tensor ``own`` follows the floats in the file. Its bytes would be NaN as float32, but
    must not be checked as numbers.
    """
    monkeypatch.setattr(tensor_file, "_BUFFER", 1000)
    path = tmp_path / "file.safetensors"
    own = torch.full((777,), 255, dtype=torch.uint8)
    floats = torch.randn(count)
    entry = tensor_file.write_safetensors(path, {"own": own, "floats": floats}, {})
    opened = tensor_file.TensorFile(path)
    opened.check_content(entry)
    assert np.array_equal(opened.array("floats"), floats.numpy())
    assert np.array_equal(opened.array("own"), own.numpy())
    with pytest.raises(UserError, match="checksum"):
        opened.check_content(replace(entry, crc32=entry.crc32 ^ 1))
    for place in {0, count // 2, count - 1} if count else ():
        floats[place] = torch.nan
        entry = tensor_file.write_safetensors(path, {"own": own, "floats": floats}, {})
        with pytest.raises(UserError, match="not finite"):
            tensor_file.TensorFile(path).check_content(entry)
        floats[place] = 0.0


def test_files_written_by_the_safetensors_library_are_read(tmp_path):
    save_file({"b": torch.randn(5), "a": torch.randn(3)}, tmp_path / "file", metadata={"k": "v"})
    opened = tensor_file.TensorFile(tmp_path / "file")
    assert opened.metadata == {"k": "v"}
    expected = load_file(tmp_path / "file")
    assert all(np.array_equal(opened.array(n), expected[n].numpy()) for n in ("a", "b"))

"""Pieces of named tensors: any cut into boxes and runs is read back as any other cut."""

import io
import json
import pickle
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from diffmegatron.checkpoint import writing
from diffmegatron.checkpoint.manifest import describe_file
from diffmegatron.checkpoint.sharded import ShardedReader, named_tensors, pieces_of, write_pieces
from diffmegatron.errors import UserError
from diffmegatron.model.shards import Shard

NAME = "decoder.layers.0.mlp.linear_fc1.weight"


def row_shards(rows: int, columns: int, cuts: list[int]) -> list[Shard]:
    """The boxes of a [rows, columns] tensor cut by rows, each a parameter of its own."""
    edges = [0, *cuts, rows]
    return [
        Shard(NAME, (rows, columns), (first, 0), (last - first, columns), 0, True)
        for first, last in pairwise(edges)
        if last > first
    ]


def write_cut(folder: Path, whole: torch.Tensor, cuts: list[int], runs: int) -> list[Path]:
    """One file per box and run, as tensor-parallel ranks with ``runs`` ZeRO ranks each would."""
    paths = []
    for shard in row_shards(*whole.shape, cuts):
        flat = whole[shard.box].reshape(-1)
        for number, run in enumerate(flat.tensor_split(runs)):
            if run.numel() == 0:
                continue
            start = sum(part.numel() for part in flat.tensor_split(runs)[:number])
            tensors = {"weight": run, "exp_avg": run * 2}
            path = folder / f"rank_{len(paths):05d}.safetensors"
            write_pieces(path, *named_tensors(pieces_of([shard], start, tensors), {}))
            paths.append(path)
    return paths


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_cut_is_read_as_any_box(data, tmp_path_factory):
    rows, columns = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    cuts = sorted(data.draw(st.sets(st.integers(1, rows), max_size=4)))
    whole = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    paths = write_cut(tmp_path_factory.mktemp("cut"), whole, cuts, data.draw(st.integers(1, 4)))
    reader = ShardedReader(paths)
    top = data.draw(st.integers(0, rows - 1))
    height = data.draw(st.integers(1, rows - top))
    left = data.draw(st.integers(0, columns - 1))
    width = data.draw(st.integers(1, columns - left))
    box = whole[top : top + height, left : left + width]
    assert torch.equal(reader.box("weight", NAME, (top, left), (height, width)), box)
    assert torch.equal(reader.box("exp_avg", NAME, (top, left), (height, width)), box * 2)
    assert torch.equal(reader.whole("weight", NAME), whole)


def test_two_boxes_of_one_parameter():
    """SwiGLU's gate and up projection: one parameter, two boxes of the whole tensor."""
    gate = Shard(NAME, (8, 3), (2, 0), (2, 3), 0, True)
    up = Shard(NAME, (8, 3), (6, 0), (2, 3), 6, True)
    values = torch.arange(12.0)
    pieces = pieces_of([gate, up], 4, {"weight": values[4:9]})
    assert [(p.shard, p.start, p.tensors["weight"].tolist()) for p in pieces] == [
        (gate, 4, [4.0, 5.0]),
        (up, 0, [6.0, 7.0, 8.0]),
    ]


def test_a_missing_rank_is_an_error(tmp_path):
    whole = torch.randn(6, 2)
    paths = write_cut(tmp_path, whole, [3], runs=2)
    with pytest.raises(UserError, match=r"3 of 6 elements|a rank's file is missing"):
        ShardedReader(paths[1:]).whole("weight", NAME)
    with pytest.raises(UserError, match=r"holds 6 of the 12 elements"):
        ShardedReader(paths[:2]).whole("weight", NAME)


def test_an_unknown_tensor_is_an_error(tmp_path):
    reader = ShardedReader(write_cut(tmp_path, torch.randn(2, 2), [], 1))
    with pytest.raises(UserError, match="has no tensor output_layer"):
        reader.whole("weight", "output_layer.weight")


def test_a_truncated_file_is_an_error(tmp_path):
    (path,) = write_cut(tmp_path, torch.randn(6, 2), [], 1)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match="not a readable checkpoint file"):
        ShardedReader([path])


def test_a_header_of_something_else_is_an_error(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"x": torch.ones(2)}, path, metadata={"pieces": json.dumps([{"name": 1}])})
    with pytest.raises(UserError, match="not a readable checkpoint file"):
        ShardedReader([path])


def test_what_a_rank_adds_under_a_plain_name(tmp_path):
    path = tmp_path / "rank_00000.safetensors"
    write_pieces(path, *named_tensors([], {"random.cpu": torch.arange(4, dtype=torch.uint8)}))
    reader = ShardedReader([path])
    assert reader.extra(path.name, "random.cpu").tolist() == [0, 1, 2, 3]
    assert reader.extra(path.name, "random.cuda") is None
    assert reader.extra("rank_00001.safetensors", "random.cpu") is None
    assert list(load_file(path)) == ["random.cpu"]


class Exploit:
    """What a pickle does when it is read: here it writes a file."""

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
        ShardedReader([path])
    assert not proof.exists()
    content = path.read_bytes()
    torch.load(io.BytesIO(content), weights_only=False) if kind == "torch" else pickle.loads(
        content
    )
    assert proof.exists(), "the exploit would have worked"


def test_what_is_written_is_what_the_library_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "_CHUNK", 1000)  # several chunks per tensor, several flushes
    tensors = {"bytes": torch.arange(5, dtype=torch.uint8), "empty": torch.empty(0)}
    tensors |= {f"weight.{n}": torch.randn(300 * n, 7) for n in range(4)}
    entry = writing.write_safetensors(tmp_path / "file.safetensors", tensors, {"key": "välue"})
    read = load_file(tmp_path / "file.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    assert entry == describe_file(tmp_path / "file.safetensors")

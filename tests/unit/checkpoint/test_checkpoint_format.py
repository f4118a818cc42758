"""``open_checkpoint`` returns the saved content, or raises an error of one sentence."""

import copy
import functools
import itertools
import json
import math
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffmegatron.checkpoint.checkpoint_format import Checkpoint, open_checkpoint
from diffmegatron.checkpoint.sharded import TENSOR_KINDS
from diffmegatron.config.recovery_config import GuardConfig
from diffmegatron.data.sampling.mixture import MixtureHistory
from diffmegatron.errors import UserError
from diffmegatron.optim.guard import Guard
from tests.checkpoints import (
    NAMES,
    change_header,
    change_json,
    sign,
    write_checkpoint,
)

FILES = ("manifest.json", "state.json", "recipe.yaml", "rank_00000.safetensors")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("saved"), 7)


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of the saved checkpoint that a test can damage."""
    return shutil.copytree(saved, tmp_path / saved.name)


def content(checkpoint: Checkpoint) -> tuple[object, ...]:
    """Return the whole content of a checkpoint, for comparison with ``==``."""
    tensors = checkpoint.tensors
    values = {
        (kind, name): tensors.read_tensor(kind, name).tolist()
        for kind in TENSOR_KINDS
        for name in tensors.names()
    }
    own = [
        tensors.read_rank_tensor(f"rank_0000{rank}.safetensors", "random.cpu") for rank in (0, 1)
    ]
    return (
        values,
        [None if each is None else each.tolist() for each in own],
        checkpoint.state,
        checkpoint.recipe,
    )


def test_an_opened_checkpoint_has_the_saved_content(saved):
    values, own, state, recipe = content(open_checkpoint(saved))
    assert values["weight", NAMES[0]] == (
        torch.cat([torch.arange(12) + 70.0, torch.arange(12) + 80.0]).view(6, 4).tolist()
    )
    assert values["exp_avg_sq", NAMES[1]] == (torch.arange(12, 16) + 0.08).tolist()
    assert own == [[0] * 16, [1] * 16]
    assert (state["step"], state["world_size"], state["data"]["consumed_samples"]) == (7, 2, 56)
    assert recipe.model.num_layers == 2


def flip(path: Path, chance: random.Random) -> None:
    """Flip one random bit of a file, or truncate the file at a random place."""
    damaged = bytearray(path.read_bytes())
    place = chance.randrange(len(damaged))
    if chance.random() < 0.2:
        del damaged[place:]
    else:
        damaged[place] ^= 1 << chance.randrange(8)
    path.write_bytes(damaged)


@pytest.mark.parametrize("name", FILES)
def test_flipped_bits_and_truncation_never_change_the_content(name, directory):
    """Check that damage is found or changes no content.

    Damage to white space of the manifest, for example, is not found.
    """
    expected = content(open_checkpoint(directory))
    path, chance, found = directory / name, random.Random(name), 0
    whole = path.read_bytes()
    for _ in range(200):
        flip(path, chance)
        try:
            assert content(open_checkpoint(directory)) == expected
        except UserError as error:
            found += 1
            assert "\n" not in str(error) and len(str(error)) < 1000
        path.write_bytes(whole)
    assert found > (150 if name == "manifest.json" else 195)


@pytest.mark.parametrize("name", FILES[1:])
def test_damage_with_matching_checksums_raises_only_user_errors(name, directory):
    """Check that a damaged file with a matching checksum raises no error but ``UserError``."""
    path, chance, found = directory / name, random.Random(name), 0
    whole = path.read_bytes()
    for _ in range(150):
        flip(path, chance)
        sign(directory)
        try:
            content(open_checkpoint(directory))
        except UserError as error:
            found += 1
            assert "\n" not in str(error) and len(str(error)) < 1000
        path.write_bytes(whole)
    assert found > 100


def set_piece(rank: int, index: int, **values: object):
    def change(directory: Path) -> None:
        path = directory / f"rank_0000{rank}.safetensors"
        change_header(path, lambda header, pieces: pieces[index].update(values))

    return change


def set_tensor(name: str, **values: object):
    def change(directory: Path) -> None:
        path = directory / "rank_00000.safetensors"
        change_header(path, lambda header, pieces: header[name].update(values))

    return change


def set_state(**values: object):
    return lambda directory: change_json(
        directory / "state.json", lambda state: state.update(values)
    )


def set_guard(**values: object):
    return lambda directory: change_json(
        directory / "state.json", lambda state: state["guard"].update(values)
    )


def set_data(**values: object):
    return lambda directory: change_json(
        directory / "state.json", lambda state: state["data"].update(values)
    )


def set_number(kind: str, value: float):
    """Return a function that sets the first element of the norm's ``kind`` tensor to ``value``.

    The norm is tensor 1 in the file of rank 1.
    """

    def change(directory: Path) -> None:
        path = directory / "rank_00001.safetensors"
        raw = bytearray(path.read_bytes())
        first = 8 + int.from_bytes(raw[:8], "little")
        begin = json.loads(raw[8:first])[f"{kind}.1"]["data_offsets"][0] + first
        raw[begin : begin + 4] = np.float32(value).tobytes()
        path.write_bytes(raw)

    return change


def drop_state(key: str):
    return lambda directory: change_json(directory / "state.json", lambda state: state.pop(key))


def drop_moment(header: dict, pieces: list) -> None:
    header["other.0"] = header.pop("exp_avg.0")


SIGNED = {
    "state is empty": (
        lambda directory: (directory / "state.json").write_text("{}"),
        r"state.json is damaged and cannot be used: Field required at step",
    ),
    "state nests deep": (
        lambda directory: (directory / "state.json").write_text("[" * 100_000),
        "state.json is damaged and cannot be used",
    ),
    "state has a large number": (set_state(step=10**4000), "state.json is damaged"),
    "state is of another step": (set_state(step=8), "is of step 8 and .* manifest of step 7"),
    "step is negative": (set_state(step=-5), "greater than or equal to 0 at step"),
    "updates are negative": (set_state(updates=-1), "greater than or equal to 0 at updates"),
    "updates are a word": (set_state(updates="7"), "valid integer at updates"),
    "data is a list": (set_state(data=[1]), "an object at data"),
    "no guard": (drop_state("guard"), "Field required at guard"),
    "too many updates": (set_state(updates=8), "7 steps cannot have 8 updates"),
    "no guard at a later step": (set_state(guard=None), "data or guard is null at step 7"),
    "another guard": (set_guard(recent={"grad": [1.0]}), "'loss' or 'gradient norm' at guard"),
    "a norm that is not finite": (set_guard(recent={"loss": [math.inf]}), "finite number at guard"),
    "negative rollbacks": (set_guard(rollbacks=-1), "or equal to 0 at guard.rollbacks"),
    "samples of half a step": (
        lambda directory: [
            change(directory) for change in (set_data(consumed_samples=60), set_guard(rollbacks=1))
        ],
        "1 rollbacks do not fit .*_samples 60",
    ),
    "samples before the step": (set_data(consumed_samples=48), "do not fit .*_samples 48"),
    "samples without a rollback": (set_data(consumed_samples=64), "0 rollbacks do not fit"),
    "negative samples": (set_data(consumed_samples=-1), "or equal to 0 at data.consumed_samples"),
    "a fraction of a sample": (set_data(consumed_samples=1.5), "valid integer at data.consumed"),
    "no mixture": (set_data(mixture=[]), "at least 1 item"),
    "a mixture of nothing": (
        set_data(mixture=[{"from_sample": 0, "sources": []}]),
        "at least 1 item",
    ),
    "a mixture of later samples": (
        lambda directory: change_json(
            directory / "state.json",
            lambda state: state["data"]["mixture"][1].update(from_sample=57),
        ),
        "begins after consumed_samples",
    ),
    "more in the state": (set_state(more=1), "Extra inputs are not permitted at more"),
    "another number of ranks": (set_state(world_size=3), "written by 3 ranks and .* lists 2 files"),
    "ranks without end": (set_state(world_size=10**15), "written by 10+ ranks"),
    "recipe extends": (
        lambda directory: (directory / "recipe.yaml").write_text("extends: /etc/passwd\n"),
        "has 'extends', which a resolved recipe must not have",
    ),
    "recipe has stages": (
        lambda directory: (directory / "recipe.yaml").write_text("stages: []\n"),
        "has 'stages'",
    ),
    "recipe is none": (
        lambda directory: (directory / "recipe.yaml").write_text("model: 3\n"),
        "recipe.yaml",
    ),
    "a rank's file is listed and foreign": (
        lambda directory: (directory / "rank_00001.safetensors").rename(directory / "rank_x"),
        "lists 2 files .* one file of each rank",
    ),
    "pieces overlap": (
        set_piece(1, 0, offset=[0, 0]),
        f"holds pieces of {NAMES[0]} that overlap",
    ),
    "boxes overlap in part": (
        set_piece(1, 0, offset=[2, 0]),
        f"holds pieces of {NAMES[0]} that overlap",
    ),
    "a gap": (
        set_piece(1, 0, global_shape=[7, 4], offset=[4, 0]),
        "stores .*linear_fc1.weight with more than one shape",
    ),
    "elements missing": (set_piece(1, 1, global_shape=[5]), "holds 4 of the 5 elements"),
    "a piece of another box": (set_piece(1, 0, offset=[4, 0]), "box is not within the tensor"),
    "a range beyond its box": (set_piece(0, 0, start=1), "range is not within the box"),
    "a run of no elements": (set_piece(0, 0, numel=0), "greater than or equal to 1"),
    "a negative start": (set_piece(0, 0, start=-1), "greater than or equal to 0"),
    "another number of axes": (set_piece(0, 0, offset=[0]), "different lengths"),
    "a huge tensor": (
        set_piece(1, 1, global_shape=[2**62], shape=[2**62]),
        f"holds 4 of the {2**62} elements",
    ),
    "sizes beyond any machine": (set_piece(0, 0, shape=[2**63, 2**63]), "less than"),
    "a shape with axes without end": (
        set_piece(0, 0, shape=[1] * 100_000, offset=[0] * 100_000),
        "at most 8 items",
    ),
    "a piece of another length": (set_piece(1, 1, numel=3), "is not a tensor of its pieces"),
    "a name without end": (set_piece(1, 1, name="n" * 5000), "at most 1000 characters"),
    "no moment": (
        lambda directory: change_header(directory / "rank_00000.safetensors", drop_moment),
        "holds other.0, 12 elements of F32, which is not a tensor",
    ),
    "a piece without tensors": (
        lambda directory: change_header(
            directory / "rank_00000.safetensors", lambda header, pieces: pieces.append(pieces[0])
        ),
        "rank_00000.safetensors lacks weight.1 of its pieces",
    ),
    "another dtype": (set_tensor("weight.0", dtype="BF16", shape=[24]), "'F32' or 'U8'"),
    "bytes for numbers": (set_tensor("weight.0", dtype="U8", shape=[48]), "gaps or overlaps"),
    "a matrix": (set_tensor("weight.0", shape=[3, 4]), "at most 1 item"),
    "tensors overlap": (set_tensor("exp_avg.0", data_offsets=[0, 48]), "gaps or overlaps"),
    "NaN in a weight": (set_number("weight", math.nan), "numbers that are not finite"),
    "infinity in a moment": (set_number("exp_avg_sq", math.inf), "numbers that are not finite"),
    "an empty file": (
        lambda directory: (directory / "rank_00000.safetensors").write_bytes(b""),
        "header is truncated",
    ),
    "a header without end": (
        lambda directory: (directory / "rank_00000.safetensors").write_bytes(b"\xff" * 64),
        "header is truncated",
    ),
    "more bytes than tensors": (
        lambda directory: (directory / "rank_00000.safetensors").open("ab").write(b"more"),
        "bytes of tensors instead of",
    ),
}


@pytest.mark.parametrize("case", SIGNED)
def test_invalid_content_is_refused_despite_a_matching_checksum(case, directory):
    change, sentence = SIGNED[case]
    change(directory)
    sign(directory)
    with pytest.raises(UserError, match=sentence) as caught:
        open_checkpoint(directory)
    assert directory.name in str(caught.value)
    assert len(str(caught.value)) < 1000


WRONG = [None, True, -1, 1.5, 10**18, 10**400, math.nan, "", "text", [], [0], {}, {"a": 1}]


def leaves(value: Any, place: tuple = ()) -> Iterator[tuple]:
    """Yield the path of each value within JSON, from the outermost value to the innermost."""
    if place:
        yield place
    pairs = enumerate(value) if isinstance(value, list) else ()
    for key, each in value.items() if isinstance(value, dict) else pairs:
        yield from leaves(each, (*place, key))


def test_every_wrong_value_of_the_state_is_refused_or_harmless(directory):
    """Replace each value within ``data`` and ``guard`` by wrong ones, and resume from the rest."""
    path = directory / "state.json"
    whole, refused = json.loads(path.read_text()), 0
    places = [place for place in leaves(whole) if place[0] in ("data", "guard")]
    for place, wrong in itertools.product(places, WRONG):
        state = copy.deepcopy(whole)
        inner = functools.reduce(lambda value, key: value[key], place[:-1], state)
        inner[place[-1]] = wrong
        path.write_text(json.dumps(state))
        sign(directory)
        try:
            found = open_checkpoint(directory).state
        except UserError:
            refused += 1
            continue
        assert found["data"]["consumed_samples"] == 56
        history = MixtureHistory.from_json(found["data"]["mixture"])
        assert history.locate(56) and history.counts(56)
        guard = Guard(GuardConfig(window=8))
        guard.restore(found["guard"])
        assert guard.decide(1.0, 1.0).applied
    assert refused > 0.8 * len(places) * len(WRONG)


def in_manifest(**values: object):
    return lambda directory: change_json(
        directory / "manifest.json", lambda manifest: manifest.update(values)
    )


def in_entry(**values: object):
    return lambda directory: change_json(
        directory / "manifest.json", lambda manifest: manifest["files"][0].update(values)
    )


def fifo(directory: Path) -> None:
    (directory / "state.json").unlink()
    os.mkfifo(directory / "state.json")


def twice(directory: Path) -> None:
    change_json(
        directory / "manifest.json",
        lambda manifest: manifest["files"].append(manifest["files"][0]),
    )


def without_state(directory: Path) -> None:
    (directory / "state.json").unlink()
    sign(directory)


LISTINGS = {
    "a FIFO": (fifo, "state.json is not an ordinary file"),
    "a link": (
        lambda directory: (
            (directory / "state.json").rename(directory.parent / "moved")
            and (directory / "state.json").symlink_to(directory.parent / "moved")
        ),
        "state.json is a link",
    ),
    "the manifest is a link": (
        lambda directory: (
            (directory / "manifest.json").rename(directory.parent / "moved")
            and (directory / "manifest.json").symlink_to(directory.parent / "moved")
        ),
        "manifest.json is a link",
    ),
    "a file that is not listed": (
        lambda directory: (directory / "rank_00002.safetensors").write_bytes(b""),
        "rank_00002.safetensors is not in the checkpoint's manifest",
    ),
    "a folder that is not listed": (
        lambda directory: (directory / "more").mkdir(),
        "more is not in the checkpoint's manifest",
    ),
    "a file twice": (twice, "lists rank_00000.safetensors more than once"),
    "no state": (without_state, "does not list state.json"),
    "another step": (in_manifest(step=8), "is of step 8, not of step_00000007"),
    "a negative step": (in_manifest(step=-5), "at step"),
    "a step without end": (in_manifest(step=10**4000), "at step|out of range"),
    "another format": (in_manifest(format=99), "format 99"),
    "more keys": (in_manifest(more=1), "more"),
    "a checksum out of range": (in_entry(crc32=2**32), r"less than 4294967296 at files\[0\].crc32"),
    "a negative size": (in_entry(size=-1), r"at files\[0\].size"),
    "a size without end": (in_entry(size=10**30), r"files\[0\].size"),
    "a fraction": (in_entry(size=1.5), r"files\[0\].size"),
    "a long name": (in_entry(name="n" * 5000), "is not a plain file name"),
    "a name elsewhere": (in_entry(name="../recipe.yaml"), "is not a plain file name"),
    "the folder's own name": (in_entry(name=".."), "is not a plain file name"),
    "a name with a zero": (in_entry(name="a\0b"), "is not a plain file name"),
    "no list": (in_manifest(files=3), "at files"),
    "deep nesting": (
        lambda directory: (directory / "manifest.json").write_text("[" * 100_000),
        "manifest.json is damaged",
    ),
    "no text": (
        lambda directory: (directory / "manifest.json").write_bytes(os.urandom(300)),
        "manifest.json is damaged",
    ),
}


@pytest.mark.parametrize("case", LISTINGS)
def test_a_directory_that_differs_from_its_manifest_is_refused(case, directory):
    change, sentence = LISTINGS[case]
    change(directory)
    with pytest.raises(UserError, match=sentence) as caught:
        open_checkpoint(directory)
    assert len(str(caught.value)) < 1000


def test_each_process_checks_the_tensors_of_its_own_files(directory):
    """Check that a process checks the tensors of only its share of the rank files.

    All processes check the headers of all rank files, and the small files.
    """
    set_number("weight", math.nan)(directory)
    sign(directory)
    open_checkpoint(directory, (0, 2))
    with pytest.raises(UserError, match=r"rank_00001.* not finite"):
        open_checkpoint(directory, (1, 2))
    (directory / "state.json").write_text((directory / "state.json").read_text().replace("7", "8"))
    for share in ((0, 2), (1, 2), (7, 8)):
        with pytest.raises(UserError, match=r"state.json is damaged"):
            open_checkpoint(directory, share)


@pytest.mark.parametrize("path", ["n" * 5000, "a\0b", "nowhere"])
def test_invalid_and_missing_paths_are_user_errors(path, tmp_path):
    with pytest.raises(UserError):
        open_checkpoint(tmp_path / path)

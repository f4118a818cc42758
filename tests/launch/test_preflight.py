"""Tests of the checks before a run, which find mistakes in the recipe and unfit nodes."""

import json
import os
import socket
import subprocess

import pytest
import torch

from diffmegatron.config.attention_backend import attention_shape
from diffmegatron.config.parallel_config import ParallelConfig
from diffmegatron.config.training_config import ChosenKernels
from diffmegatron.errors import UnfitNodeError, UserError
from diffmegatron.measurements.cache import cache_file, write_measurements
from diffmegatron.measurements.machine import this_machine
from diffmegatron.measurements.records import (
    KernelMeasurement,
    Measurements,
    Timing,
    TriedBackend,
)
from diffmegatron.operations import device_bits, preflight
from diffmegatron.operations.device_bits import UNSTEADY, computed_bits, with_kernels_of_rank_0
from diffmegatron.operations.preflight import Findings, check_nodes, find_problems
from diffmegatron.parallel.parallel_state import process_groups
from tests import forks
from tests.paths import ROOT
from tests.ranks import meeting_at, serve_store

GOOD = Findings(
    host="n",
    product_seconds=0.010,
    write_rate=1e9,
    space=1 << 40,
    clock=1000.0,
    versions={"torch": "2.9", "commit": "abc"},
    device="NVIDIA H100",
    bits={"a matrix product": 7, "softmax attention (sdpa)": 9},
    reduce_rate=1e10,
)
SPACE = 1 << 39


def four(**changes) -> list[Findings]:
    """Return the findings of four ranks, with ``changes`` in the findings of rank 2."""
    return [GOOD, GOOD, GOOD.model_copy(update=changes), GOOD]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"problem": "cannot read words.bin"}, "cannot read words.bin"),
        ({"memory_free": 0.5}, "only 50% of its GPU's memory is free; another process uses it"),
        (
            {"product_seconds": 0.021},
            "a matrix product takes 21.0 ms, and 10.0 ms on the other ranks",
        ),
        ({"clock": 994.0}, "its clock differs from the others' by -6.0 s"),
        (
            {"space": 1 << 38},
            "run_dir run has 256.0 GiB free, and the next saves need 512.0 GiB",
        ),
        (
            {"versions": {"torch": "2.8", "commit": "abc"}},
            "torch is 2.8, and 2.9 on the other ranks",
        ),
        (
            {"versions": {"torch": "2.9"}},
            "commit is missing, and abc on the other ranks",
        ),
        (
            {"bits": GOOD.bits | {"softmax attention (sdpa)": 8}},
            "NVIDIA H100 computes softmax attention (sdpa) with other bits, unlike rank 0",
        ),
        (
            {"bits": GOOD.bits | {"a matrix product": UNSTEADY}},
            "NVIDIA H100 computes a matrix product with other bits in each repetition, unlike "
            "rank 0",
        ),
    ],
)
def test_a_rank_unlike_the_others_is_reported_with_the_reason(changes, sentence):
    assert find_problems(four(**changes), SPACE, "run") == {2: sentence}


def test_two_ranks_that_differ_are_compared_by_the_bits_of_rank_0():
    other = GOOD.model_copy(update={"bits": {"a matrix product": 8}})
    assert list(find_problems([GOOD, other], SPACE, "run")) == [1]


def test_a_computation_that_is_unsteady_on_most_ranks_is_not_compared():
    unsteady = GOOD.model_copy(update={"bits": {"a matrix product": UNSTEADY}})
    assert find_problems([unsteady, GOOD, unsteady], SPACE, "run") == {}
    text = preflight._summary([GOOD, unsteady])
    assert text.endswith(" 1 computations with equal bits")
    assert text.startswith("preflight: 2 ranks on ") and "all-reduce " in text
    (problem,) = find_problems([unsteady, GOOD], SPACE, "run").items()
    assert problem[0] == 0 and problem[1].endswith("in each repetition, unlike rank 1")


def bits_of(*recipes) -> dict[str, int]:
    """Return the bits of recipes as the only rank of a job computes them."""
    with process_groups(ParallelConfig(), 0) as parallel_state:
        resolved = with_kernels_of_rank_0(recipes, parallel_state.device)
        return computed_bits(resolved, parallel_state.device)


def test_a_kernel_that_does_not_compile_is_a_problem_of_its_rank(tiny_recipe, monkeypatch):
    def fail(*_):
        raise ValueError("out of resource: shared memory")

    monkeypatch.setattr(preflight, "computed_bits", fail)
    with pytest.raises(UserError, match="ValueError: out of resource: shared memory"):
        check_nodes([tiny_recipe()], None)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"memory_free": 0.95},
        {"product_seconds": 0.019},
        {"clock": 1004.0},
        {"device": "NVIDIA H200", "bits": {"a matrix product": 8}},
    ],
)
def test_small_differences_between_ranks_are_accepted(changes):
    assert find_problems(four(**changes), SPACE, "run") == {}


def test_preflight_records_the_findings_of_one_machine(tiny_recipe, tmp_path, capsys):
    check_nodes([tiny_recipe()], tmp_path)
    (found,) = json.loads((tmp_path / "preflight.json").read_text())
    assert found["problem"] == "" and found["versions"]["torch"]
    if (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        head = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        assert found["versions"]["commit"].removesuffix("-dirty") == head
    assert min(found[name] for name in ("product_seconds", "write_rate", "space", "clock")) > 0
    # The tiny recipe's layers choose `blocked` on a CPU.
    names = ["a matrix product", "differential attention (blocked)", "the loss (megatron)"]
    assert [*found["bits"]] == names
    out = capsys.readouterr().out
    assert out.startswith("preflight: 1 rank on 1 node, matrix product ")
    assert out.endswith(", 3 computations with equal bits\n")
    assert list((tmp_path / "run").iterdir()) == [], "the checks must remove their file"


def test_one_wrong_gradient_changes_the_bits(tiny_recipe, monkeypatch):
    """Compute twice as a right device, and once with the last bit of one gradient changed."""
    recipe = tiny_recipe("model.attention.kind=diff_v2")
    right = bits_of(recipe)
    assert [*right] == [
        "a matrix product",
        "softmax attention (sdpa)",
        "subtraction of noise heads (auto)",
        "the loss (megatron)",
    ]
    assert bits_of(recipe, recipe) == right
    gradients = torch.autograd.grad

    def wrong(out, inputs, direction):
        found = gradients(out, inputs, direction)
        found[min(1, len(found) - 1)].flatten()[-1:].view(torch.int32).bitwise_xor_(1)
        return found

    monkeypatch.setattr(torch.autograd, "grad", wrong)
    found = bits_of(recipe)
    assert [name for name in right if found[name] != right[name]] == [*right][1:]


def test_the_kernels_that_were_measured_to_be_fastest_are_compared(
    tiny_recipe, tmp_path, monkeypatch
):
    recipe, machine = tiny_recipe(), this_machine()
    candidates = []
    for backend, seconds in (("blocked", 0.2), ("sdpa_4call", 0.1)):
        time = Timing(median=seconds, spread=0.0)
        candidates.append(TriedBackend(backend=backend, error=0.5, forward=time, backward=time))
    kernel = KernelMeasurement(
        shape=attention_shape(recipe, recipe.model.attention.kinds[0]),
        candidates=tuple(candidates),
        measured_at="2026-11-28T17:05:00Z",
    )
    monkeypatch.setenv("DIFFMEGATRON_CACHE", str(tmp_path))
    write_measurements(cache_file(machine), Measurements(machine=machine, kernels=(kernel,)))
    assert [*bits_of(recipe)][1:-1] == ["differential attention (sdpa_4call)"]
    # A run with a checkpoint keeps its kernels, and documents make another shape.
    kernels = {"attention": "reference", "subtraction": "auto", "origin": "x"}
    kept = ChosenKernels.model_validate({"device": "cpu", "kinds": [kernels]})
    training = recipe.training.model_copy(update={"chosen_kernels": kept})
    saved = recipe.model_copy(update={"training": training})
    monkeypatch.setattr(device_bits, "_saved_recipe", lambda _: saved)
    assert [*bits_of(recipe)][1:-1] == ["differential attention (reference)"]
    monkeypatch.undo()
    monkeypatch.setenv("DIFFMEGATRON_CACHE", str(tmp_path))
    monkeypatch.setattr(device_bits, "with_document_mask", lambda _: packed)
    packed = tiny_recipe("data.reset_attention_mask=true")
    assert [*bits_of(recipe)][1:-1] == ["differential attention (blocked)"]


def test_a_problem_on_every_node_is_a_user_error(tiny_recipe, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"nowhere\.json") as raised:
        check_nodes([tiny_recipe("data.sources=[{path: nowhere}]")], None)
    assert not isinstance(raised.value, UnfitNodeError)
    with pytest.raises(UserError, match="cannot write in run_dir /proc/run"):
        check_nodes([tiny_recipe("run_dir=/proc/run")], None)
    monkeypatch.setattr(
        preflight.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 20})
    )
    with pytest.raises(UserError, match=r"has 0\.0 GiB free, and the next saves need 0\.0"):
        check_nodes([tiny_recipe()], None)


def test_the_needed_space_is_two_saves_or_one_if_an_old_one_is_removed(tiny_recipe, tmp_path):
    from diffmegatron.model.accounting.parameters import count_parameters
    from tests.launch.conftest import checkpoint

    recipe = tiny_recipe("checkpoint.keep_last=2")
    one = 12 * count_parameters(recipe.model).total
    assert preflight._needed_space(recipe) == 2 * one
    checkpoint(tmp_path / "run", 10)
    assert preflight._needed_space(recipe) == one
    assert preflight._needed_space(tiny_recipe()) == 2 * one


def test_a_missing_gpu_is_an_error_before_the_ranks_meet(tiny_recipe, monkeypatch):
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    with pytest.raises(UnfitNodeError, match="no GPU for LOCAL_RANK 3: n7 shows 0 GPUs"):
        check_nodes([tiny_recipe()], None)


def test_a_node_without_the_data_is_unfit_if_another_node_has_it(tiny_recipe, tmp_path):
    tiny_recipe()
    listener = socket.create_server(("127.0.0.1", 0))
    environment = os.environ | meeting_at(listener)
    environment |= {"DIFFMEGATRON_ATTEMPT": str(tmp_path), "WORLD_SIZE": "2"}
    store = serve_store(listener)
    command = [forks.python(), "-m", "diffmegatron", "preflight", str(tmp_path / "tiny.yaml")]
    ranks = [
        subprocess.Popen(
            [*command, *overrides],
            env=environment | {"RANK": str(rank), "SLURMD_NODENAME": f"n{rank}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, overrides in enumerate([[], ["data.sources=[{path: nowhere}]"]])
    ]
    said = [rank.communicate(timeout=250)[1] for rank in ranks]
    del store
    assert [rank.returncode for rank in ranks] == [0, 71], said
    assert said[1].startswith("error (rank 1): ") and "nowhere.json" in said[1]
    assert [path.name for path in tmp_path.glob("rank_*")] == ["rank_00001.json"]
    assert [each["host"] for each in json.loads((tmp_path / "preflight.json").read_text())] == [
        "n0",
        "n1",
    ]

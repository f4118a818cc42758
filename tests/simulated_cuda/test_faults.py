"""Faults that the simulation of CUDA has shown, each with its cost."""

import pytest

from tests.simulated_cuda.library import UnavailableError
from tests.simulated_cuda.simulate import Case, Recording, SimulationError, try_simulate

LAYERS = 2
SMALL = (f"model.num_layers={LAYERS}", "training.seq_length=512")
DOCUMENTS = ("data.reset_attention_mask=true", "data.reset_position_ids=true")
CASES = {
    # The whole sequence, because the test compares bytes.
    "fallback": Case("configs/at_scale/diff_3b_64gpus.yaml", 64, SMALL[:1]),
    "tensor": Case("configs/at_scale/diff_3b_256gpus.yaml", 256, SMALL),
    "pipeline": Case(
        "configs/at_scale/diff_6.8b_64gpus.yaml",
        64,
        ("model.num_layers=8", "training.seq_length=512"),
        rank=16,
        microbatches=4,
    ),
    "ring with documents": Case(
        "configs/at_scale/diff_3b_64k_64gpus.yaml", 64, (*SMALL[:1], *DOCUMENTS), rank=3
    ),
    "offloaded": Case(
        "configs/at_scale/diff_3b_64gpus.yaml", 64, (*SMALL, "parallel.offload_optimizer=true")
    ),
    "zero 2": Case(
        "configs/at_scale/diff_3b_64gpus.yaml", 64, (*SMALL, "parallel.zero_stage=2")
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def results() -> dict[str, Recording | SimulationError]:
    try:
        return dict(zip(CASES, try_simulate(list(CASES.values())), strict=True))
    except UnavailableError as error:
        pytest.skip(f"CUDA cannot be simulated: {error}")


@pytest.fixture
def recorded(results):
    def find(name: str) -> Recording:
        result = results[name]
        if isinstance(result, SimulationError):
            raise result
        return result

    return find


def test_no_gradient_is_copied_to_float32(recorded):
    """DeepSpeed adds gradients in float32 to copies of them: 1.15 GiB of a vocabulary matrix."""
    peak = recorded("fallback").peaks["forward_backward"]
    copies = [
        (shape, dtype)
        for component, _, _, shape, dtype, _ in peak.allocations
        if component == "backward" and dtype == "float32" and "100288" in shape
    ]
    assert copies == []
    assert peak.components["backward"] < 1.2 * 100288 * 3072 * 2


def test_the_halves_of_v_are_copied_once_for_both_maps(recorded):
    """0.66 GiB of a 3B network went to the second copies, on any GPU without flash libraries."""
    peak = recorded("fallback").peaks["forward_backward"]
    half = 4096 * 12 * 128 * 2
    clones = sum(
        size
        for component, module, operation, shape, _, size in peak.allocations
        if component == "activations" and "self_attention" in module and "clone" in operation
        and shape == "(1, 4096, 12, 128)"
    )  # fmt: skip
    assert clones == LAYERS * 2 * half


def test_shared_gradients_are_summed_once_per_step(recorded):
    """Each of lambda's vectors and norms had an all-reduce of its own in every microbatch."""
    sums = [
        each
        for each in recorded("tensor").collectives
        if (each.operation, each.group, each.dtype) == ("all_reduce", "tensor", "float32")
    ]
    in_microbatches = sum(each.count for each in sums if each.phase == "forward_backward")
    # The loss over a sharded vocabulary sums over the ranks.
    assert in_microbatches <= 3
    assert sum(each.count for each in sums if each.phase == "update") == 1
    # Lambda's four vectors and its norm in each layer, the layers' two norms, the last one.
    elements = LAYERS * (4 * 128 + 256 + 2 * 3072) + 3072
    assert sum(each.bytes for each in sums if each.phase == "update") == 4 * elements


def test_a_pipeline_waits_for_the_device_at_the_end_of_a_step_only(recorded):
    """Megatron-core's default synchronises after every batched exchange between stages."""
    found = recorded("pipeline")
    assert found.count(operation="send", group="pipeline") > 0
    assert not any("synchronize" in wait for wait in found.waits)


def test_a_ring_with_documents_runs_kernels(recorded):
    """`auto` took loops in Python, as none of the libraries masks chunks."""
    kernels = {each.kernel: each.count for each in recorded("ring with documents").launches}
    assert "dkdv_kernel" in kernels
    assert kernels.get("aten.bmm", 0) + kernels.get("aten.baddbmm", 0) == 0


@pytest.mark.parametrize("name", ["offloaded", "zero 2"])
def test_updates_are_applied(name, recorded):
    assert recorded(name).outcome["applied"] == [True, True]

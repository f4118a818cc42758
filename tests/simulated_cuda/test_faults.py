"""Faults that the simulation of CUDA has shown, each with what it cost."""

import pytest

from tests.simulated_cuda.library import UnavailableError
from tests.simulated_cuda.simulate import Case, Recording, SimulationError, try_simulate

SMALL = ("model.num_layers=2", "training.seq_length=512")
CASES = {
    "pipeline": Case(
        "configs/at_scale/diff_6.8b_64gpus.yaml",
        64,
        ("model.num_layers=8", "training.seq_length=512"),
        rank=16,
        microbatches=4,
    ),
}


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


def test_a_pipeline_waits_for_the_device_at_the_end_of_a_step_only(recorded):
    """Megatron-core's default synchronises after every batched exchange between stages."""
    found = recorded("pipeline")
    assert found.count(operation="send", group="pipeline") > 0
    assert not any("synchronize" in wait for wait in found.waits)

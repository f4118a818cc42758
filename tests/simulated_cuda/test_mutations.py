"""Tests that the simulation refuses calls that CUDA, cuBLAS or NCCL would refuse.

It also refuses a step that waits for the device at a place that ``waits.py`` does not list.
"""

import pytest

from tests.simulated_cuda.library import UnavailableError
from tests.simulated_cuda.simulate import Case, SimulationError, try_simulate

# Name of each mutation -> part of the error message that it must cause.
REFUSALS = {
    "reduce_on_the_host": "all_reduce of NCCL takes a tensor on cpu",
    "gather_too_little": "all_gather over 2 ranks takes a whole of",
    "gather_another_dtype": "all_gather takes tensors of bfloat16 and float32",
    "multiply_by_float32": "multiplies tensors of bfloat16 and float32",
    "index_by_the_host": "indexes a tensor on cuda:0 by one elsewhere",
    "read_the_loss": "waits for the device in a step: item",
    "count_by_nonzero": "waits for the device in a step: aten.nonzero",
    "synchronize": "waits for the device in a step: torch.cuda.synchronize",
    "launch_on_the_host": "takes a tensor on cpu",
}


@pytest.fixture(scope="module")
def results():
    small = (
        "model.num_layers=1", "training.seq_length=256", "training.attention_backend=triton"
    )  # fmt: skip
    recipe = "configs/at_scale/diff_3b_256gpus.yaml"
    cases = [
        Case(recipe, 256, small, steps=1, prepare=name and f"tests.simulated_cuda.mutations:{name}")
        for name in (None, *REFUSALS)
    ]
    try:
        return dict(zip((None, *REFUSALS), try_simulate(cases), strict=True))
    except UnavailableError as error:
        pytest.skip(f"CUDA cannot be simulated: {error}")


def test_unmutated_code_runs(results):
    if isinstance(results[None], SimulationError):
        raise results[None]
    assert results[None].outcome["applied"] == [True]


@pytest.mark.parametrize("name", REFUSALS)
def test_a_mistake_is_refused(name, results):
    assert isinstance(results[name], SimulationError)
    assert REFUSALS[name] in str(results[name]), results[name]

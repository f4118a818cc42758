"""Private attributes of DeepSpeed that ``diffmegatron.optim`` uses.

pyproject.toml pins an exact version of DeepSpeed because of these attributes. Before a change of
the version, run this file first: its failures show which attributes are missing. Then run
tests/parallel and tests/recovery: failures there show which attributes have a different meaning in
the new version.
"""

import inspect
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from diffmegatron.config.load import load_recipe
from diffmegatron.data.loader import Batch
from diffmegatron.model.build import build_model
from diffmegatron.optim.zero import ZeroEngine, import_deepspeed
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.training.compute.step import forward_backward
from tests.conftest import TINY


class Attribute(NamedTuple):
    """Attribute of DeepSpeed's optimizer or of its parameters.

    Attributes:
        name: name of the attribute.
        stages: ZeRO stages in which the attribute exists.
        kind: class of the value; None: any value except None is allowed.
    """

    name: str
    stages: tuple[int, ...]
    kind: type | None = None


# The attributes are grouped by the file of diffmegatron/optim that uses them.
OF_OPTIMIZERS = [
    # partition.py, ZeRO 1 and 2
    Attribute("param_groups", (1, 2), list),
    Attribute("update_lp_params", (1, 2)),
    Attribute("params_in_partition", (1, 2), list),
    Attribute("averaged_gradients", (1, 2, 3), dict),
    Attribute("all_grad_tensors", (1, 2), dict),
    # partition.py, ZeRO 3
    Attribute("fp32_partitioned_groups_flat", (3,), list),
    Attribute("fp16_groups", (3,), list),
    Attribute("grad_position", (3,), dict),
    Attribute("get_param_id", (3,)),
    Attribute("_get_param_partition_rank", (3,)),
    Attribute("_reassign_or_swap_out_partitioned_parameters", (3,)),
    Attribute("persistent_parameters", (3,), list),
    # gradient_clipping.py
    Attribute("scaled_global_norm", (1, 2)),
    Attribute("_model_parallel_all_reduce", (1, 2)),
    # flat_gradients.py
    Attribute("_build_compact_grad_partition_buffer", (1, 2)),
    Attribute("_release_ipg_buffers", (1, 2)),
    Attribute("_grad_acc_hooks", (1, 2), list),
    Attribute("real_dp_process_group", (1, 2), list),
    Attribute("partition_gradients", (1, 2), bool),
    Attribute("cpu_offload", (1, 2), bool),
    Attribute("bit16_groups", (1, 2), list),
    Attribute("bit16_groups_flat", (1, 2), list),
    Attribute("check_grad_overflow", (1, 2), bool),
    # zero.py and adamw.py
    Attribute("optimizer", (1, 2, 3), torch.optim.Optimizer),
    Attribute("_global_grad_norm", (1, 2, 3)),
]
OF_PARAMETERS = [
    Attribute("_hp_mapping", (1, 2)),
    Attribute("ds_numel", (3,), int),
]
OF_MAPPINGS = ["hp_fragment_address", "lp_fragment_address", "param_group_index"]


def each(attributes: list[Attribute]):
    pairs = [(stage, attribute) for attribute in attributes for stage in attribute.stages]
    return pytest.mark.parametrize(
        ("stage", "attribute"), pairs, ids=lambda value: getattr(value, "name", f"zero-{value}")
    )


@pytest.fixture(scope="module")
def engines(corpus, tmp_path_factory) -> dict[int, tuple[Any, list[SimpleNamespace]]]:
    """Train one step with each ZeRO stage, and return the results by stage.

    The result of a stage is DeepSpeed's optimizer, and the attributes of each parameter.
    """
    file = tmp_path_factory.mktemp("deepspeed") / "tiny.yaml"
    file.write_text(TINY.format(run_dir=file.parent / "run", corpus=corpus))
    return {stage: step(load_recipe(file, [f"parallel.zero_stage={stage}"])) for stage in (1, 2, 3)}


def step(recipe) -> tuple[Any, list[SimpleNamespace]]:
    tokens = torch.randint(0, 257, (4, 17), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(4, 16))
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        network = build_model(recipe, parallel_state)
        with ZeroEngine(network, recipe, parallel_state) as engine:
            forward_backward(engine, [batch], parallel_state)
            engine.step(1e-3, lambda norm: True)
            # Copy the attributes now, because the engine removes some of them when it ends.
            parameters = [SimpleNamespace(**vars(p), size=p.numel()) for p in network.parameters()]
            return engine._optimizer, parameters


def check(owner: object, attribute: Attribute) -> None:
    found = getattr(owner, attribute.name)
    assert isinstance(found, attribute.kind) if attribute.kind else found is not None


@each(OF_OPTIMIZERS)
def test_an_optimizer_has_the_required_attributes(stage, attribute, engines):
    check(engines[stage][0], attribute)


@each(OF_PARAMETERS)
def test_a_parameter_has_the_required_attributes(stage, attribute, engines):
    for parameter in engines[stage][1]:
        check(parameter, attribute)


@pytest.mark.parametrize("name", OF_MAPPINGS)
def test_a_parameter_mapping_has_the_required_attributes(name, engines):
    for stage in (1, 2):
        assert getattr(engines[stage][1][0]._hp_mapping, name) is not None
    parameter = engines[1][1][0]
    assert parameter._hp_mapping.hp_fragment_address.numel == parameter.size


def test_deepspeed_looks_for_no_compiled_operation(capfd):
    """Check that DeepSpeed does not search for operations that this machine could compile.

    The search would print a warning for each operation that cannot be built.
    """
    deepspeed = import_deepspeed()
    from deepspeed.comm.torch import build_shm_op

    assert vars(deepspeed.ops)["__compatible_ops__"] == {}
    assert build_shm_op() is None
    assert capfd.readouterr().out == ""


def test_the_optimizer_of_bf16_has_flat_gradients():
    from deepspeed.runtime import bf16_optimizer

    source = inspect.getsource(bf16_optimizer)
    assert "self.fp32_groups_gradients_flat" in source
    assert "self.bf16_groups" in source


def test_a_partition_of_gradients_can_lie_in_another_tensor():
    from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup

    first, other = torch.zeros(6), torch.arange(6.0)
    group = GradPartitionBufferGroup([first[:4].view(2, 2), first[4:]], first)
    group.flat_partition = other
    group.move_flat_partition(other.device)
    assert [view.tolist() for view in group] == [[[0, 1], [2, 3]], [4, 5]]
    assert group[0].data_ptr() == group.flat_partition.data_ptr() == other.data_ptr()


def test_the_optimizer_of_zero_2_has_the_replaced_methods():
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    replaced = ("_use_compact_grad_partition_buffer", "copy_grads_in_partition")
    signatures = [
        [*inspect.signature(getattr(DeepSpeedZeroOptimizer, x)).parameters] for x in replaced
    ]
    assert signatures == [["self", "group_idx"], ["self", "param", "group_idx"]]
    assert hasattr(DeepSpeedZeroOptimizer, "clear_grad_attribute")


def test_deepspeed_code_contains_zero_padding():
    """Check only that the name ``_zero_padding`` exists in DeepSpeed's code.

    Padding occurs only if the partitions of several ranks differ in size, but this test has only
    one rank.
    """
    from deepspeed.runtime.zero import stage_1_and_2

    assert "_zero_padding" in inspect.getsource(stage_1_and_2)

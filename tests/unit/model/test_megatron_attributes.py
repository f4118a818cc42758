"""Names through which this project and Megatron-core use each other's code.

Megatron-core does not guarantee these names. Before a change of Megatron-core's version in
pyproject.toml, run this file first: its failures show which names are missing. Then run
tests/parallel: failures there show which names have a different meaning in the new version.
"""

import ast
import inspect
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    checkpoint,
    gather_from_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from megatron.core.tensor_parallel.random import CheckpointFunction
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from diffmegatron.config.model_config import RopeScaling
from diffmegatron.model import network
from diffmegatron.model.build import build_model
from diffmegatron.model.layers.lora import LoraColumnParallelLinear, LoraRowParallelLinear
from diffmegatron.model.layers.rotary import rotary_angles
from diffmegatron.model.layers.self_attention import SelfAttention
from diffmegatron.model.network import Decoder, VirtualStage
from diffmegatron.parallel.parallel_state import process_groups
from tests.paths import ROOT

# Functions of Megatron-core, each with names of arguments that this project passes.
ARGUMENTS = [
    (LanguageModelEmbedding.__init__, ["vocab_size", "max_sequence_length", "tp_group"]),
    (LanguageModelEmbedding.__init__, ["position_embedding_type"]),
    (ColumnParallelLinear.__init__, ["bias", "gather_output", "skip_weight_param_allocation"]),
    (ColumnParallelLinear.__init__, ["config", "init_method", "tp_group"]),
    (TransformerLayer.__init__, ["config", "layer_number", "pg_collection", "vp_stage"]),
    (MLP.__init__, ["config", "submodules", "ffn_hidden_size", "tp_group"]),
    (checkpoint, ["function", "distribute_saved_activations"]),
    (vocab_parallel_cross_entropy, ["vocab_parallel_logits", "target"]),
    (gather_from_sequence_parallel_region, ["input_", "group"]),
]
# Attributes of a virtual stage, and the module or class of Megatron-core that reads each.
READ_OF_A_STAGE = [
    (schedules, "set_input_tensor"),
    (schedules, "vp_stage"),
    (schedules, "decoder"),
    (LanguageModule, "pre_process"),
    (LanguageModule, "post_process"),
    (LanguageModule, "share_embeddings_and_output_weights"),
    (LanguageModule, "embedding"),
    (LanguageModule, "output_layer"),
]
# Files of this project and the private names of Megatron-core that they use. The names have no
# public equivalent. ``_IndexReader`` reads the index of a corpus. The two functions are patched so
# that Megatron-core's random states work on a CPU.
PRIVATE = {
    ("data/index/token_store.py", "_IndexReader"),
    ("parallel/cpu.py", "_get_cuda_rng_state"),
    ("parallel/cpu.py", "_set_cuda_rng_state"),
}


@pytest.mark.parametrize(("function", "names"), ARGUMENTS)
def test_a_function_takes_these_arguments(function, names):
    assert set(names) <= set(inspect.signature(function).parameters)


@pytest.mark.parametrize(("reader", "name"), READ_OF_A_STAGE)
def test_a_stage_has_the_attributes_that_megatron_reads(tiny_recipe, reader, name):
    assert name in inspect.getsource(reader)
    recipe = tiny_recipe()
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        (stage,) = build_model(recipe, parallel_state).virtual_stages
    assert hasattr(stage, name)


def test_a_language_module_has_its_groups_and_a_shared_weight(tiny_recipe):
    recipe = tiny_recipe("model.tied_embeddings=true")
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        (stage,) = build_model(recipe, parallel_state).virtual_stages
    assert stage.pg_collection.tp is stage.tp_group and stage.cp_group.size() == 1
    assert stage.shared_embedding_or_output_weight() is stage.embedding.word_embeddings.weight
    assert stage.output_layer.weight is None


@pytest.mark.parametrize(
    "own",
    [VirtualStage, Decoder, SelfAttention, LoraColumnParallelLinear, LoraRowParallelLinear],
)
def test_no_private_member_of_megatron_is_overridden(own):
    bases = [base for base in own.__mro__ if base.__module__.startswith("megatron.")]
    private = {name for name in vars(own) if name.startswith("_") and not name.startswith("__")}
    assert bases and not {name for name in private for base in bases if name in vars(base)}


def test_no_other_private_name_of_megatron_is_taken():
    found = {
        (str(path.relative_to(ROOT / "diffmegatron")), name)
        for path in (ROOT / "diffmegatron").rglob("*.py")
        for name in private_names(path)
    }
    assert found == PRIVATE


def private_names(path: Path) -> Iterator[str]:
    """Yield the private names of Megatron-core that a file uses.

    They are the names that the file imports, accesses as attributes of imported modules, or
    replaces. A replacement is recognized as a tuple (module, name, new value).
    """
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
            modules |= {alias.name for alias in node.names}
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))
        elif isinstance(node, ast.Tuple) and len(node.elts) == 3:
            owner, name, _ = node.elts
            if isinstance(owner, ast.Name) and isinstance(name, ast.Constant):
                yield from [name.value] if str(name.value).startswith("_") else []
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
            and node.attr.startswith("_")
        ):
            yield node.attr


def test_layers_are_numbered_from_one(tiny_recipe):
    recipe = tiny_recipe("model.num_layers=3")
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        (stage,) = build_model(recipe, parallel_state).virtual_stages
    assert [layer.layer_number for layer in stage.decoder.layers] == [1, 2, 3]


@pytest.mark.parametrize("scaling", [None, RopeScaling(kind="linear", factor=4.0)])
def test_angles_are_those_of_megatrons_rotary_embedding(tiny_recipe, scaling):
    with process_groups(tiny_recipe().parallel, seed=1) as parallel_state:
        group = parallel_state.context_group
        megatrons = RotaryEmbedding(32, 1.0, rotary_base=5e5)
        if scaling is not None:
            megatrons.inv_freq /= 4
        own = rotary_angles(48, 32, 5e5, scaling, group, torch.device("cpu"))
        assert torch.equal(own, megatrons(48))


@pytest.mark.parametrize(
    ("overrides", "groups"),
    [
        ("recompute={}", []),
        ("recompute={granularity: selective}", []),
        ("recompute={granularity: full}", [1, 1, 1, 1]),
        ("recompute={granularity: full, layers: 2}", [2, 2]),
        ("recompute={granularity: full, method: block, layers: 3}", [1, 1, 1]),
    ],
)
def test_full_recomputation_keeps_the_inputs_of_groups(tiny_recipe, overrides, groups, monkeypatch):
    """Check the groups of recomputed layers, and that recomputation changes no bit of a gradient.

    Each checkpoint of activations covers one group. ``groups`` has the number of layers of each
    group, in the order of the forward pass. In the expected gradients, each layer computes its own
    lambda, where otherwise the network computes the lambdas of all layers together.
    """
    counts: list[int] = []
    apply = CheckpointFunction.apply

    def counted(function, *args):
        if hasattr(function, "args") and isinstance(function.args[0], (list, torch.nn.ModuleList)):
            counts.append(len(function.args[0]))
        return apply(function, *args)

    tokens = torch.randint(257, (2, 17), generator=torch.Generator().manual_seed(0))

    def gradients(*overrides):
        recipe = tiny_recipe("model.num_layers=4", *overrides)
        with process_groups(recipe.parallel, seed=1) as parallel_state:
            model = build_model(recipe, parallel_state)
            model(tokens[:, :-1], labels=tokens[:, 1:]).sum().backward()
            return [parameter.grad for parameter in model.parameters()]

    with monkeypatch.context() as patch:
        patch.setattr(network, "_lambdas", dict.fromkeys)
        expected = gradients()
    monkeypatch.setattr(CheckpointFunction, "apply", counted)
    for own, other in zip(gradients(overrides), expected, strict=True):
        assert torch.equal(own, other)
    assert counts == groups


def test_a_deprecation_in_megatrons_log_is_an_error():
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    with pytest.raises(AssertionError, match="GPTModel IS DEPRECATED"):
        logger.warning("GPTModel IS DEPRECATED.")
    logger.debug("Anything else is none.")


def test_a_warning_of_a_deprecation_to_our_code_is_an_error():
    with pytest.raises(DeprecationWarning):
        warnings.warn_explicit("soon gone", DeprecationWarning, "", 1, "diffmegatron.model.build")
    warnings.warn_explicit("soon gone", DeprecationWarning, "", 1, "torch.jit")

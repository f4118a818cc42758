"""Names and shapes of all tensors of a recipe's network, computed without torch.

:mod:`diffmegatron.model.parameter_shards` finds the same names and shapes in the built network.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from diffmegatron.attention.kinds.kind import AttentionKind
from diffmegatron.attention.kinds.layer import QKV_BIAS
from diffmegatron.attention.kinds.layer_kinds import overlap
from diffmegatron.config.model_config import ModelConfig
from diffmegatron.config.recipe_sections import RecipeSections

EMBEDDING = "embedding.word_embeddings.weight"
INPUT_NORM, MLP_NORM = "input_layernorm.weight", "pre_mlp_layernorm.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
OUTPUT = "output_layer.weight"
LORA_A, LORA_B = "lora_a", "lora_b"


@dataclass(frozen=True)
class NamedTensor:
    """Name, shape and sharding of a tensor of the network.

    Attributes:
        name: name in the network. Names from :func:`layer_tensors` lack the prefix
            ``decoder.layers.N.``, because they are names within a layer.
        shape: shape before sharding.
        sharded: True if each tensor-parallel rank has a shard, False if each has a full copy.
        float32: whether the tensor stays float32 in a bf16 run.
        parts: names of the parts fused along the rows of ``linear_qkv``; empty for any other
            tensor.
        is_matrix: whether the tensor is a weight matrix of a layer, but not of LoRA. Muon trains
            these tensors.
    """

    name: str
    shape: tuple[int, ...]
    sharded: bool = False
    float32: bool = False
    parts: tuple[str, ...] = ()
    is_matrix: bool = False

    def elements(self, tensor_parallel: int) -> int:
        """Return the number of elements on one tensor-parallel rank."""
        return math.prod(self.shape) // (tensor_parallel if self.sharded else 1)


def layer_tensors(model: ModelConfig, kind: AttentionKind) -> list[NamedTensor]:
    """Return the tensors of a layer with this attention; their names lack ``decoder.layers.N.``."""
    hidden, ffn, heads = model.hidden_size, model.ffn_hidden_size, kind.heads
    attention = "self_attention."
    fused = {f"{attention}{name}": heads.parts for name in ("linear_qkv.weight", QKV_BIAS)}
    declared = [
        NamedTensor(
            name,
            each.shape,
            each.sharded,
            each.float32,
            parts=fused.get(name, ()),
            is_matrix=each.role == "matrix" and len(each.shape) == 2,
        )
        for each in kind.parameters(hidden)
        for name in (attention + each.name,)
    ]
    shapes = {
        f"{attention}linear_qkv.weight": (heads.qkv_channels, hidden),
        f"{attention}linear_proj.weight": (hidden, heads.output_channels),
        "mlp.linear_fc1.weight": (2 * ffn, hidden),
        "mlp.linear_fc2.weight": (hidden, ffn),
    }
    projections = [
        NamedTensor(name, shape, sharded=True, parts=fused.get(name, ()), is_matrix=True)
        for name, shape in shapes.items()
    ]
    norms = [NamedTensor(name, (hidden,)) for name in (INPUT_NORM, MLP_NORM)]
    return [*norms, *declared, *projections, *_lora(model, projections)]


def _lora(model: ModelConfig, projections: list[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield LoRA's matrices A and B of each projection that LoRA adapts."""
    if model.lora is None:
        return
    for projection in projections:
        place = projection.name.removesuffix(".weight")
        target = place.rpartition(".")[2]
        if target in model.lora.targets:
            rows, columns = projection.shape
            # A row-parallel projection shards its columns, so A is sharded. A column-parallel
            # projection shards its rows, so B is sharded.
            is_row_parallel = target in ("linear_proj", "linear_fc2")
            rank = model.lora.rank
            yield NamedTensor(f"{place}.{LORA_A}", (rank, columns), is_row_parallel)
            yield NamedTensor(f"{place}.{LORA_B}", (rows, rank), not is_row_parallel)


def outer_tensors(model: ModelConfig) -> list[NamedTensor]:
    """Return the tensors outside the layers, in the order of the forward pass."""
    vocabulary = (model.vocab_size, model.hidden_size)
    output = [] if model.tied_embeddings else [NamedTensor(OUTPUT, vocabulary, sharded=True)]
    return [
        NamedTensor(EMBEDDING, vocabulary, sharded=True),
        NamedTensor(FINAL_NORM, (model.hidden_size,)),
        *output,
    ]


def stage_outer_tensors(recipe: RecipeSections, stage: int) -> list[NamedTensor]:
    """Return the tensors outside the layers in pipeline stage ``stage`` (from 0).

    The first and the last stage each have a copy of a tied embedding.
    """
    last = recipe.parallel.pipeline - 1
    first_has = {EMBEDDING}
    last_has = {FINAL_NORM, EMBEDDING if recipe.model.tied_embeddings else OUTPUT}
    held = (first_has if stage == 0 else set()) | (last_has if stage == last else set())
    return [each for each in outer_tensors(recipe.model) if each.name in held]


def stage_layers(recipe: RecipeSections, stage: int) -> list[range]:
    """Return the layers (from 0) of a pipeline stage (from 0), as one range per virtual stage."""
    ranks, virtual = recipe.parallel.pipeline, recipe.parallel.virtual_pipeline
    size = recipe.model.num_layers // (ranks * virtual)
    firsts = ((number * ranks + stage) * size for number in range(virtual))
    return [range(first, first + size) for first in firsts]


def stage_kinds(recipe: RecipeSections, stage: int) -> list[tuple[AttentionKind, int]]:
    """Return the kinds of attention in a pipeline stage, each with its number of layers there."""
    own = stage_layers(recipe, stage)
    counts = (
        (kind, sum(overlap(some, others) for some in own for others in layers))
        for kind, layers in recipe.model.attention.by_kind(recipe.model.num_layers)
    )
    return [(kind, count) for kind, count in counts if count]


def in_layer(tensor: NamedTensor, layer: int | str) -> NamedTensor:
    """Return a tensor of :func:`layer_tensors` with its full name; ``layer`` can be ``*``."""
    return replace(tensor, name=f"decoder.layers.{layer}.{tensor.name}")


def layer_number(name: str) -> int:
    """Return the number (from 0) of the layer in a tensor's full name."""
    return int(name.removeprefix("decoder.layers.").partition(".")[0])


def stage_tensors(recipe: RecipeSections, stage: int) -> Iterator[NamedTensor]:
    """Yield all tensors of a pipeline stage, with full names."""
    yield from stage_outer_tensors(recipe, stage)
    for own in stage_layers(recipe, stage):
        yield from _layers_tensors(recipe.model, own)


def network_tensors(model: ModelConfig) -> Iterator[NamedTensor]:
    """Yield all tensors of the network, with full names."""
    yield from outer_tensors(model)
    yield from _layers_tensors(model, range(model.num_layers))


def _layers_tensors(model: ModelConfig, layers: range) -> Iterator[NamedTensor]:
    for kind, own in model.attention.by_kind(model.num_layers):
        of_a_layer = layer_tensors(model, kind)
        for each in own:
            for layer in range(max(each.start, layers.start), min(each.stop, layers.stop)):
                for tensor in of_a_layer:
                    yield in_layer(tensor, layer)

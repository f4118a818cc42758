"""The plan of a recipe: parameters, FLOPs, memory, traffic, time and warnings."""

import json
from dataclasses import asdict, dataclass

from diffmegatron.attention.costs import costs_of
from diffmegatron.attention.kinds.kind import window_in
from diffmegatron.config.model_config import ModelConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.config.width_scaling import scaling_in_words
from diffmegatron.data.tokenizers import check_vocabulary, vocabulary_size
from diffmegatron.errors import UserError
from diffmegatron.hf.kinds import exported_class
from diffmegatron.model.accounting.activations import BYTES
from diffmegatron.model.accounting.flops import Flops, count_flops, frozen_matrices
from diffmegatron.model.accounting.memory import StageMemory, memory_by_stage
from diffmegatron.model.accounting.parameters import (
    Parameters,
    count_parameters,
    count_trained,
    counted_kinds,
)
from diffmegatron.plan.advice import warnings
from diffmegatron.plan.rank_layout import RankLayout
from diffmegatron.plan.rates import find_hardware, sentences
from diffmegatron.plan.timing import TimeEstimate, estimate_time
from diffmegatron.plan.traffic import Traffic, count_traffic

DEFAULT_HARDWARE = "H100"
# Share of the parameters by which the baseline may differ and still count as equal.
_EQUAL_SHARE = 0.005


@dataclass(frozen=True)
class Plan:
    """The plan of a recipe on a number of ranks.

    The baseline is the Transformer with softmax attention that ``model.baseline=true`` trains.

    Attributes:
        attention: name of the kind of attention.
        heads: description of the kind's heads in words.
        exported_class: name of the Hugging Face class of an export; None if it will be refused.
        kv_cache_bytes_per_token: bytes per token of the key-value cache, over all layers.
        kv_cache_bytes: bytes of the key-value cache of ``training.seq_length`` tokens, of which a
            layer with a window keeps as many as it shows; None without windows.
        served_cache_bytes_per_token: the same in a serving engine.
        width_scaling: factors of muP for matrices of layers, in words; None without muP.
        baseline_equal_ffn: ``model.ffn_hidden_size`` with which the baseline has nearly as many
            parameters as the network; None if they differ by at most 0.5% without it.
        parameters: numbers of parameters of the unsharded network.
        memory: memory of a rank, one entry per pipeline stage.
        traffic: bytes per step that a rank sends, in the pipeline stage that sends most.
        time: estimated time of a step and of the run.
        assumptions: sentences about the measured and assumed rates of ``time``.
        warnings: sentences of :func:`diffmegatron.plan.advice.warnings`.
    """

    run_dir: str
    attention: str
    heads: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    exported_class: str | None
    kv_cache_bytes_per_token: int
    kv_cache_bytes: int | None
    served_cache_bytes_per_token: int
    width_scaling: str | None
    baseline_num_heads: int
    baseline_parameters: int
    baseline_flops_per_token: Flops
    baseline_equal_ffn: int | None
    layout: RankLayout
    parameters: Parameters
    trained_parameters: int
    steps: int
    tokens_per_step: int
    flops_per_token: Flops
    memory: tuple[StageMemory, ...]
    traffic: Traffic
    time: TimeEstimate
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens of the whole run."""
        return self.steps * self.tokens_per_step

    @property
    def total_flops(self) -> float:
        """Model FLOPs of the whole run."""
        return self.tokens * self.flops_per_token.training

    @property
    def largest_stage(self) -> StageMemory:
        """Memory of the pipeline stage whose ranks need most."""
        return max(self.memory, key=lambda stage: stage.total)

    def to_json(self) -> str:
        """Return all attributes and totals as JSON, in the units of the attributes."""
        values = asdict(self)
        values["parameters"] |= {
            "total": self.parameters.total,
            "without_embeddings": self.parameters.without_embeddings,
        }
        values["memory"] = [asdict(stage) | {"total": stage.total} for stage in self.memory]
        values["traffic"] |= {"total": self.traffic.total}
        values["time"] |= {"step": self.time.step}
        values |= {"tokens": self.tokens, "total_flops": self.total_flops}
        return json.dumps(values, indent=2)


def plan_recipe(
    recipe: Recipe, world_size: int | None = None, hardware: str = DEFAULT_HARDWARE
) -> Plan:
    """Return the plan of a recipe.

    Args:
        world_size: number of ranks; None for the smallest number that fits the layout.
        hardware: name of a GPU in ``ACCELERATORS``, or path of a file of measurements.

    Raises:
        UserError: ``hardware`` is unknown, the layout does not fit ``world_size``, or the
            vocabulary is too small for the tokenizer.
    """
    found = find_hardware(hardware)
    check_recipe_vocabulary(recipe)
    recipe = found.with_backend(recipe)
    model, training = recipe.model, recipe.training
    ranks = world_size if world_size is not None else recipe.parallel.model_ranks
    layout = RankLayout.of(recipe, ranks)
    memory = memory_by_stage(recipe, ranks)
    attention = model.attention
    baseline = model.model_copy(update={"attention": attention.baseline()})
    element = BYTES[training.precision]
    costs = [(count, costs_of(kind)) for kind, count in counted_kinds(model)]
    return Plan(
        run_dir=recipe.run_dir,
        attention=attention.kind,
        heads=attention.heads_in_words,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        exported_class=exported_class(
            attention,
            model.hidden_size,
            model.num_layers,
            from_scratch=recipe.checkpoint.start_from is None,
        ),
        kv_cache_bytes_per_token=sum(n * each.kv_cache_bytes(element) for n, each in costs),
        kv_cache_bytes=_kv_cache_bytes(recipe),
        served_cache_bytes_per_token=sum(n * each.served_cache_bytes(element) for n, each in costs),
        width_scaling=scaling_in_words(recipe),
        baseline_num_heads=baseline.attention.num_heads,
        baseline_parameters=count_parameters(baseline).total,
        baseline_flops_per_token=count_flops(baseline, training.seq_length),
        baseline_equal_ffn=_equal_ffn(model, baseline, recipe.parallel.tensor),
        layout=layout,
        parameters=count_parameters(model),
        trained_parameters=count_trained(recipe),
        steps=training.total_steps,
        tokens_per_step=training.tokens_per_step,
        flops_per_token=count_flops(model, training.seq_length, frozen_matrices(recipe)),
        memory=memory,
        traffic=count_traffic(recipe, ranks),
        time=estimate_time(recipe, ranks, found),
        assumptions=sentences(recipe, found),
        warnings=warnings(recipe, layout, memory, found.name),
    )


def _equal_ffn(model: ModelConfig, baseline: ModelConfig, tensor: int) -> int | None:
    """Return :attr:`Plan.baseline_equal_ffn`, a multiple of the tensor-parallel size."""
    wanted, given = count_parameters(model).total, count_parameters(baseline).total
    if abs(given - wanted) <= _EQUAL_SHARE * wanted or model.lora is not None:
        return None
    per_channel = 3 * model.hidden_size * model.num_layers
    ffn = model.ffn_hidden_size + (wanted - given) / per_channel
    return max(1, round(ffn / tensor)) * tensor


def _kv_cache_bytes(recipe: Recipe) -> int | None:
    kinds, length = counted_kinds(recipe.model), recipe.training.seq_length
    if all(kind.window is None for kind, _ in kinds):
        return None
    element = BYTES[recipe.training.precision]
    return sum(
        count * costs_of(kind).kv_cache_bytes(element) * (window_in(kind, length) or length)
        for kind, count in kinds
    )


def check_recipe_vocabulary(recipe: Recipe) -> None:
    """Raise a UserError if the model's vocabulary is too small for the tokenizer.

    Nothing is checked if the tokenizer's files are not on this machine.
    """
    try:
        used = vocabulary_size(recipe.data.tokenizer)
    except UserError:
        return
    check_vocabulary(recipe.data.tokenizer, used, recipe.model.tokens)

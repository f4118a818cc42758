"""The plan of a recipe: parameters, FLOPs, memory, traffic, time and warnings."""

import json
from dataclasses import asdict, dataclass

from diffmegatron.config.schema import Recipe
from diffmegatron.data.tokenizers import check_vocabulary, vocabulary_size
from diffmegatron.errors import UserError
from diffmegatron.files import clipped
from diffmegatron.model.accounting import (
    ACCELERATORS,
    Flops,
    Parameters,
    StageMemory,
    count_flops,
    count_parameters,
    count_trained,
    frozen_matrices,
    memory_by_stage,
)
from diffmegatron.model.accounting.activations import BYTES
from diffmegatron.model.accounting.parameters import counted_kinds
from diffmegatron.plan.advice import warnings
from diffmegatron.plan.rank_layout import Layout
from diffmegatron.plan.timing import Assumptions, Estimate, estimate_time
from diffmegatron.plan.traffic import Traffic, count_traffic

DEFAULT_HARDWARE = "H100"


@dataclass(frozen=True)
class Plan:
    """The numbers of a recipe on a number of ranks.

    Attributes:
        attention: kind of attention.
        heads: the heads of that kind in words.
        baseline_num_heads: heads of the Transformer that the recipe is compared with
            (``model.baseline=true``).
        baseline_parameters: its parameters.
        baseline_flops_per_token: its FLOPs.
        memory: memory of each pipeline stage.
        traffic: bytes that a rank of the busiest stage sends per step.
        assumptions: sentences about the assumptions of ``time``.
        warnings: sentences of :func:`diffmegatron.plan.advice.warnings`.
    """

    run_dir: str
    attention: str
    heads: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_cache_bytes_per_token: int
    baseline_num_heads: int
    baseline_parameters: int
    baseline_flops_per_token: Flops
    layout: Layout
    parameters: Parameters
    trained_parameters: int
    steps: int
    tokens_per_step: int
    flops_per_token: Flops
    memory: tuple[StageMemory, ...]
    traffic: Traffic
    time: Estimate
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.steps * self.tokens_per_step

    @property
    def total_flops(self) -> float:
        """Model FLOPs of the whole run."""
        return self.tokens * self.flops_per_token.training

    @property
    def heaviest(self) -> StageMemory:
        """The pipeline stage whose ranks need most memory."""
        return max(self.memory, key=lambda stage: stage.total)

    def to_json(self) -> str:
        """Return all numbers as JSON: counts, FLOPs, bytes, seconds."""
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
        recipe: the recipe.
        world_size: number of ranks; by default the fewest that fill the layout.
        hardware: name of a GPU in ``ACCELERATORS``.

    Raises:
        UserError: the ranks do not fill the layout, the batch does not divide over them, the
            vocabulary is too small for the tokenizer, or the hardware is not in ``ACCELERATORS``.
    """
    model, training = recipe.model, recipe.training
    check_hardware(hardware)
    check_recipe_vocabulary(recipe)
    ranks = world_size if world_size is not None else recipe.parallel.model_ranks
    layout = Layout.of(recipe, ranks)
    memory = memory_by_stage(recipe, ranks)
    attention = model.attention
    baseline = model.model_copy(update={"attention": attention.baseline()})
    element = BYTES[training.precision]
    cache = sum(count * kind.kv_cache_bytes(element) for kind, count in counted_kinds(model))
    assumed = Assumptions()
    return Plan(
        run_dir=recipe.run_dir,
        attention=attention.kind,
        heads=attention.heads_in_words,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        kv_cache_bytes_per_token=cache,
        baseline_num_heads=baseline.attention.num_heads,
        baseline_parameters=count_parameters(baseline).total,
        baseline_flops_per_token=count_flops(baseline, training.seq_length),
        layout=layout,
        parameters=count_parameters(model),
        trained_parameters=count_trained(recipe),
        steps=training.total_steps,
        tokens_per_step=training.tokens_per_step,
        flops_per_token=count_flops(model, training.seq_length, frozen_matrices(recipe)),
        memory=memory,
        traffic=count_traffic(recipe, ranks),
        time=estimate_time(recipe, ranks, hardware, ACCELERATORS[hardware], assumed),
        assumptions=assumed.sentences(recipe, hardware, ACCELERATORS[hardware]),
        warnings=warnings(recipe, layout, memory, hardware),
    )


def check_hardware(name: str) -> None:
    """Refuse a GPU that is not in ``ACCELERATORS``."""
    if name not in ACCELERATORS:
        raise UserError(
            f"hardware {clipped(name)!r} is unknown; give one of {', '.join(ACCELERATORS)}"
        )


def check_recipe_vocabulary(recipe: Recipe) -> None:
    """Refuse an embedding that has no row for some of the tokenizer's ids, as ``train`` does.

    If the tokenizer's files are not on this machine, only ``train`` checks it.
    """
    try:
        used = vocabulary_size(recipe.data.tokenizer)
    except UserError:
        return
    check_vocabulary(recipe.data.tokenizer, used, recipe.model.tokens)

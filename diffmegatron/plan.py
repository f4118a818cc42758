"""``diffmegatron plan``: what a recipe will build, run and need, before anything runs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diffmegatron.config.schema import ModelConfig, Recipe
from diffmegatron.model.accounting import (
    ACCELERATORS,
    Flops,
    Parameters,
    StageMemory,
    count_flops,
    count_parameters,
    memory_by_stage,
)

# The GPUs of one node are linked fast enough for tensor parallelism; nodes among each other not.
GPUS_PER_NODE = 8
# The largest models of the paper, and the learning rate that it lowers for them (appendix E).
LARGE_MODEL, LARGE_MODEL_LR = 5e9, 7.5e-5
# Of a GPU's memory; CUDA, NCCL, kernels' workspaces and fragmentation take the rest.
USABLE_SHARE = 0.9
GIB = 2**30


@dataclass(frozen=True)
class Layout:
    """How the ranks share the work."""

    world_size: int
    tensor: int
    pipeline: int
    data: int
    sequence_parallel: bool
    zero_stage: int
    microbatches: int


@dataclass(frozen=True)
class Plan:
    """A recipe's numbers on a number of ranks; ``warnings`` are sentences."""

    attention: str
    num_heads: int
    layout: Layout
    parameters: Parameters
    steps: int
    tokens_per_step: int
    flops_per_token: Flops
    memory: tuple[StageMemory, ...]
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
        """Everything as JSON: counts, FLOPs, bytes."""
        values = asdict(self)
        values["parameters"] |= {
            "total": self.parameters.total,
            "without_embeddings": self.parameters.without_embeddings,
        }
        values["memory"] = [asdict(stage) | {"total": stage.total} for stage in self.memory]
        values |= {"tokens": self.tokens, "total_flops": self.total_flops}
        return json.dumps(values, indent=2)


def run(stages: Sequence[Recipe], world_size: int | None = None, *, as_json: bool = False) -> None:
    """Plan the stages of a recipe and print them to standard output, as tables or as JSON.

    JSON is one object, or of several stages a list of them.
    """
    plans = [plan_recipe(recipe, world_size) for recipe in stages]
    if as_json:
        texts = [plan.to_json() for plan in plans]
        print(texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]")
        return
    console = Console()
    for recipe, plan in zip(stages, plans, strict=True):
        if len(stages) > 1:
            console.rule(recipe.run_dir)
        print_plan(plan, console)


def plan_recipe(recipe: Recipe, world_size: int | None = None) -> Plan:
    """The plan of a recipe.

    Args:
        recipe: the recipe.
        world_size: number of ranks; the fewest that fill the layout by default.

    Raises:
        UserError: the ranks do not fill the layout, or the batch does not divide over them.
    """
    parallel, model, training = recipe.parallel, recipe.model, recipe.training
    ranks = world_size if world_size is not None else parallel.tensor * parallel.pipeline
    layout = Layout(
        world_size=ranks,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        data=recipe.data_parallel(ranks),
        sequence_parallel=parallel.sequence_parallel,
        zero_stage=parallel.zero_stage,
        microbatches=recipe.num_microbatches(ranks),
    )
    memory = memory_by_stage(recipe, ranks)
    return Plan(
        attention=model.attention,
        num_heads=model.num_heads,
        layout=layout,
        parameters=count_parameters(model),
        steps=training.total_steps,
        tokens_per_step=training.tokens_per_step,
        flops_per_token=count_flops(model, training.seq_length),
        memory=memory,
        warnings=(
            *_model_warnings(model),
            *_stability_warnings(recipe),
            *_layout_warnings(layout),
            *_memory_warnings(recipe, layout, memory),
        ),
    )


def print_plan(plan: Plan, console: Console) -> None:
    """Print a plan for a person."""
    console.print(f"[bold]{plan.attention}[/bold], {_heads(plan)}", highlight=False)
    console.print(_parameter_table(plan), _run_table(plan), _memory_table(plan))
    for warning in plan.warnings:
        console.print(Text.assemble(("warning: ", "yellow"), warning))


def _model_warnings(model: ModelConfig) -> Iterator[str]:
    """Where a differential model's sizes suggest heads halved twice, or leave what was tried."""
    heads = f"model.num_heads {model.num_heads}"
    width = model.num_attention_heads * model.head_dim
    if not model.is_differential:
        return
    if model.num_heads < 8:
        yield (
            f"{heads} is fewer than any model of the paper has; its authors advise more than 8 "
            "differential heads"
        )
    if width < model.hidden_size:
        yield (
            f"{heads} x 2 x head_dim {model.head_dim} is {width}, narrower than hidden_size "
            f"{model.hidden_size}; num_heads counts differential heads, so halve it once only"
        )
    if model.head_dim > 128:
        yield (
            f"model.head_dim {model.head_dim} is above the paper's 128; num_heads counts "
            f"differential heads, so halve it once only: {model.hidden_size / 256:g} heads of 128 "
            "fill hidden_size"
        )
    if not model.has_headwise_norm:
        yield (
            "model.headwise_norm is off; without it the paper's 1.4B model ended at a validation "
            "loss of 3.122 instead of 3.062 (table 6)"
        )


def _stability_warnings(recipe: Recipe) -> Iterator[str]:
    large = count_parameters(recipe.model).without_embeddings > LARGE_MODEL
    if recipe.model.is_differential and large and recipe.optimizer.lr > LARGE_MODEL_LR:
        yield (
            f"optimizer.lr {recipe.optimizer.lr:g} is above the {LARGE_MODEL_LR:g} that the paper "
            "takes from 6.8B on; loss spikes with a rising gradient norm were reported at 7B"
        )


def _layout_warnings(layout: Layout) -> Iterator[str]:
    if layout.tensor > GPUS_PER_NODE:
        yield (
            f"parallel.tensor {layout.tensor} reaches beyond a node of {GPUS_PER_NODE} GPUs; "
            "parallel.pipeline costs less between nodes"
        )
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield (
            f"parallel.sequence_parallel is off with parallel.tensor {layout.tensor}; on, it "
            "shards the norms' activations at no cost"
        )
    if layout.microbatches < layout.pipeline:
        yield (
            f"{layout.microbatches} microbatches do not fill parallel.pipeline {layout.pipeline} "
            f"stages; fewer data-parallel ranks than {layout.data} would"
        )


def _memory_warnings(
    recipe: Recipe, layout: Layout, memory: tuple[StageMemory, ...]
) -> Iterator[str]:
    needed = max(stage.total for stage in memory) / GIB
    smallest = min(gpu.memory_gib for gpu in ACCELERATORS.values())
    if needed <= USABLE_SHARE * smallest:
        return
    gpus = [name for name, gpu in ACCELERATORS.items() if needed <= USABLE_SHARE * gpu.memory_gib]
    known = ", ".join(gpus) or "no known GPU"
    sentence = (
        f"on {_ranks(layout.world_size)} each needs an estimated {needed:.1f} GiB, more than "
        f"{USABLE_SHARE:.0%} of a GPU's {smallest:g} GiB; it fits {known}"
    )
    enough = _enough_ranks(recipe, layout, USABLE_SHARE * smallest)
    yield sentence + (f", and {enough} ranks fit into {smallest:g} GiB" if enough else "")


def _enough_ranks(recipe: Recipe, layout: Layout, available_gib: float) -> int | None:
    """Ranks that fit, found by doubling the data-parallel size; None where that never fits."""
    training = recipe.training
    most = training.global_batch_size // training.micro_batch_size
    data = layout.data
    while data <= most and most % data == 0:
        ranks = layout.tensor * layout.pipeline * data
        if max(stage.total for stage in memory_by_stage(recipe, ranks)) <= available_gib * GIB:
            return ranks
        data *= 2
    return None


def _parameter_table(plan: Plan) -> Table:
    table = _table("Parameters", "part", "count")
    parts = asdict(plan.parameters)
    for name, count in parts.items():
        is_tied = name == "output" and not count
        table.add_row(_words(name), "tied to embedding" if is_tied else f"{count:,}")
    table.add_section()
    table.add_row("without embedding and output", _billions(plan.parameters.without_embeddings))
    table.add_row("total", _billions(plan.parameters.total))
    return table


def _run_table(plan: Plan) -> Table:
    layout, flops = plan.layout, plan.flops_per_token
    table = _table("Run", "", "")
    product = f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data}"
    for name, value in (
        ("layout", f"{_ranks(layout.world_size)} = {product}"),
        ("sequence parallel", "on" if layout.sequence_parallel else "off"),
        ("ZeRO stage", f"{layout.zero_stage}"),
        ("microbatches per step and rank", f"{layout.microbatches}"),
        ("tokens", f"{plan.tokens:,}"),
        ("steps", f"{plan.steps:,}"),
        ("tokens per step", f"{plan.tokens_per_step:,}"),
        ("FLOPs per token, forward", f"{flops.forward:.2e}"),
        ("FLOPs per token, training", f"{flops.training:.2e}"),
        ("FLOPs of the run", f"{plan.total_flops:.2e}"),
    ):
        table.add_row(name, value)
    return table


def _memory_table(plan: Plan) -> Table:
    heaviest = plan.heaviest
    title = "Memory per rank"
    if len(plan.memory) > 1:
        title += f", stage {heaviest.stage + 1} of {len(plan.memory)}"
    table = _table(title, "part", "GiB")
    for name, size in asdict(heaviest).items():
        if name != "stage":
            estimate = " (estimate)" if name in ("activations", "logits") else ""
            table.add_row(_words(name) + estimate, f"{size / GIB:.2f}")
    table.add_section()
    table.add_row("total (estimate)", f"{heaviest.total / GIB:.2f}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns))
    table.add_column(columns[0])
    table.add_column(columns[1], justify="right")
    return table


def _heads(plan: Plan) -> str:
    if plan.attention == "differential":
        return f"{plan.num_heads} heads; its Transformer twin has {2 * plan.num_heads}"
    return f"{2 * plan.num_heads} heads; its differential twin has {plan.num_heads}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e8 else f"{count:,}"

"""A plan for a person: tables that fit 80 columns."""

from collections.abc import Iterable
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diffmegatron.model.accounting import StageMemory
from diffmegatron.plan.rank_layout import GIB, Layout, ranks_in_words
from diffmegatron.plan.summary import Plan

TRAFFIC = {
    "tensor": "tensor parallel",
    "context": "context parallel",
    "pipeline": "pipeline",
    "gradients": "ZeRO, gradients",
    "weights": "ZeRO, weights",
}


def print_plan(plan: Plan, console: Console) -> None:
    """Print a plan for a person."""
    console.print(f"[bold]{plan.attention}[/bold] attention: {_heads(plan)}", highlight=False)
    console.print(f"Its Transformer: {_baseline(plan)}", highlight=False)
    console.print(_parameter_table(plan), _run_table(plan), _memory_table(plan))
    console.print(_traffic_table(plan), _time_table(plan))
    print_assumptions(plan.assumptions, console)
    for warning in plan.warnings:
        console.print(Text.assemble(("warning: ", "yellow"), warning))


def print_assumptions(assumptions: Iterable[str], console: Console) -> None:
    """Say that times are an estimate, and of what."""
    console.print("Times are an estimate, and assume:", style="dim", highlight=False)
    for assumption in assumptions:
        console.print(f"  - {assumption}", style="dim", highlight=False)


def _parameter_table(plan: Plan) -> Table:
    rows = []
    for name, count in asdict(plan.parameters).items():
        if name == "lora" and not count:
            continue
        is_tied = name == "output" and not count
        rows.append((_words(name), "tied to embedding" if is_tied else f"{count:,}"))
    totals = [
        ("without embedding and output", _billions(plan.parameters.without_embeddings)),
        ("total", _billions(plan.parameters.total)),
    ]
    if plan.trained_parameters < plan.parameters.total:
        totals.append(("trained", _billions(plan.trained_parameters)))
    return _table("Parameters", ("part", "count"), rows, totals)


def _run_table(plan: Plan) -> Table:
    layout, flops = plan.layout, plan.flops_per_token
    rows = [
        ("layout", f"{ranks_in_words(layout.world_size)} = {_product(layout)}"),
        ("sequence parallel", "on" if layout.sequence_parallel else "off"),
        ("ZeRO stage", f"{layout.zero_stage}" + (", offloaded" * layout.offload_optimizer)),
        ("recomputation", layout.recompute),
        ("microbatches per step and rank", f"{layout.microbatches} of {layout.micro_batch_size}"),
        ("tokens", f"{plan.tokens:,}"),
        ("steps", f"{plan.steps:,}"),
        ("tokens per step", f"{plan.tokens_per_step:,}"),
        ("FLOPs per token, forward", f"{flops.forward:.2e}"),
        ("FLOPs per token, training", f"{flops.training:.2e}"),
        ("FLOPs of the run", f"{plan.total_flops:.2e}"),
        ("KV cache per token, decoding", f"{plan.kv_cache_bytes_per_token:,} bytes"),
    ]
    return _table("Run", ("", ""), rows)


def _memory_table(plan: Plan) -> Table:
    heaviest = plan.heaviest
    title = "Memory per rank"
    if len(plan.memory) > 1:
        title += f", stage {heaviest.stage + 1} of {len(plan.memory)}"
    rows = [(name, f"{size / GIB:.2f}") for name, size in _memory_rows(heaviest)]
    totals = [("peak (estimate)", f"{heaviest.total / GIB:.2f}")]
    if heaviest.host:
        totals.append(("in the host's memory", f"{heaviest.host / GIB:.2f}"))
    return _table(title, ("part", "GiB"), rows, totals)


def _memory_rows(stage: StageMemory) -> list[tuple[str, int]]:
    """What adds up to the peak, then what is there when that is not."""
    return [
        ("weights", stage.weights),
        ("gradients", stage.gradients),
        ("optimizer", stage.optimizer),
        ("communication buffers", stage.communication),
        ("backward: activations", stage.activations),
        ("  then logits and loss", stage.logits),
        ("  or a layer's gradients", stage.layer),
        ("or in the update", stage.update),
    ]


def _traffic_table(plan: Plan) -> Table:
    rows = [(TRAFFIC[name], _gigabytes(size)) for name, size in asdict(plan.traffic).items()]
    total = [("total", _gigabytes(plan.traffic.total))]
    return _table("Sent per step and rank", ("kind", "GB"), rows, total)


def _time_table(plan: Plan) -> Table:
    time = plan.time
    rows = [
        ("computing, recomputation included", f"{time.compute:.3f} s"),
        ("communication that nothing hides", f"{time.communication:.3f} s"),
        (f"pipeline bubble ({time.bubble:.1%})", f"{time.idle:.3f} s"),
        ("optimizer", f"{time.optimizer:.3f} s"),
    ]
    totals = [
        ("step", f"{time.step:.3f} s"),
        ("tokens per second", f"{time.tokens_per_second:,.0f}"),
        ("model FLOPs utilization", f"{time.utilization:.0%}"),
        ("the run", _duration(time.days)),
    ]
    return _table(f"Time on {time.hardware} (estimate)", ("per step", ""), rows, totals)


def _table(
    title: str,
    columns: tuple[str, str],
    rows: Iterable[tuple[str, str]],
    totals: Iterable[tuple[str, str]] = (),
) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns))
    table.add_column(columns[0])
    table.add_column(columns[1], justify="right")
    for row in rows:
        table.add_row(*row)
    table.add_section()
    for row in totals:
        table.add_row(*row)
    return table


def _product(layout: Layout) -> str:
    """The sizes above 1, tensor and data always."""
    parts = [f"tensor {layout.tensor}"]
    if layout.context > 1:
        parts.append(f"context {layout.context} ({_words(layout.context_communication or '')})")
    if layout.pipeline > 1:
        virtual = (
            f" ({layout.virtual_pipeline} virtual stages)" if layout.virtual_pipeline > 1 else ""
        )
        parts.append(f"pipeline {layout.pipeline}{virtual}")
    return " x ".join([*parts, f"data {layout.data}"])


def _heads(plan: Plan) -> str:
    kv = "" if plan.num_kv_heads == plan.num_heads else f", {plan.num_kv_heads} key-value heads"
    return f"{plan.num_heads} heads of {plan.head_dim}{kv}"


def _baseline(plan: Plan) -> str:
    parameters, flops = plan.baseline_parameters, plan.baseline_flops_per_token.training
    return (
        f"{plan.baseline_num_heads} heads, {_billions(parameters)} parameters, {flops:.2e} "
        "FLOPs/token"
    )


def _duration(days: float) -> str:
    return f"{days:.1f} days" if days >= 2 else f"{24 * days:.1f} hours"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e8 else f"{count:,}"

"""Tables of a plan for the terminal, at most 80 columns wide."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diffmegatron.model.accounting.memory import StageMemory
from diffmegatron.plan.rank_layout import RankLayout, ranks_in_words
from diffmegatron.plan.summary import Plan

_SECONDS_PER_DAY = 86_400
# Times of shorter runs are not printed, because their recipes are sized for a CPU.
_SHORT_RUN_SECONDS = 60
# Names of the rows in the traffic table, by attribute of Plan.traffic.
TRAFFIC = {
    "tensor": "tensor parallel",
    "context": "context parallel",
    "pipeline": "pipeline",
    "gradients": "ZeRO, gradients",
    "weights": "ZeRO, weights",
    "muon": "Muon, matrices and updates",
}

# Parts of a plan that are left out if they equal the parts of the previous training stage.
_NETWORK, _MEMORY, _TRAFFIC = "the network", "memory per rank", "what is sent"
_ASSUMPTIONS = "assumptions"


def print_plan(plan: Plan, console: Console, previous: Plan | None = None) -> None:
    """Print a plan as tables; omit parts that equal those of ``previous``, the preceding plan."""
    same = [] if previous is None else _same(plan, previous)
    if same and previous is not None:
        names = Text(f"same as {previous.run_dir}: {', '.join(same)}", style="dim")
        console.print(names, soft_wrap=True)
    if _NETWORK not in same:
        console.print(f"[bold]{plan.attention}[/bold] attention: {plan.heads}", highlight=False)
        console.print(f"Baseline Transformer: {_baseline(plan)}", highlight=False)
        if plan.baseline_equal_ffn is not None:
            console.print(
                "  with as many parameters: model.baseline=true "
                f"model.ffn_hidden_size={plan.baseline_equal_ffn}",
                highlight=False,
                soft_wrap=True,
            )
        console.print(_parameter_table(plan))
    console.print(_run_table(plan))
    if _MEMORY not in same:
        console.print(_memory_table(plan))
    if _TRAFFIC not in same:
        console.print(_traffic_table(plan))
    if plan.time.days * _SECONDS_PER_DAY < _SHORT_RUN_SECONDS:
        console.print(
            f"The run would take less than a minute on {plan.time.hardware}, most of it for the "
            "start. Such a time is not estimated, and times on a CPU are not estimated either.",
            soft_wrap=True,
        )
    else:
        console.print(_time_table(plan))
        if _ASSUMPTIONS not in same:
            print_assumptions(plan.assumptions, console)
    for warning in plan.warnings:
        if previous is None or warning not in previous.warnings:
            console.print(Text.assemble(("warning: ", "yellow"), warning))


def _same(plan: Plan, previous: Plan) -> list[str]:
    """Return the names of the parts that are equal in two plans."""
    parts = {
        _NETWORK: lambda p: (p.attention, p.heads, p.parameters, p.trained_parameters),
        _MEMORY: lambda p: p.memory,
        _TRAFFIC: lambda p: p.traffic,
        _ASSUMPTIONS: lambda p: p.assumptions,
    }
    return [name for name, part in parts.items() if part(plan) == part(previous)]


def print_assumptions(assumptions: Iterable[str], console: Console) -> None:
    """Print the rates and assumptions of the estimated times."""
    console.print("Times are an estimate, with:", style="dim", highlight=False)
    for assumption in assumptions:
        console.print(f"  - {assumption}", style="dim", highlight=False)


def _parameter_table(plan: Plan) -> Table:
    rows = []
    for name, count in asdict(plan.parameters).items():
        if name == "output" and not count:
            rows.append((_words(name), "tied to embedding"))
        elif count:
            rows.append((_words(name), f"{count:,}"))
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
        ("class of an export, unless of a pretrained model", plan.exported_class or "none"),
    ]
    if plan.kv_cache_bytes is not None:
        cache = f"{plan.kv_cache_bytes / 2**30:.2f} GiB"
        rows.append(("KV cache of a sequence, decoding with windows", cache))
    if plan.width_scaling is not None:
        rows.append(("muP, matrices of layers", plan.width_scaling))
    if plan.exported_class is not None:
        served = f"{plan.served_cache_bytes_per_token:,} bytes"
        rows.append(("KV cache per token, in vLLM", served))
    return _table("Run", ("", ""), rows)


def _memory_table(plan: Plan) -> Table:
    largest = plan.largest_stage
    title = "Memory per rank"
    if len(plan.memory) > 1:
        title += f", stage {largest.stage + 1} of {len(plan.memory)}"
    unit, scale = _unit(largest.total, {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10})
    rows = [(name, _figure(size / scale)) for name, size in _memory_rows(largest)]
    totals = [("peak (estimate)", _figure(largest.total / scale))]
    if largest.host:
        totals.append(("in the host's memory", _figure(largest.host / scale)))
    return _table(title, ("part", unit), rows, totals)


def _memory_rows(stage: StageMemory) -> list[tuple[str, int]]:
    """Return the parts of a pipeline stage's memory as table rows: name and bytes.

    Memory of the first four rows is allocated during the whole step. Rows that begin with "then" or
    "or" exclude each other.
    """
    return [
        ("weights", stage.weights),
        ("gradients", stage.gradients),
        ("optimizer", stage.optimizer),
        ("communication buffers", stage.communication),
        ("backward: activations", stage.activations),
        ("  then logits and loss", stage.loss.beside),
        *_optional("  or the output layer's copied gradient", stage.reduction.beside),
        ("  or a layer's gradients", stage.layer.beside),
        *_optional("  or the embedding's", stage.embedding.beside),
        *_optional("  and gathered weights", stage.passes.gathered),
        *_optional("  and the gradients of the only microbatch", stage.passes.gradients),
        ("or in the update", stage.update),
    ]


def _optional(name: str, size: int) -> list[tuple[str, int]]:
    """Return a list of one table row, or an empty list if ``size`` is 0."""
    return [(name, size)] if size else []


def _traffic_table(plan: Plan) -> Table:
    unit, scale = _unit(plan.traffic.total, {"GB": 1e9, "MB": 1e6, "kB": 1e3})
    rows = [
        (TRAFFIC[name], _figure(size / scale))
        for name, size in asdict(plan.traffic).items()
        if size or name != "muon"
    ]
    total = [("total", _figure(plan.traffic.total / scale))]
    return _table("Sent per step and rank", ("kind", unit), rows, total)


def _unit(total: int, units: Mapping[str, float]) -> tuple[str, float]:
    """Return the name and bytes of the largest unit that does not exceed ``total`` bytes.

    ``units`` decrease. If all exceed ``total``, return the smallest. For 0 bytes, return the
    largest.
    """
    fitting = [each for each in units.items() if each[1] <= total]
    return fitting[0] if fitting else [*units.items()][-1 if total else 0]


def _figure(value: float) -> str:
    """Return a number with two decimals, or ``<0.01`` if it would be rounded to ``0.00``."""
    return "<0.01" if 0 < value < 0.005 else f"{value:.2f}"


def _time_table(plan: Plan) -> Table:
    time = plan.time
    rows = [
        ("compute", "computing, recomputation included", time.compute),
        (
            "communication",
            f"communication not overlapped ({time.collectives:,} collectives)",
            time.communication,
        ),
        ("idle", f"pipeline bubble ({time.bubble:.1%})", time.idle),
        ("optimizer", "optimizer", time.optimizer),
    ]
    totals = [
        ("step", _seconds(time.step)),
        ("tokens per second", f"{time.tokens_per_second:,.0f}"),
        ("model FLOPs utilization", f"{time.utilization:.0%}"),
        ("the run", duration(time.days)),
    ]
    columns = ("per step", "", "rates")
    title = f"Time on {time.hardware} (estimate)"
    parts = [(name, _seconds(value), time.origins[part]) for part, name, value in rows]
    return _table(title, columns, parts, [(*each, time.origins["step"]) for each in totals])


def _table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    totals: Iterable[Sequence[str]] = (),
) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns))
    table.add_column(columns[0])
    table.add_column(columns[1], justify="right")
    for name in columns[2:]:
        table.add_column(name)
    for row in rows:
        table.add_row(*row)
    table.add_section()
    for row in totals:
        table.add_row(*row)
    return table


def _product(layout: RankLayout) -> str:
    """Return the layout as a product in words, such as ``tensor 2 x pipeline 4 x data 8``."""
    parts = [f"tensor {layout.tensor}"]
    if layout.context > 1:
        parts.append(f"context {layout.context} ({_words(layout.context_communication or '')})")
    if layout.pipeline > 1:
        virtual = (
            f" ({layout.virtual_pipeline} virtual stages)" if layout.virtual_pipeline > 1 else ""
        )
        parts.append(f"pipeline {layout.pipeline}{virtual}")
    return " x ".join([*parts, f"data {layout.data}"])


def _baseline(plan: Plan) -> str:
    parameters, flops = plan.baseline_parameters, plan.baseline_flops_per_token.training
    return (
        f"{plan.baseline_num_heads} heads, {_billions(parameters)} parameters, {flops:.2e} "
        "FLOPs/token"
    )


def duration(days: float) -> str:
    """Return a duration, given in days, as text in days, hours, seconds or microseconds."""
    if days >= 2:
        return f"{days:.1f} days"
    return f"{24 * days:.1f} hours" if 24 * days >= 0.05 else _seconds(_SECONDS_PER_DAY * days)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.0005 or not seconds else f"{1e6 * seconds:.1f} µs"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e8 else f"{count:,}"

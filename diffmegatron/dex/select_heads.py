"""Selection of the attention heads that DEX extends, by their scores on text."""

import itertools
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from matplotlib.figure import Figure
from torch import distributed

from diffmegatron.attention.kinds.selected_heads import HeadsFile, SelectedOn
from diffmegatron.checkpoint.checkpoint_format import RECIPE
from diffmegatron.checkpoint.checkpoint_manifest import read_checkpoint_manifest
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.checkpoint.weights import load_network
from diffmegatron.config.load import check_recipe, load_resolved
from diffmegatron.config.parallel_config import ParallelConfig, RecomputeConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.dex.scores import Sums, entropy_sums, gradient_sums
from diffmegatron.errors import UserError
from diffmegatron.files import explain_os_errors, format_path, write_durably, write_picture
from diffmegatron.model.network import Network
from diffmegatron.parallel.launcher import read_launch
from diffmegatron.parallel.parallel_state import ParallelState, process_groups
from diffmegatron.training.compute.batches import on_this_rank, open_loader
from diffmegatron.training.saving.resume import open_together
from diffmegatron.yaml_documents import dump_yaml

_PROGRESS_SECONDS = 5.0
Method = Literal["entropy", "gradient"]
Scores = list[list[float]]
# Method -> (function that sums the scores, whether heads with the highest scores are selected).
METHODS = {"entropy": (entropy_sums, True), "gradient": (gradient_sums, False)}
_LABELS = {
    "entropy": "attention entropy, nats",
    "gradient": r"importance $|\partial L / \partial \xi_h|$",
}


def select_heads(
    model: Path,
    data: Path,
    out: Path,
    overrides: Sequence[str],
    *,
    method: Method,
    share: float,
    sequences: int,
) -> str | None:
    """Score every head of a checkpoint on text, and write a file with the selected heads.

    A recipe of DEX names the file ``out`` in ``model.attention.selected_heads``. If ``out`` is
    ``heads.yaml``, the files ``heads.scores.json`` and ``heads.png`` are written beside it. If
    ``model`` is a ``run_dir``, its newest checkpoint is used. ``overrides`` change the checkpoint's
    recipe, whose sections ``parallel`` and ``recompute`` have been reset to the defaults.

    Returns:
        On rank 0, a summary such as "8 of 16 heads by entropy"; None on the other ranks.
    """
    if not out.name:
        raise UserError(f"--out {format_path(out)} is a folder; give a file, such as heads.yaml")
    for path in (out, *_files_beside(out)):
        if path.exists():
            raise UserError(f"{format_path(path)} exists already; give another --out")
    directory = CheckpointStore(model).latest() or model
    step = read_checkpoint_manifest(directory).step
    recipe = _calibration_recipe(directory / RECIPE, data, sequences, overrides)
    recipe.check_ranks(read_launch().ranks)
    with process_groups(recipe.parallel, recipe.training.seed) as parallel_state:
        checkpoint = open_together(directory, parallel_state)
        network = load_network(checkpoint, recipe, parallel_state)
        network.at_step(step)
        batches = open_loader(recipe, parallel_state, "train").read_step(0)
        score, highest = METHODS[method]
        own = on_this_rank(batches, parallel_state)
        if parallel_state.is_main:
            _print_progress(network, len(own))
        measured = score(network, own, parallel_state)
        scores = _gather_scores(*measured, parallel_state)
        if not parallel_state.is_main:
            return None
        fingerprint = checkpoint.fingerprint()
    heads = [select_layer_heads(of_layer, share, highest=highest) for of_layer in scores]
    made_on = SelectedOn(num_layers=len(scores), num_heads=len(scores[0]), fingerprint=fingerprint)
    file = HeadsFile.model_validate(
        {"model": made_on, "method": method, "share": share, "heads": heads}
    )
    _write(out, file, scores, {"model": str(directory), "data": str(data), "sequences": sequences})
    return f"{sum(map(len, heads))} of {sum(map(len, scores))} heads by {method}"


def select_layer_heads(scores: Sequence[float], share: float, *, highest: bool) -> tuple[int, ...]:
    """Return the ascending indices of the selected heads of a layer.

    A ``share`` of the heads is selected, but at least one head. The selected heads have the highest
    scores if ``highest`` is true, otherwise the lowest scores.
    """
    count = max(1, round(share * len(scores)))
    order = sorted(range(len(scores)), key=lambda head: scores[head], reverse=highest)
    return tuple(sorted(order[:count]))


def _calibration_recipe(
    saved: Path, data: Path, sequences: int, overrides: Sequence[str]
) -> Recipe:
    """Return a checkpoint's recipe, changed to one step on ``sequences`` sequences of ``data``."""
    recipe = load_resolved(saved, saved.resolve().parent.parent.parent)
    attention = recipe.model.attention
    for kind, _ in attention.by_kind(recipe.model.num_layers):
        heads = kind.heads
        if kind.operation != "softmax" or heads.queries * heads.head_dim != heads.output_channels:
            raise UserError(
                f"model.attention.kind is {kind.kind!r}, which is differential already; give a "
                "model with ordinary attention, whose heads DEX can extend"
            )
    values = recipe.model_dump(mode="json")
    values["parallel"] = ParallelConfig().model_dump(mode="json")
    values["recompute"] = RecomputeConfig().model_dump(mode="json")
    values["checkpoint"] |= {"start_from": None}
    values["optimizer"]["schedule"] = {"kind": "constant"}
    values["training"] |= {
        "micro_batch_size": 1,
        "global_batch_size": sequences,
        "steps": 1,
        "tokens": None,
        "offload_activations": False,
        "profile": None,
    }
    values["data"] |= {
        "sources": [{"path": str(data)}],
        "validation_fraction": 0.0,
        "test_fraction": 0.0,
        "upsampling": {"mode": "none"},
    }
    return check_recipe(values, format_path(saved), overrides)


def _print_progress(network: Network, microbatches: int) -> None:
    """Print the number of the microbatch to standard error, at most every few seconds."""
    begun = itertools.count(1)
    last = -math.inf

    def print_number(*_: object) -> None:
        nonlocal last
        number, now = next(begun), time.monotonic()
        if now - last >= _PROGRESS_SECONDS:
            last = now
            print(f"scoring heads: sequence {number} of {microbatches}", file=sys.stderr)

    # The schedule of a pipeline calls the virtual stages, and not the network.
    network.virtual_stages[0].register_forward_pre_hook(print_number)


def _gather_scores(sums: Sums, divisor: float, parallel_state: ParallelState) -> Scores:
    """Return the score of every head as ``scores[layer][head]``, the same on every rank."""
    coordinates = (parallel_state.data_rank, parallel_state.tensor_rank)
    own = {layer: value.tolist() for layer, value in sums.items()}
    ranks: list[tuple] = [() for _ in range(parallel_state.world_size)]
    distributed.all_gather_object(ranks, (coordinates, own, divisor))
    # (layer, tensor-parallel rank) -> [total of each head of that rank..., total divisor].
    parts: dict[tuple[int, int], torch.Tensor] = {}
    for (_, tensor), of_layers, count in sorted(ranks, key=lambda each: each[0]):
        for layer, values in of_layers.items():
            key = (layer, tensor)
            part = torch.tensor([*values, count], dtype=torch.float64)
            parts[key] = parts[key] + part if key in parts else part
    scores: dict[int, list[float]] = {}
    for layer, tensor in sorted(parts):
        part = parts[layer, tensor]
        scores.setdefault(layer, []).extend((part[:-1] / part[-1]).tolist())
    return list(scores.values())


def _files_beside(out: Path) -> tuple[Path, Path]:
    return out.with_suffix(".scores.json"), out.with_suffix(".png")


def _write(out: Path, file: HeadsFile, scores: Scores, origin: dict[str, object]) -> None:
    """Write three files, ``out`` last: if it exists, the other two files exist as well."""
    described = file.model_dump(mode="json") | {"calibration": origin, "scores": scores}
    table, picture = _files_beside(out)
    with explain_os_errors(f"cannot write {format_path(out)}"):
        _draw_scores(picture, scores, file.heads, file.method)
        write_durably(table, (json.dumps(described, indent=1) + "\n").encode())
        write_durably(out, dump_yaml(file.model_dump(mode="json")).encode())


def _draw_scores(path: Path, scores: Scores, heads: Sequence[Sequence[int]], method: str) -> None:
    """Draw a colour map of the scores [layers][heads], with dots on the selected heads."""
    figure = Figure(
        figsize=(2.5 + 0.25 * len(scores[0]), 1.5 + 0.25 * len(scores)), layout="constrained"
    )
    axes = figure.subplots()
    image = axes.imshow(scores, aspect="auto", cmap="viridis")
    figure.colorbar(image, ax=axes, label=_LABELS[method])
    marked = [(head, layer) for layer, selected in enumerate(heads) for head in selected]
    axes.plot(
        *zip(*marked, strict=True), "o", color="white", markeredgecolor="black", label="selected"
    )
    axes.set(xlabel="head", ylabel="layer", title="Heads that DEX extends (dots)")
    axes.set_yticks(range(len(scores)), [str(layer + 1) for layer in range(len(scores))])
    write_picture(path, figure)

"""``plan --rehearse``: a test of a recipe's parallel layout on CPU ranks of this machine.

A rehearsal trains a tiny network for two steps with the recipe's parallel layout, pipeline
schedule, ZeRO stage, recomputation, packing and checkpoint settings. It does not test GPUs.
"""

import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffmegatron.config.load import dump_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import network_tensors
from diffmegatron.config.trainable_patterns import trained_parts
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.errors import UserError
from diffmegatron.model.accounting.activations import context_communication
from diffmegatron.training.monitoring.metrics import read_metrics

# A laptop starts 16 processes in a minute.
MAX_RANKS = 16
_MAX_LAYERS = 128
# Limit for ffn_hidden_size / hidden_size, and for num_heads / num_kv_heads divided by the number of
# signal heads per noise head.
MAX_RATIO = 16
STEPS = 2
_HEAD_DIM = 8
# Windows of the small network in tokens. They cut all sequences and, by a ring, their chunks.
_WINDOW = 11
TIMEOUT_SECONDS = 900
# Number of ids of the `bytes` tokenizer, with padding.
VOCABULARY = 320


@dataclass(frozen=True)
class Rehearsal:
    """A small recipe, and a sentence for each reduced tensor, context or pipeline size."""

    recipe: Recipe
    world_size: int
    reductions: tuple[str, ...]


def rehearse(stages: Sequence[Recipe], world_size: int | None = None) -> None:
    """Rehearse the training stages of a recipe in order, and print the losses.

    ``world_size`` is the number of ranks of the real run; None for the fewest that fit the layout.
    """
    for recipe in stages:
        if len(stages) > 1:
            print(f"{recipe.run_dir}:")
        with tempfile.TemporaryDirectory(prefix="diffmegatron_rehearsal_") as folder:
            rehearsal = small_recipe(recipe, world_size, Path(folder))
            for sentence in rehearsal.reductions:
                print(f"reduced: {sentence}")
            print(f"starting {rehearsal.world_size} CPU ranks: {_layout(rehearsal.recipe)}")
            for loss, norm in run_ranks(rehearsal, Path(folder)):
                print(f"  loss {loss:.4f}, gradient norm {norm:.4f}")
        print("the layout works")


def small_recipe(recipe: Recipe, world_size: int | None, folder: Path) -> Rehearsal:
    """Return the rehearsal of a recipe: a tiny network, short sequences and a small batch.

    The data-parallel size is at most 2. Other parallel sizes are reduced only if the layout needs
    more than ``MAX_RANKS`` ranks.
    """
    ranks = recipe.parallel.model_ranks if world_size is None else world_size
    data_size = recipe.data_parallel(ranks)
    sizes, reductions = _fewer_ranks(recipe, min(2, data_size))
    values = recipe.model_dump(mode="json")
    values["run_dir"] = str(folder / "run")
    values["parallel"] |= {name: sizes[name] for name in ("tensor", "context", "pipeline")}
    if sizes["tensor"] == 1:
        values["parallel"]["sequence_parallel"] = False
    if sizes["context"] == 1:
        values["parallel"]["context_communication"] = "auto"
    stage_layers = _shrink_layers(values)
    values["model"] |= _model(recipe, sizes, stage_layers)
    values["training"] |= _training(recipe, sizes)
    values["optimizer"] |= {"schedule": {"kind": "constant"}} | _trained(recipe)
    values["checkpoint"] |= {"start_from": None, "interval": STEPS}
    values["data"] |= {
        "tokenizer": "bytes",
        "sources": [{"path": str(folder / "corpus")}],
        "validation_fraction": 0.0,
        "test_fraction": 0.0,
        "upsampling": {"mode": "none"},
        "on_exhausted": "repeat",
        "cache_dir": None,
    }
    small = Recipe.model_validate(values)
    return Rehearsal(small, math.prod(sizes.values()), tuple(reductions))


def run_ranks(rehearsal: Rehearsal, folder: Path) -> list[tuple[float, float]]:
    """Train the small recipe on CPU ranks, and return loss and gradient norm of each step."""
    _make_corpus(folder)
    file = folder / "rehearsal.yaml"
    file.write_text(dump_recipe(rehearsal.recipe))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [
        "--local-addr=127.0.0.1",
        f"--nproc-per-node={rehearsal.world_size}",
        "-m",
        "diffmegatron",
        "train",
    ]
    alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, str(file)],
            env=_without_launcher() | alone,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"the rehearsal did not end within {TIMEOUT_SECONDS} s; either its ranks wait for each "
            f"other, or this machine is too small for {rehearsal.world_size} ranks"
        ) from None
    if done.returncode:
        raise UserError(f"the layout does not work: {_reason(done.stderr)}")
    entries = read_metrics(Path(rehearsal.recipe.run_dir))
    return [
        (entry["train/loss"], entry["train/grad_norm"])
        for entry in entries
        if "train/loss" in entry
    ]


def _fewer_ranks(recipe: Recipe, data: int) -> tuple[dict[str, int], list[str]]:
    """Return the sizes of the layout by name, and one sentence for each reduced size."""
    parallel = recipe.parallel
    sizes = {
        "tensor": parallel.tensor,
        "context": parallel.context,
        "pipeline": parallel.pipeline,
        "data": data,
    }
    reductions = []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if math.prod(sizes.values()) > MAX_RANKS and sizes[name] > 2:
            reductions.append(
                f"{name} parallel is rehearsed with 2 ranks instead of {sizes[name]}, to start no "
                f"more than {MAX_RANKS}"
            )
            sizes[name] = 2
    return sizes, reductions


def _shrink_layers(values: dict[str, Any]) -> int:
    """Limit ``recompute.layers`` in ``values`` to 2; return it, the layers per virtual stage."""
    recompute = values["recompute"]
    if recompute["layers"] == 1:
        return 1
    recompute["layers"] = 2
    return 2


def _model(recipe: Recipe, sizes: dict[str, int], stage_layers: int) -> dict[str, Any]:
    """Return small sizes for the ``model`` section that can be divided over the ranks."""
    model, tensor = recipe.model, sizes["tensor"]
    attention = model.attention
    shares = sizes["context"] if context_communication(recipe) == "ulysses" else 1
    kv_heads = tensor * shares
    # A multiple of every kind's ratio, so that noise heads can be divided in each of them.
    multiple = math.lcm(*(kind.ratio for kind in attention.kinds))
    per_kv_head = max(1, attention.num_heads // attention.num_kv_heads // multiple)
    heads = kv_heads * multiple * min(MAX_RATIO, per_kv_head)
    layers = sizes["pipeline"] * recipe.parallel.virtual_pipeline * stage_layers
    if layers > _MAX_LAYERS:
        raise UserError(
            f"parallel.virtual_pipeline {recipe.parallel.virtual_pipeline} would be rehearsed with "
            f"{layers} layers, and a rehearsal builds {_MAX_LAYERS} at most; give fewer stages"
        )
    fewer = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": _HEAD_DIM}
    small = attention.resized(layers, fewer, window=_WINDOW)
    hidden = small.kinds[0].heads.output_channels
    ratio = min(MAX_RATIO, model.ffn_hidden_size / model.hidden_size)
    ffn = max(1, round(hidden * ratio / tensor)) * tensor
    return {
        "num_layers": layers,
        "attention": small.model_dump(mode="json"),
        # The recipe refuses the width of another network's heads without norms of queries.
        "initialization": model.initialization.model_dump() | {"base_head_dim": None},
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "vocab_size": math.ceil(VOCABULARY / tensor) * tensor,
        "vocab_padding": 0,
    }


def _trained(recipe: Recipe) -> dict[str, Any]:
    """Return the ``optimizer`` section's settings for trained tensors.

    The tiny network may lack layers that the recipe's patterns name. A tensor that is trained in
    one layer is therefore trained in all.
    """
    if recipe.optimizer.trainable is None:
        return {"lr_multipliers": {}}
    names = {
        re.sub(r"^decoder\.layers\.\d+", "decoder.layers.*", each.name) + (part and f":{part}")
        for each in network_tensors(recipe.model)
        for part in trained_parts(each, recipe)
    }
    return {"trainable": sorted(names), "lr_multipliers": {}}


def _training(recipe: Recipe, sizes: dict[str, int]) -> dict[str, Any]:
    """Return the ``training`` section: short sequences, a small batch, two steps."""
    training = recipe.training
    length = 2 * sizes["context"] * sizes["tensor"] * 8
    micro_batch = min(2, training.micro_batch_size)
    batch = micro_batch * sizes["data"] * 2 * sizes["pipeline"]
    loss_chunk = None if training.loss_chunk is None else length // sizes["context"] // 2
    return {
        "seq_length": length,
        "global_batch_size": batch,
        "micro_batch_size": micro_batch,
        "steps": STEPS,
        "tokens": None,
        "loss_chunk": loss_chunk,
        "attention_backend": "auto",
        "fp8": None,
        "log_interval": 1,
        "eval_batches": 0,
        "evaluate": (),
        "profile": None,
        "wandb": None,
    }


def _make_corpus(folder: Path) -> None:
    """Generate and prepare a corpus of 32 documents of several lengths."""
    texts = folder / "texts"
    texts.mkdir()
    for number in range(32):
        words = " ".join(str(number * word % 97) for word in range(20 + 40 * (number % 7)))
        (texts / f"{number:02d}.txt").write_text(words)
    prepare([texts], folder / "corpus", "bytes", show_progress=False)


def _without_launcher() -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {key: value for key, value in os.environ.items() if key not in names}


def _reason(stderr: str) -> str:
    """Return the most useful line that the ranks have printed to standard error."""
    lines = [re.sub(r"^\[rank\d+\]:\s?", "", line).strip() for line in stderr.splitlines()]
    reported = [
        line.partition(": ")[2] for line in lines if re.match(r"error( \(rank \d+\))?: ", line)
    ]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    # torchrun's ChildFailedError does not contain the error of the rank.
    causes = [line for line in raised if "ChildFailedError" not in line]
    return (reported or causes or raised or lines or ["its ranks printed no error"])[0]


def _layout(recipe: Recipe) -> str:
    parallel = recipe.parallel
    virtual = (
        f" of {parallel.virtual_pipeline} virtual stages" if parallel.virtual_pipeline > 1 else ""
    )
    return (
        f"tensor {parallel.tensor}, context {parallel.context}, pipeline {parallel.pipeline}"
        f"{virtual}, ZeRO {parallel.zero_stage}, layers {recipe.model.num_layers}"
    )

"""Run one batch of random tokens through networks of every kind, and save the results.

The layers come from Megatron-core (its local layers) or from Transformer Engine. This library is
called the host of the layers. The networks use Transformer Engine if this process was started with
the environment of :func:`tests.transformer_engine.environment`, and local layers otherwise.

``python -m tests.transformer_engine.networks CORPUS OUT`` writes losses, parameters and gradients
to the file OUT.
"""

import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffmegatron.config.load import load_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.model.build import build_model
from diffmegatron.model.layers.layer_specs import available_host
from diffmegatron.model.network import Network
from diffmegatron.model.parameter_shards import Shard, parameter_shards
from diffmegatron.parallel.parallel_state import process_groups
from tests.conftest import TINY
from tests.transformer_engine import emulates_fp8, fp8_runs

V2 = "model.attention.kind=diff_v2"
DEX = (
    "model.attention.kind=dex",
    "model.attention.selected_heads=[[0], [1, 3]]",
    "model.attention.annealing_steps=null",
)
NORMS = "optimizer.trainable=['*norm*']"
FULL = "recompute={granularity: full, method: uniform, layers: 1}"
NETWORKS: dict[str, tuple[str, ...]] = {
    "diff_v1": (),
    "diff_v2": (V2,),
    "grouped": ("model.attention.kind=grouped", "model.attention.signal_per_noise=2"),
    "softmax": ("model.baseline=true", "model.attention.output_gate=headwise"),
    "qwen": (
        "model.attention={kind: softmax, num_heads: 4, num_kv_heads: 2, qkv_bias: true, "
        "qk_norm: true, output_gate: elementwise}",
    ),
    "dex": DEX,
    "tied, loss in chunks": ("model.tied_embeddings=true", "training.loss_chunk=24"),
    "full recomputation": (FULL,),
    "selective recomputation": ("recompute={granularity: selective}",),
    # From here on, only some of the weights are trained. Transformer Engine fuses a norm with the
    # weight after it, and in most of these networks exactly one of the two is frozen. The embedding
    # is frozen too. Recomputed layers get gradients only if their input requires one, so the
    # training code must make the output of the frozen embedding require a gradient.
    "norms alone": (NORMS,),
    "norms alone, full recomputation": (NORMS, FULL),
    "norms of v2 alone": (NORMS, V2),
    "matrices alone": ("optimizer.trainable=['*linear*']",),
    "values alone": ("optimizer.trainable=['*linear_qkv.weight:v']",),
    "lambda of v2 alone": ("optimizer.trainable=['*lambda*']", V2),
}
# Networks of each kind of attention, with all weights trained and nothing recomputed.
KINDS = ("diff_v1", "diff_v2", "grouped", "softmax", "qwen", "dex")
BATCH, LENGTH = 2, 64


def find(recipe: Recipe) -> dict[str, Any]:
    """Build the network of a recipe, run one forward and backward pass, and return the results.

    Returns:
        ``classes``: names of the classes of all modules; ``loss``: loss of each token; ``kept``:
        bytes that autograd saves for the backward pass, without weights; ``parameters``: for each
        name, the initial weight, the gradient (None if frozen), the dtype and the shard.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, recipe.model.vocab_size, (BATCH, LENGTH + 1), generator=draw)
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        network = build_model(recipe, parallel_state)
        places = _places(network)
        initial = {name: shard.view(p.data).clone() for name, (p, shard) in places.items()}
        _move_norms(places)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = network(tokens[:, :-1], labels=tokens[:, 1:])
        weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
        loss.float().mean().backward()
        return {
            "classes": sorted({type(module).__name__ for module in network.modules()}),
            "loss": loss.detach(),
            "kept": sum(size for place, size in kept.items() if place not in weights),
            "parameters": {
                name: {
                    "weight": initial[name],
                    "gradient": None if p.grad is None else shard.view(p.grad).clone(),
                    "requires_grad": p.requires_grad,
                    "dtype": p.dtype,
                    "shape": shard.global_shape,
                    "offset": shard.offset,
                    "is_primary": shard.is_primary,
                }
                for name, (p, shard) in places.items()
            },
        }


def _places(network: Network) -> dict[str, tuple[torch.nn.Parameter, Shard]]:
    """Return a mapping from each name in a checkpoint to its parameter and shard."""
    table = parameter_shards(network)
    return {shard.name: (p, shard) for p, shards in table.items() for shard in shards}


def _move_norms(places: dict[str, tuple[torch.nn.Parameter, Shard]]) -> None:
    """Set norm weights to random values, because a test cannot detect swapped weights of 1."""
    for name, (parameter, shard) in places.items():
        if "norm" in name:
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            weight = 1 + 0.3 * torch.randn(shard.global_shape, generator=draw)
            shard.view(parameter.data).copy_(weight[shard.box])


def main() -> None:
    """Run every network of ``NETWORKS`` in fp32 and bf16, and write the results.

    Transformer Engine's layers also train in FP8.
    """
    corpus, out = sys.argv[1:]
    file = Path(out).with_suffix(".yaml")
    file.write_text(TINY.format(run_dir="unused", corpus=corpus))
    networks = {
        (name, precision): find(load_recipe(file, [*overrides, f"training.precision={precision}"]))
        for name, overrides in NETWORKS.items()
        for precision in ("fp32", "bf16")
    }
    found = {"host": available_host(), "networks": networks}
    if found["host"] == "transformer_engine" and emulates_fp8():
        found["fp8_kept"] = {
            name: find(load_recipe(file, [*fp8_runs.KEPT, *NETWORKS[name]]))["kept"]
            for name in KINDS
        }
        found |= fp8_runs.run_all(file, Path(out).parent)
    torch.save(found, out)


if __name__ == "__main__":
    main()

"""Rates of a recipe's matrix products, of memory, and of its collectives."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from diffmegatron.attention.context_parallel.ring import send_and_receive
from diffmegatron.config.attention_backend import run_dtype
from diffmegatron.config.schema import Recipe
from diffmegatron.measurements.records import (
    CollectiveMeasurement,
    CollectiveOperation,
    MemoryMeasurement,
    ProductMeasurement,
)
from diffmegatron.model.accounting.activations import BYTES, context_communication, local_tokens
from diffmegatron.model.accounting.memory import REDUCE_BUCKET, trained_parameters
from diffmegatron.model.accounting.parameters import counted_kinds
from diffmegatron.plan.traffic import forward_passes
from diffmegatron.tuning.timing import time_call, timing_of

if TYPE_CHECKING:
    from diffmegatron.parallel.parallel_state import ParallelState

# Number of timed calls of each collective.
_ROUNDS = 10
# Bytes of the copied tensor.
_COPIED = {"cpu": 1 << 27, "cuda": 1 << 30}
# Ends of the names of the products of a linear layer's backward pass.
_INPUT_GRADIENT, _WEIGHT_GRADIENT = ", gradient of the input", ", gradient of the weight"


class Product(NamedTuple):
    """A matrix product of the network on one rank: [rows, inner] x [inner, columns].

    ``uses`` is the number of these products per microbatch, averaged over pipeline stages.
    """

    name: str
    rows: int
    inner: int
    columns: int
    uses: float


def products_of(recipe: Recipe) -> list[Product]:
    """Return the products of a microbatch's forward and backward pass on one rank.

    A linear layer has the product of its name, and in the backward pass the products of the
    gradients of its input and of its weight. All weights are assumed to be trained.
    """
    model, tensor = recipe.model, recipe.parallel.tensor
    hidden, tokens = model.hidden_size, local_tokens(recipe)
    chunk = recipe.training.loss_chunk
    chunks = 1 if chunk is None else -(-recipe.training.seq_length // chunk)
    layers = model.num_layers / recipe.parallel.pipeline
    linears = [
        ("fc1", tokens, hidden, 2 * model.ffn_hidden_size // tensor, layers),
        ("fc2", tokens, model.ffn_hidden_size // tensor, hidden, layers),
        ("output", tokens // chunks, hidden, model.vocab_size // tensor, chunks),
    ]
    for kind, count in counted_kinds(model):
        heads, uses = kind.heads, count / recipe.parallel.pipeline
        linears.append(("linear_qkv", tokens, hidden, heads.qkv_channels // tensor, uses))
        linears.append(("linear_proj", tokens, heads.output_channels // tensor, hidden, uses))
    found = []
    for name, rows, inner, columns, uses in linears:
        passes = forward_passes(recipe) if name != "output" else 1 if chunk is None else 2
        found.append(Product(name, rows, inner, columns, passes * uses))
        found.append(Product(f"{name}{_INPUT_GRADIENT}", rows, columns, inner, uses))
        found.append(Product(f"{name}{_WEIGHT_GRADIENT}", columns, rows, inner, uses))
    return found


def measure_products(
    recipe: Recipe, device: torch.device, seconds: float
) -> Iterator[ProductMeasurement]:
    """Time the products of a recipe, for ``seconds`` in all."""
    dtype = run_dtype(recipe)
    products = {(each.rows, each.inner, each.columns): each for each in products_of(recipe)}
    for each in products.values():
        name, rows, inner, columns, _ = each
        found = time_call(
            _product(each, getattr(torch, dtype), device), device.type, seconds / len(products)
        )
        yield ProductMeasurement(
            name=name,
            dtype=dtype,
            rows=rows,
            inner=inner,
            columns=columns,
            time=found,
        )


def _product(product: Product, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Return the product with the memory layout that autograd gives to a linear layer."""
    normal = partial(torch.randn, dtype=dtype, device=device)
    if product.name.endswith(_WEIGHT_GRADIENT):
        grad, x = normal(product.inner, product.rows), normal(product.inner, product.columns)
        return lambda: grad.t() @ x
    x = normal(product.rows, product.inner)
    if product.name.endswith(_INPUT_GRADIENT):
        weight = normal(product.inner, product.columns)
        return lambda: x @ weight
    weight = normal(product.columns, product.inner)
    return lambda: linear(x, weight)


def measure_memory(device: torch.device, seconds: float) -> MemoryMeasurement:
    """Time a copy of a tensor that no cache holds."""
    source = torch.ones(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = time_call(lambda: target.copy_(source), device.type, seconds)
    return MemoryMeasurement(bytes=2 * source.numel(), time=found)


class Collective(NamedTuple):
    """A collective of a recipe; ``name`` is the dimension of the layout that calls it."""

    name: str
    operation: CollectiveOperation
    group: ProcessGroup
    bytes: int


def collectives_of(recipe: Recipe, parallel_state: "ParallelState") -> list[Collective]:
    """Return the collectives of this rank's groups of several ranks, with their largest tensors."""
    element, parallel = BYTES[recipe.training.precision], recipe.parallel
    hidden = element * recipe.model.hidden_size * local_tokens(recipe)
    trained = sum(trained_parameters(recipe, parallel_state.pipeline_rank))
    found = []
    if parallel.tensor > 1:
        group = parallel_state.tensor_group
        operations: tuple[CollectiveOperation, ...] = ("all_reduce",)
        if parallel.sequence_parallel:
            operations = ("all_gather", "reduce_scatter")
        found += [Collective("tensor", each, group, hidden) for each in operations]
    if parallel.context > 1:
        found.append(_context_collective(recipe, parallel_state.context_group))
    group = parallel_state.data_context_group
    if group.size() > 1 and trained:
        # ZeRO 1 reduces float32 gradients, ZeRO 2 and 3 those of the run's precision.
        width = 4 if parallel.zero_stage == 1 else element
        bucket = width * min(REDUCE_BUCKET, trained)
        reduce: CollectiveOperation = "reduce_scatter" if parallel.zero_stage == 3 else "all_reduce"
        found.append(Collective("gradients", reduce, group, bucket))
        found.append(Collective("weights", "all_gather", group, element * trained))
    return found


def _context_collective(recipe: Recipe, group: ProcessGroup) -> Collective:
    """Return the collective of keys and values; Ulysses has queries in it too."""
    heads, method = recipe.model.attention.kinds[0].heads, context_communication(recipe)
    per_channel = BYTES[recipe.training.precision] * local_tokens(recipe) // recipe.parallel.tensor
    keys = 2 * heads.key_channels * per_channel
    if method == "ring":
        return Collective("context", "send", group, keys)
    if method == "all_gather":
        return Collective("context", "all_gather", group, keys * recipe.parallel.context)
    queries = heads.query_channels * per_channel
    return Collective("context", "all_to_all", group, queries + keys)


def measure_collectives(
    recipe: Recipe, parallel_state: "ParallelState", hosts: Sequence[str]
) -> list[CollectiveMeasurement]:
    """Time the collectives of a recipe; all ranks must call this.

    ``hosts`` are the names of the machines of all ranks, by rank.
    """
    device, found = parallel_state.device, []
    for each in collectives_of(recipe, parallel_state):
        run = _collective(each, device)
        run()
        taken = []
        for _ in range(_ROUNDS):
            distributed.barrier(each.group)
            taken.append(_wall_seconds(run, device))
        ranks = distributed.get_process_group_ranks(each.group)
        found.append(
            CollectiveMeasurement(
                name=each.name,
                operation=each.operation,
                ranks=len(ranks),
                nodes=len({hosts[rank] for rank in ranks}),
                bytes=each.bytes,
                time=timing_of(taken),
            )
        )
    return found


def _collective(each: Collective, device: torch.device) -> Callable[[], None]:
    """Return a function that runs the collective once on tensors of its size."""
    size = each.group.size()
    share = -(-each.bytes // (4 * size))
    whole = torch.ones(share * size, device=device)
    part = torch.ones(share, device=device)
    runs: dict[CollectiveOperation, Callable[[], object]] = {
        "all_reduce": lambda: distributed.all_reduce(whole, group=each.group),
        "all_gather": lambda: distributed.all_gather_into_tensor(whole, part, group=each.group),
        "reduce_scatter": lambda: distributed.reduce_scatter_tensor(part, whole, group=each.group),
        "all_to_all": lambda: distributed.all_to_all_single(
            torch.empty_like(whole), whole, group=each.group
        ),
        "send": lambda: [
            work.wait() for work in send_and_receive(whole, torch.empty_like(whole), each.group)
        ],
    }

    def run() -> None:
        runs[each.operation]()

    return run


def _wall_seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds until the device has finished the function's work."""
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started

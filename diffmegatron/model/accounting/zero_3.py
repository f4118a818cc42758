"""Simulation of the weights that ZeRO 3 gathers and releases during a microbatch.

The simulation follows ``PartitionedParameterCoordinator`` of DeepSpeed 0.19.8 with the defaults of
runtime/zero/config.py. In the first microbatch of a run, DeepSpeed gathers more than simulated.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import EMBEDDING, OUTPUT, layer_tensors, outer_tensors
from diffmegatron.errors import UserError

# DeepSpeed's stage3_max_live_parameters: prefetching stops at this number of gathered elements.
# Also stage3_max_reuse_distance: a module's weights stay in memory after a call if fewer elements
# than this are used before the module's next call.
MOST_ELEMENTS = 1_000_000_000
# Largest number of layers that can be simulated in a short time.
MOST_LAYERS = 10_000
# DeepSpeed's stage3_prefetch_bucket_size, in elements.
PREFETCHED = 50_000_000
# DeepSpeed's stage3_param_persistence_threshold. Tensors of at most this many elements are gathered
# once per step, not in every microbatch, so they are not simulated.
PERSISTENT = 100_000
# Modules of a layer in the order of their forward calls. Modules without large weights are listed
# too, because every call prefetches weights of later modules.
_LAYER = (
    "", "input_layernorm", "self_attention", "self_attention.linear_qkv",
    "self_attention.core_attention", "self_attention.linear_proj", "pre_mlp_layernorm", "mlp",
    "mlp.linear_fc1", "mlp.linear_fc2",
)  # fmt: skip
# Numbers of calls of modules without large weights: before the embedding (_BEFORE), and between the
# embedding and the first layer (_AFTER).
_BEFORE, _AFTER = 3, 2


@dataclass(frozen=True)
class Gathers:
    """Numbers of weight elements that a tensor-parallel rank gathers from the ZeRO 3 partitions.

    ``whole`` has the numbers of gathered elements that are in memory during the backward pass of
    the output layer (key "loss"), of the last layer's first MLP projection ("layer") and of the
    embedding ("embedding").
    """

    per_microbatch: int
    whole: Mapping[str, int]


def count_gathers(recipe: Recipe) -> Gathers:
    """Count the weight elements that ZeRO 3 gathers in a microbatch."""
    if recipe.model.num_layers > MOST_LAYERS:
        raise UserError(
            f"model.num_layers is {recipe.model.num_layers:,}; the memory of ZeRO 3 is estimated "
            f"for {MOST_LAYERS:,} layers at most, so give fewer layers or another zero_stage"
        )
    modules, forward, backward = _calls(recipe)
    whole, gathered = _follow(modules, (*forward, *backward))
    whole_in_backward = whole[len(forward) :]
    # Find the first backward call of fc1, which is in the last layer. Only backward calls have fc2
    # directly before fc1; recomputed forward calls have the opposite order.
    fc1, fc2 = forward[-4:-2]
    in_layer = list(pairwise(backward)).index((fc2, fc1)) + 1
    places = {"loss": 0, "layer": in_layer, "embedding": -1 - _BEFORE}
    return Gathers(gathered, {name: whole_in_backward[i] for name, i in places.items()})


def _calls(recipe: Recipe) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return (weight elements of each module, modules in forward order, in backward order).

    The second and third tuple contain module indices, one per call. The backward order includes
    recomputed forward calls. Module 0 represents all small modules outside the layers.
    """
    model, size = recipe.model, recipe.parallel.tensor
    outer = {each.name: each.elements(size) for each in outer_tensors(model)}
    modules = [0, outer[EMBEDDING], *([] if model.tied_embeddings else [outer[OUTPUT]])]
    embedding, output = 1, len(modules) - 1
    layers: list[Sequence[int]] = [()] * model.num_layers
    for kind, ranges in model.attention.by_kind(model.num_layers):
        elements = dict.fromkeys(_LAYER, 0)
        for tensor in layer_tensors(model, kind):
            if tensor.elements(size) > PERSISTENT:
                module = tensor.name.rpartition(".")[0]
                elements[module if module in _LAYER else "self_attention"] += tensor.elements(size)
        for layer in (layer for some in ranges for layer in some):
            layers[layer] = range(len(modules), len(modules) + len(_LAYER))
            modules += elements.values()
    before, after = [0] * _BEFORE, [0] * _AFTER
    in_layers = [module for layer in layers for module in layer]
    forward = (*before, embedding, *after, *in_layers, 0, output)
    backward = (output, 0, *_layers_backward(recipe, layers), *after, embedding, *before)
    return tuple(modules), forward, backward


def _layers_backward(recipe: Recipe, layers: Sequence[Sequence[int]]) -> Iterator[int]:
    """Yield the module index of each backward call and each recomputed forward call in order."""
    recompute, end = recipe.recompute, len(layers)
    together, recomputed = 1, 0
    if recompute.granularity == "full":
        is_uniform = recompute.method == "uniform"
        together = recompute.layers if is_uniform else 1
        recomputed = end if is_uniform else recompute.layers
    while end:
        first = (end - 1) // together * together
        group = [module for layer in layers[first:end] for module in layer]
        if end <= recomputed:
            yield from group
        yield from reversed(group)
        end = first


@lru_cache(maxsize=64)
def _follow(modules: tuple[int, ...], calls: tuple[int, ...]) -> tuple[list[int], int]:
    """Return numbers of gathered elements: (in memory during each call, total of all gathers).

    ``modules`` has the number of weight elements of each module. ``calls`` has the module index of
    each call. Before a call, DeepSpeed fetches the module's weights and prefetches the
    weights of the next calls.
    """
    before = (0, *accumulate(modules[each] for each in calls))
    next_calls = _next_calls(calls)
    queue = deque((each, call) for call, each in enumerate(calls) if modules[each])
    fetched_for = dict.fromkeys(calls, -1)
    whole: set[int] = set()
    live = gathered = 0
    live_in_calls = []
    for call, module in enumerate(calls):
        fetched = {module} - whole
        if modules[module] and fetched_for[module] < call:
            fetched_for[module] = queue.popleft()[1]
        room = MOST_ELEMENTS - live - sum(modules[each] for each in fetched)
        prefetched = 0
        while queue and prefetched < min(room, PREFETCHED):
            each, later_call = queue.popleft()
            fetched_for[each] = max(fetched_for[each], later_call)
            if each not in whole and each not in fetched:
                fetched.add(each)
                prefetched += modules[each]
        whole |= fetched
        elements = sum(modules[each] for each in fetched)
        live, gathered = live + elements, gathered + elements
        live_in_calls.append(live)
        next_call = next_calls[call]
        is_near = next_call is not None and before[next_call] - before[call + 1] < MOST_ELEMENTS
        if not is_near and fetched_for[module] <= call + 1:
            whole.remove(module)
            live -= modules[module]
    return live_in_calls, gathered


def _next_calls(calls: Sequence[int]) -> list[int | None]:
    """Return, for each call, the index of the next call of the same module, or None."""
    found: list[int | None] = []
    later: dict[int, int] = {}
    for call in range(len(calls) - 1, -1, -1):
        found.append(later.get(calls[call]))
        later[calls[call]] = call
    return found[::-1]

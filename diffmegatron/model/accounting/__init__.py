"""Parameters, FLOPs and memory of a recipe by arithmetic alone: no torch, no process, no GPU.

Parameters are those of the network as built. FLOPs are the model's, for both twins the least that
their mathematics needs; recomputation is not counted. Of memory, weights, gradients and optimizer
state are what DeepSpeed 0.19.8 allocates; what is there for a while (activations, logits, one
layer's backward pass, the update) is an estimate, the allocator's waste left out.
"""

from diffmegatron.model.accounting.hardware import (
    ACCELERATORS,
    Accelerator,
    find_accelerator,
    model_flops_utilization,
)
from diffmegatron.model.accounting.memory import (
    REDUCE_BUCKET,
    StageMemory,
    memory_by_stage,
    rank_parameters,
)
from diffmegatron.model.accounting.parameters import (
    Flops,
    Parameters,
    count_flops,
    count_parameters,
)

__all__ = [
    "ACCELERATORS",
    "REDUCE_BUCKET",
    "Accelerator",
    "Flops",
    "Parameters",
    "StageMemory",
    "count_flops",
    "count_parameters",
    "find_accelerator",
    "memory_by_stage",
    "model_flops_utilization",
    "rank_parameters",
]

"""Parameters, FLOPs and memory of a recipe, computed without torch or a GPU.

ZeRO's padding and the overhead of the allocator are not counted. Temporary memory is an estimate.
"""

from diffmegatron.model.accounting.flops import (
    Flops,
    count_flops,
    frozen_matrices,
    mfu_metric,
    model_flops_utilization,
)
from diffmegatron.model.accounting.hardware import ACCELERATORS, Accelerator, find_accelerator
from diffmegatron.model.accounting.memory import (
    REDUCE_BUCKET,
    StageMemory,
    largest_trained,
    memory_by_stage,
    peak_memory,
    rank_parameters,
    trained_parameters,
)
from diffmegatron.model.accounting.parameters import Parameters, count_parameters, count_trained

__all__ = [
    "ACCELERATORS",
    "REDUCE_BUCKET",
    "Accelerator",
    "Flops",
    "Parameters",
    "StageMemory",
    "count_flops",
    "count_parameters",
    "count_trained",
    "find_accelerator",
    "frozen_matrices",
    "largest_trained",
    "memory_by_stage",
    "mfu_metric",
    "model_flops_utilization",
    "peak_memory",
    "rank_parameters",
    "trained_parameters",
]

"""Two ranks that have measured different backends as the fastest; each prints its choice.

``preflight`` must compare the kernels that a run chooses.
"""

import os
import sys
from pathlib import Path

from diffmegatron.config.attention_backend import attention_shape
from diffmegatron.config.load import load_recipe
from diffmegatron.config.parallel_config import ParallelConfig
from diffmegatron.measurements.cache import cache_file, write_measurements
from diffmegatron.measurements.machine import this_machine
from diffmegatron.measurements.records import Measurements
from diffmegatron.operations.device_bits import with_kernels_of_rank_0
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.training.kernel_choice import with_chosen_kernels
from tests.unit.measurements.test_cache import measurement, right


def main() -> None:
    recipe = load_recipe(sys.argv[1])
    rank = int(os.environ["RANK"])
    os.environ["DIFFMEGATRON_CACHE"] = str(Path(sys.argv[1]).parent / f"cache_{rank}")
    shape = attention_shape(recipe, recipe.model.attention.kinds[0])
    fast, slow = ("sdpa_4call", "reference") if rank == 0 else ("reference", "sdpa_4call")
    machine = this_machine()
    kernels = (measurement(right(fast, 1e-3), right(slow, 2e-3), shape=shape),)
    write_measurements(cache_file(machine), Measurements(machine=machine, kernels=kernels))
    with process_groups(ParallelConfig(), 0) as parallel_state:
        chosen = with_chosen_kernels(recipe, None, parallel_state).training.chosen_kernels
        (checked,) = with_kernels_of_rank_0([recipe], parallel_state.device)
    assert chosen is not None and checked.training.chosen_kernels == chosen
    print(f"rank {rank} has {chosen.kinds[0].attention}", flush=True)

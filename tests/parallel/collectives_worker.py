"""Two ranks that time the collectives of several layouts; rank 0 prints them as JSON."""

import json
import os
import sys

from diffmegatron.config.load import load_recipe
from diffmegatron.parallel.default_group import default_group
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.tuning.rates import measure_collectives


def main() -> None:
    path, *layouts = sys.argv[1:]
    found = {}
    with default_group():
        for layout in layouts:
            recipe = load_recipe(path, layout.split())
            with process_groups(recipe.parallel, 0) as parallel_state:
                measured = measure_collectives(recipe, parallel_state, hosts=["a", "b"])
            found[layout] = [(each.name, each.operation, each.bytes) for each in measured]
            assert all(each.ranks == 2 and each.nodes == 2 for each in measured)
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)

"""Under a launcher, ``tune`` times the collectives of a recipe with the sizes of its messages."""

import json

from diffmegatron.model.accounting.memory import trained_parameters
from tests.ranks import launch

RING, ULYSSES, GATHER = (
    f"parallel.context=2 parallel.context_communication={method}"
    for method in ("ring", "ulysses", "all_gather")
)


def test_the_collectives_of_layouts_are_timed(tiny_recipe, tmp_path):
    recipe = tiny_recipe()
    elements = sum(trained_parameters(recipe, 0))
    hidden = 4 * 64 * 4 * 64  # float32, hidden_size, sequences of a microbatch, positions
    channels, positions = 2 * 2 * 8, 4 * 32  # of keys; of this rank's half of all sequences
    keys = 4 * 2 * channels * positions
    queries = 4 * (2 * 4 * 8) * positions
    update = [["gradients", "all_reduce", 4 * elements], ["weights", "all_gather", 4 * elements]]
    expected = {
        "parallel.tensor=2": [["tensor", "all_reduce", hidden]],
        "parallel.tensor=2 parallel.sequence_parallel=true": [
            ["tensor", "all_gather", hidden],
            ["tensor", "reduce_scatter", hidden],
        ],
        "parallel.tensor=1": update,
        "parallel.zero_stage=3": [["gradients", "reduce_scatter", 4 * elements], update[1]],
        RING: [["context", "send", keys], *update],
        ULYSSES: [["context", "all_to_all", queries + keys], *update],
        GATHER: [["context", "all_gather", 2 * keys], *update],
    }
    output = launch(
        2, "tests.parallel.collectives_worker", [str(tmp_path / "tiny.yaml"), *expected]
    )
    assert json.loads(output.splitlines()[-1]) == expected

"""What building a network refuses before any step."""

import pytest

from diffmegatron.errors import UserError
from diffmegatron.model.build import build_model, needed_features
from diffmegatron.parallel.parallel_state import process_groups


@pytest.mark.parametrize(
    ("overrides", "needs"),
    [
        ([], set()),
        (["data.reset_attention_mask=true", "data.reset_position_ids=true"], {"documents"}),
        (["parallel.context=2", "parallel.context_communication=ring"], {"chunks"}),
        (
            [
                "parallel.context=2",
                "parallel.context_communication=ring",
                "data.reset_attention_mask=true",
                "data.reset_position_ids=true",
            ],
            {"documents", "offsets", "chunks", "masked chunks"},
        ),
        (["parallel.context=2", "parallel.context_communication=all_gather"], set()),
        (
            [
                "parallel.context=2",
                "parallel.context_communication=all_gather",
                "data.reset_attention_mask=true",
                "data.reset_position_ids=true",
            ],
            {"documents", "offsets"},
        ),
        (["parallel.context=2", "parallel.context_communication=ulysses"], set()),
    ],
)
def test_a_layout_says_what_it_asks_of_the_kernel(tiny_recipe, overrides, needs):
    assert needed_features(tiny_recipe(*overrides)) == needs


def test_a_kernel_that_a_ring_cannot_use_is_refused_before_the_first_step(tiny_recipe):
    recipe = tiny_recipe(
        "parallel.context=2",
        "parallel.context_communication=ring",
        "data.reset_attention_mask=true",
        "data.reset_position_ids=true",
        "training.attention_backend=sdpa_4call",
    )
    with (
        process_groups(tiny_recipe().parallel, seed=1) as parallel_state,
        pytest.raises(UserError, match="'sdpa_4call' cannot run: it cannot attend chunk by chunk"),
    ):
        build_model(recipe, parallel_state)

"""Shapes of a recipe's kernel calls on one rank, which measurements are looked up by."""

from collections.abc import Callable

import pytest

from diffmegatron.config.attention_backend import attention_shape, subtraction_shape
from diffmegatron.config.schema import Recipe

V1 = {"signal_heads": 4, "noise_heads": 4, "kv_heads": 2, "head_dim": 8, "has_norm": True}
CALL = {"batch": 4, "length": 64, "keys": 64, "dtype": "float32", "features": ()}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), V1 | CALL),
        (("parallel.tensor=2",), {"signal_heads": 2, "noise_heads": 2, "kv_heads": 1}),
        (("model.attention.headwise_norm=false",), {"has_norm": False}),
        (("training.precision=bf16", "training.micro_batch_size=2"), {"dtype": "bfloat16"}),
        (("training.deterministic=true",), {"is_deterministic": True}),
        (
            ("data.reset_attention_mask=true",),
            {"batch": 1, "length": 256, "keys": 256, "features": ("documents",)},
        ),
        (
            ("parallel.context=2", "parallel.context_communication=ring"),
            {"batch": 4, "length": 16, "keys": 16, "features": ("chunks",)},
        ),
        (
            ("parallel.context=2", "parallel.context_communication=all_gather"),
            {"batch": 4, "length": 16, "keys": 64, "features": ()},
        ),
        (
            ("parallel.context=2", "parallel.context_communication=ulysses"),
            {"batch": 4, "length": 64, "signal_heads": 2, "kv_heads": 1},
        ),
    ],
    ids=str,
)
def test_the_shape_of_attention_on_one_rank(
    overrides: tuple[str, ...], expected: dict, tiny_recipe: Callable[..., Recipe]
):
    recipe = tiny_recipe(*overrides)
    shape = attention_shape(recipe, recipe.model.attention.kinds[0])
    assert {name: getattr(shape, name) for name in expected} == expected


def test_diff_v2_attends_with_all_heads_and_subtracts(tiny_recipe):
    recipe = tiny_recipe(
        "model.attention={kind: diff_v2, num_heads: 8, num_kv_heads: 2, signal_per_noise: 2}",
        "model.attention.head_dim=8",
        "parallel.tensor=2",
    )
    (kind,) = recipe.model.attention.kinds
    attention, subtraction = attention_shape(recipe, kind), subtraction_shape(recipe, kind)
    assert (attention.operation, attention.signal_heads, attention.noise_heads) == ("softmax", 6, 0)
    assert (subtraction.signal_heads, subtraction.noise_heads) == (4, 2)
    first = tiny_recipe()
    assert subtraction_shape(first, first.model.attention.kinds[0]) is None

"""Shapes of a recipe's kernel calls on one rank, which measurements are looked up by."""

from collections.abc import Callable

import pytest

from diffmegatron.config.attention_backend import (
    attention_shape,
    loss_shape,
    planned_backend,
    subtraction_shape,
)
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.measurements.records import KernelShape

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
        (("model.attention.window=64",), {"window": None, "features": ()}),
        (("model.attention.window=63",), {"window": 63, "features": ("windows",)}),
        (
            (
                "model.attention.window=9",
                "parallel.context=2",
                "parallel.context_communication=ring",
            ),
            {"batch": 4, "features": ("chunks", "masked chunks", "offsets", "windows")},
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


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), (4 * 64, 320)),
        (("parallel.tensor=2", "training.loss_chunk=30"), (4 * 22, 160)),
        (("parallel.context=2", "training.loss_chunk=30"), (4 * 16, 320)),
        (
            ("parallel.tensor=2", "parallel.sequence_parallel=true", "training.loss_chunk=20"),
            (4 * 2 * 8, 160),
        ),
    ],
    ids=str,
)
def test_the_loss_has_the_tokens_of_its_largest_chunk(overrides, expected, tiny_recipe):
    shape = loss_shape(tiny_recipe(*overrides))
    assert (shape.length, shape.head_dim) == expected


def test_a_backend_without_windows_is_refused(tiny_recipe):
    recipe = tiny_recipe("model.attention.window=63", "training.attention_backend=sdpa_4call")
    with pytest.raises(UserError, match=r"sdpa_4call.* cannot limit queries to a window of keys"):
        planned_backend(recipe, recipe.model.attention.kinds[0])


@pytest.mark.parametrize("window", [None, 1, 3, 6, 11, 12])
@pytest.mark.parametrize("features", [(), ("chunks",)])
def test_visible_pairs_are_counted(window, features):
    sizes = {"length": 5, "keys": 5 if features else 12}
    shape = KernelShape(
        operation="softmax", dtype="float32", batch=3, head_dim=8, window=window, features=features,
        **sizes,
    )  # fmt: skip
    queries = range(10) if features else range(7, 12)
    assert shape.visible_pairs == 3 * sum(min(each + 1, window or 12) for each in queries)


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

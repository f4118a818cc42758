"""The kernels that ``auto`` chooses: measured, in order, or those of the checkpoint."""

import pytest

from diffmegatron.attention.costs import costs_of
from diffmegatron.config.attention_backend import (
    attention_shape,
    chosen_loss,
    layer_backend,
    loss_shape,
    planned_backend,
    subtraction_shape,
)
from diffmegatron.config.kernel_choice import Surroundings, choose_kernels
from diffmegatron.errors import UserError
from diffmegatron.measurements.records import Measurements
from tests.unit.measurements.test_cache import MACHINE, measurement, right

NOTHING: frozenset[str] = frozenset()
TRITON = frozenset({"triton"})
V2 = "model.attention={kind: diff_v2, num_heads: 4, num_kv_heads: 2, head_dim: 16}"


def measured(recipe, *tried) -> Measurements:
    """Return measurements of the attention of a recipe's first kind."""
    shape = attention_shape(recipe, recipe.model.attention.kinds[0])
    return Measurements(machine=MACHINE, kernels=(measurement(*tried, shape=shape),))


def wrong(name: str):
    return right(name, 1e-6).model_copy(
        update={"problem": "the gradient of k2 has 9 times the allowed error"}
    )


def with_kernels(recipe, here: Surroundings):
    """Return the recipe as a run resolves it."""
    training = recipe.training.model_copy(
        update={"chosen_kernels": choose_kernels(recipe, here).kernels}
    )
    return recipe.model_copy(update={"training": training})


def test_the_fastest_right_backend_is_chosen_and_its_origin_recorded(tiny_recipe):
    recipe = tiny_recipe()
    found = measured(recipe, wrong("reference"), right("sdpa_4call", 1e-3), right("blocked", 2e-3))
    here = Surroundings("cpu", NOTHING, found)
    kernels, lines = choose_kernels(recipe, here)
    assert kernels.device == "cpu" and kernels.kinds[0].attention == "sdpa_4call"
    origin = "fastest of 2 right backends, measured 2026-11-28T17:00:00Z on a CPU, key "
    assert kernels.kinds[0].origin == f"{origin}{MACHINE.digest}"
    assert lines == (f"attention of diff_v1: sdpa_4call ({origin}{MACHINE.digest})",)
    resolved = with_kernels(recipe, here)
    (kind,) = resolved.model.attention.kinds
    assert layer_backend(resolved, kind, "cpu", NOTHING)[0] == "sdpa_4call"
    assert layer_backend(resolved, kind, "cuda", NOTHING) == layer_backend(
        recipe, kind, "cuda", NOTHING
    )


@pytest.mark.parametrize("change", ["training.micro_batch_size=2", "training.seq_length=32"])
def test_another_shape_follows_the_order_and_names_the_command(change, tiny_recipe):
    found = measured(tiny_recipe(change), right("sdpa_4call", 1e-3))
    for here in (Surroundings("cpu", NOTHING), Surroundings("cpu", NOTHING, found)):
        kernels, lines = choose_kernels(tiny_recipe(), here)
        assert kernels.kinds[0].attention == "blocked"
        assert lines == (
            "attention of diff_v1: blocked (auto's order, without a measurement of this shape on "
            "this machine; 'diffmegatron tune CONFIG' makes one)",
        )


def test_a_backend_that_was_wrong_for_another_shape_is_passed_over(tiny_recipe):
    recipe = tiny_recipe()
    longer = tiny_recipe("training.seq_length=128")
    found = measured(longer, wrong("sdpa"), wrong("blocked"))
    with pytest.raises(UserError, match="not blocked: is wrong on this machine"):
        choose_kernels(recipe, Surroundings("cpu", NOTHING, found))
    in_bf16 = tiny_recipe("training.precision=bf16")
    assert choose_kernels(in_bf16, Surroundings("cpu", NOTHING, found)).kernels is not None


def test_a_backend_of_another_gpu_generation_is_not_kept(tiny_recipe):
    recipe = tiny_recipe("training.precision=bf16", "training.attention_backend=auto")
    libraries = frozenset({"flash_attn_4", "triton"})
    found = measured(recipe, right("flash4_2call", 1e-3), right("sdpa_4call", 2e-3))
    hopper = Surroundings("cuda", libraries, found, chip=9)
    saved = with_kernels(recipe, hopper)
    assert saved.training.chosen_kernels.kinds[0].attention == "flash4_2call"
    kernels, (line,) = choose_kernels(recipe, Surroundings("cuda", libraries, None, saved, chip=8))
    assert kernels.kinds[0].attention == "sdpa_4call"
    assert "flash4_2call needs compute capability 9.x or 10.x, got 8.x" in line


def test_a_named_backend_is_not_replaced(tiny_recipe):
    recipe = tiny_recipe("training.attention_backend=reference")
    found = measured(recipe, right("sdpa_4call", 1e-3))
    assert choose_kernels(recipe, Surroundings("cpu", NOTHING, found)) == (None, ())


def test_the_subtraction_is_chosen_with_its_attention(tiny_recipe):
    recipe = tiny_recipe(V2)
    (kind,) = recipe.model.attention.kinds
    shape = subtraction_shape(recipe, kind)
    assert shape is not None
    attention = measured(recipe, right("sdpa", 1e-3))
    for tried, expected in (
        ((right("triton", 1e-5), right("pytorch", 1e-4)), "triton"),
        ((wrong("triton"), right("pytorch", 1e-4)), "pytorch"),
    ):
        both = attention.updated(
            Measurements(machine=MACHINE, kernels=(measurement(*tried, shape=shape),))
        )
        kernels, _ = choose_kernels(recipe, Surroundings("cpu", NOTHING, both))
        assert kernels.kinds[0].subtraction == expected
    kernels, _ = choose_kernels(recipe, Surroundings("cpu", NOTHING, attention))
    assert kernels.kinds[0].subtraction == "auto"


def test_the_loss_has_the_fastest_right_kernel_and_keeps_it(tiny_recipe):
    recipe = tiny_recipe("training.precision=bf16")
    other = tiny_recipe("training.precision=bf16", "training.loss_chunk=16")
    assert loss_shape(other).length < loss_shape(recipe).length
    cuda = Surroundings("cuda", frozenset({"triton"}))
    assert choose_kernels(recipe, cuda).kernels.loss == "auto"
    for tried, here, elsewhere in (
        ((right("triton", 2e-3), right("megatron", 1e-3)), "megatron", "auto"),
        ((wrong("triton"), right("megatron", 1e-3)), "megatron", "megatron"),
        ((right("triton", 1e-3), right("megatron", 2e-3)), "triton", "auto"),
    ):
        kernel = measurement(*tried, shape=loss_shape(recipe))
        measures = cuda._replace(measured=Measurements(machine=MACHINE, kernels=(kernel,)))
        saved = with_kernels(recipe, measures)
        assert chosen_loss(saved, "cuda", TRITON) == here
        assert chosen_loss(saved, "cpu", TRITON) == "auto"
        assert choose_kernels(other, measures).kernels.loss == elsewhere
        assert choose_kernels(recipe, cuda._replace(saved=saved)).kernels.loss == here
    named = saved.training.model_copy(update={"attention_backend": "sdpa"})
    assert chosen_loss(saved.model_copy(update={"training": named}), "cuda", TRITON) == "auto"


def test_a_recorded_loss_kernel_that_cannot_run_is_replaced_and_named(tiny_recipe):
    recipe = tiny_recipe("training.precision=bf16")
    here = Surroundings("cuda", TRITON)
    kernels = choose_kernels(recipe, here).kernels.model_copy(update={"loss": "triton"})
    training = recipe.training.model_copy(update={"chosen_kernels": kernels})
    saved = recipe.model_copy(update={"training": training})
    assert chosen_loss(saved, "cuda", NOTHING) == "auto"
    for resumed in ({"saved": saved}, {}):
        without = Surroundings("cuda", NOTHING, **resumed)
        found, lines = choose_kernels(recipe if resumed else saved, without)
        assert found.loss == "megatron"
        assert (
            "training.chosen_kernels.loss 'triton' needs the library triton, which is not "
            "installed or not usable (a warning then says why), so the loss is computed by "
            "'megatron', and the last bits of the next losses differ"
        ) in lines


def test_a_resumed_run_keeps_its_kernels_or_says_what_changed(tiny_recipe):
    recipe = tiny_recipe()
    first = Surroundings("cpu", NOTHING, measured(recipe, right("sdpa_4call", 1e-3)))
    saved = with_kernels(recipe, first)
    faster = measured(recipe, right("sdpa_4call", 1e-3), right("blocked", 1e-4))
    again = choose_kernels(recipe, Surroundings("cpu", NOTHING, faster, saved))
    assert again == (saved.training.chosen_kernels, ())
    assert choose_kernels(recipe, Surroundings("cpu", NOTHING, None, saved)) == again

    named = tiny_recipe("training.attention_backend=reference")
    kernels, (line,) = choose_kernels(named, Surroundings("cpu", NOTHING, faster, saved))
    assert kernels is None
    assert line == (
        "attention of diff_v1: reference instead of sdpa_4call (named by the recipe), so the last "
        "bits of the next losses differ"
    )


def test_a_checkpoint_without_a_record_keeps_the_order(tiny_recipe):
    recipe = tiny_recipe()
    faster = measured(recipe, right("sdpa_4call", 1e-4))
    kernels, lines = choose_kernels(recipe, Surroundings("cpu", NOTHING, faster, recipe))
    assert kernels.kinds[0].attention == "blocked" and lines == ()


def test_a_lost_library_is_named_when_the_kernels_change(tiny_recipe):
    recipe = tiny_recipe("training.precision=bf16", "model.attention.head_dim=64")
    both = frozenset({"triton", "flash_attn"})
    saved = with_kernels(recipe, Surroundings("cuda", both))
    assert saved.training.chosen_kernels.kinds[0].attention == "flash_4call"
    kernels, (line,) = choose_kernels(
        recipe, Surroundings("cuda", frozenset({"triton"}), None, saved)
    )
    assert kernels.kinds[0].attention == "sdpa_4call"
    assert "sdpa_4call instead of flash_4call (flash_4call needs the library flash_attn" in line


def test_recorded_kernels_of_other_kinds_are_chosen_again(tiny_recipe):
    here = Surroundings("cpu", NOTHING)
    of_v2 = with_kernels(tiny_recipe(V2), here).training
    changed = tiny_recipe().model_copy(update={"training": of_v2})
    assert choose_kernels(changed, here) == choose_kernels(tiny_recipe(), here)
    with pytest.raises(UserError, match="chosen_kernels in the checkpoint"):
        choose_kernels(tiny_recipe(), here._replace(saved=changed))


def test_a_measured_configuration_is_chosen_recorded_and_planned(tiny_recipe):
    recipe = tiny_recipe("training.precision=bf16", "model.attention.head_dim=128")
    fast = "triton:one_pass+forward=64x64x4x3"
    found = measured(recipe, right("triton", 2e-3), right(fast, 1e-3), wrong("triton:split"))
    here = Surroundings("cuda", frozenset({"triton"}), found, chip=9)
    saved = with_kernels(recipe, here)
    (kept,) = saved.training.chosen_kernels.kinds
    assert kept.attention == fast and kept.origin.startswith("fastest of 2 right backends")
    (kind,) = saved.model.attention.kinds
    assert layer_backend(saved, kind, "cuda", here.libraries, 9) == (fast, kept.origin)
    again = choose_kernels(recipe, here._replace(measured=None, saved=saved))
    assert again == (saved.training.chosen_kernels, ())
    assert planned_backend(saved, kind) == fast
    forward, backward = costs_of(kind).work(planned_backend(saved, kind))
    assert backward / forward == 10 / 6

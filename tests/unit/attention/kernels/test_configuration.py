"""Configurations of the Triton kernels: their names, and those that ``tune`` tries."""

import itertools
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from diffmegatron.attention.kernels.configuration import BlockSizes, Configuration
from diffmegatron.attention.kernels.costs import Sizes
from diffmegatron.attention.kernels.registry import (
    Call,
    choose_backend,
    find_backend,
    subtraction_backend,
    why_not,
)
from diffmegatron.attention.kernels.triton import block_sizes
from diffmegatron.attention.kernels.triton.block_sizes import ChipClass, other_configurations
from diffmegatron.config.attention_backend import planned_backend
from diffmegatron.errors import UserError

TRITON = frozenset({"triton"})


@pytest.mark.parametrize(
    ("text", "configuration"),
    [
        ("split", Configuration(one_pass=False)),
        ("split+dq=64x32x4x3", Configuration(one_pass=False, dq=(64, 32, 4, 3))),
        ("one_pass+dkdv=64x32x4x3", Configuration(one_pass=True, dkdv=(64, 32, 4, 3))),
        (
            "forward=16x128x16x1+dkdv=32x64x8x2",
            Configuration(forward=(16, 128, 16, 1), dkdv=(32, 64, 8, 2)),
        ),
    ],
)
def test_a_name_has_the_configuration(text, configuration):
    assert Configuration.parse(text) == configuration and str(configuration) == text
    backend = find_backend("differential", f"triton:{text}")
    assert backend is not None and backend.configuration == configuration
    assert subtraction_backend(f"triton:{text}") == "triton"
    default = BlockSizes(128, 64, 8, 3, licm=False)
    for kernel in ("forward", "dkdv", "dq"):
        sizes = getattr(configuration, kernel) or default[:4]
        assert configuration.blocks(kernel, default) == BlockSizes(*sizes, licm=False)


@pytest.mark.parametrize(
    "name",
    [
        *("triton:", "triton:fast", "triton:split+split", "triton:split+one_pass"),
        *("triton:dq=64x32x4", "triton:dq=48x32x4x3", "triton:dq=8x32x4x3", "triton:dq=64x32x4x0"),
        *("triton:dq=64x32x4x3+forward=64x32x4x3", "triton:dq=64x32x4x3+split", "sdpa:split"),
        "triton:one_pass+dq=64x32x4x3",
        *("reference:split", ":split", "triton:split:split", "triton:forward=64x64x32x1"),
    ],
)
def test_other_names_are_unknown(name):
    for operation in ("differential", "softmax", "subtraction"):
        assert find_backend(operation, name) is None
    with pytest.raises(ValueError, match="is unknown; choose auto or reference, "):
        choose_backend(name, Call("softmax", "cuda", "bfloat16", 64), TRITON)


def test_a_recipe_may_name_a_configuration(tiny_recipe):
    name = "triton:split+dq=64x32x4x2"
    recipe = tiny_recipe(f"training.attention_backend={name}", "model.attention.head_dim=64")
    (kind,) = recipe.model.attention.kinds
    assert planned_backend(recipe, kind) == name
    with pytest.raises(UserError, match=r"triton:fast.* should be 'auto' or one of reference, "):
        tiny_recipe("training.attention_backend=triton:fast")
    for name, is_refused in (("triton:split", False), ("triton", False), ("triton:one_pass", True)):
        given = f"training.attention_backend={name}"
        assert tiny_recipe(given).training.attention_backend == name
        with pytest.raises(UserError, match="order") if is_refused else nullcontext():
            tiny_recipe(given, "training.deterministic=true")


@pytest.mark.parametrize("target", ChipClass)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_tune_tries_smaller_blocks_and_the_other_form(width, dtype, target):
    q = torch.empty(1, 1, 1, width, dtype=dtype)
    for grouped, deterministic in itertools.product((False, True), repeat=2):
        with mock.patch.object(block_sizes, "target_for", lambda _: target):
            found = other_configurations(q, grouped=grouped, deterministic=deterministic)
        assert all(Configuration.parse(str(each)) == each for each in found)
        assert len({*found}) == len(found) >= 2
        forms = [each.one_pass for each in found if each.one_pass is not None]
        assert forms == ([] if deterministic else [width > 64])
        kernels = [name for each in found for name in each._fields[1:] if getattr(each, name)]
        assert kernels[0] == "forward" and len(kernels) == len(found) - len(forms)
        assert ("dq" in kernels) == (width > 64 or deterministic)


def test_a_configuration_has_the_limits_and_the_work_of_its_form():
    call = Call("differential", "cuda", "float32", 256)
    assert why_not("triton:split", call, TRITON) == why_not("triton", call, TRITON)
    for deterministic, backward in ((False, 10), (True, 14)):
        sizes = Sizes(2, 128, 1, 1, 1, 1.0, is_deterministic=deterministic)
        backend = find_backend("differential", "triton:one_pass")
        assert backend is not None and backend.work(sizes) == (6 * 128, backward * 128)

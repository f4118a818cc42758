"""The deterministic switch: on inside, as it was outside, and seen by the kernels."""

import os
from types import SimpleNamespace

import pytest
import torch

from diffmegatron.attention.kernels.masks import build_mask
from diffmegatron.attention.kernels.triton.kernel_launch import problem_of
from diffmegatron.attention.kernels.wrappers.flash import plain_attention
from diffmegatron.parallel.deterministic import deterministic_algorithms

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def setting() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
def test_the_setting_is_as_before_afterwards(before):
    on, warn_only = before
    torch.use_deterministic_algorithms(on, warn_only=warn_only)
    try:
        with pytest.raises(KeyError), deterministic_algorithms():
            assert setting() == (True, False)
            raise KeyError
        assert setting() == before
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("said", [None, ":16:8"])
@pytest.mark.parametrize("gpu", [False, True])
def test_a_gpu_gets_a_workspace_that_the_environment_may_choose(gpu, said, monkeypatch):
    monkeypatch.delenv(WORKSPACE, raising=False)
    if said is not None:
        monkeypatch.setenv(WORKSPACE, said)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with deterministic_algorithms():
        assert os.environ.get(WORKSPACE) == (said or (":4096:8" if gpu else None))
    assert os.environ.get(WORKSPACE) == said


def plain_mask():
    return build_mask(8, 8, causal=True, cu_seqlens=None, query_offset=None, key_offset=0)


@pytest.mark.parametrize(("width", "default"), [(64, True), (128, False)])
def test_triton_adds_nothing_up_atomically(width, default):
    queries = torch.empty(1, 8, 2, width)

    def one_pass() -> bool:
        return problem_of(queries, 1.0, plain_mask(), one_pass=None, target=None).one_pass

    assert one_pass() is default
    with deterministic_algorithms():
        assert one_pass() is False


def test_the_flash_libraries_are_told():
    told: list[bool] = []

    def flash_attn_func(q, k, v, *, deterministic, **_):
        told.append(deterministic)
        return q

    def attend() -> None:
        x = torch.empty(1, 8, 2, 64)
        plain_attention(SimpleNamespace(flash_attn_func=flash_attn_func), 1.0, plain_mask())(
            x, x, x
        )

    attend()
    with deterministic_algorithms():
        attend()
    assert told == [False, True]

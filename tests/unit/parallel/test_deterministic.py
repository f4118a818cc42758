"""``deterministic_algorithms``: the settings inside and after the context, and their effects."""

import os
from types import SimpleNamespace

import pytest
import torch

from diffmegatron.attention.kernels.call import AttentionCall
from diffmegatron.attention.kernels.configuration import Configuration
from diffmegatron.attention.kernels.maps import QKV
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


def call_of(width: int) -> AttentionCall:
    x = torch.empty(1, 8, 2, width)
    return AttentionCall.checked(QKV((x,), (x,), x))


@pytest.mark.parametrize(("width", "default"), [(64, True), (128, False)])
def test_triton_is_never_one_pass_when_deterministic(width, default):
    def one_pass() -> bool:
        return problem_of(call_of(width), Configuration()).one_pass

    def configured() -> bool:
        return problem_of(call_of(width), Configuration(one_pass=True)).one_pass

    assert one_pass() is default and configured()
    with deterministic_algorithms():
        assert one_pass() is False and configured() is False


def test_the_deterministic_setting_is_passed_to_flash_libraries():
    told: list[bool] = []

    def flash_attn_func(q, k, v, *, deterministic, **_):
        told.append(deterministic)
        return q

    def attend() -> None:
        call = call_of(64)
        library = SimpleNamespace(flash_attn_func=flash_attn_func)
        plain_attention(library, call)(*call.maps.arguments())

    attend()
    with deterministic_algorithms():
        attend()
    assert told == [False, True]

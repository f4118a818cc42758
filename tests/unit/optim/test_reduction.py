"""Order in which the sums of gradients over ranks begin, in a fake process group of two ranks."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from diffmegatron.errors import UserError
from diffmegatron.optim.flat_gradients import FlatGroup
from diffmegatron.optim.reduction import GradientReduction

SIZE = 4


class Chain(torch.nn.Module):
    """Three layers in a row and an unused layer; the third layer can run several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last, self.unused = (
            torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.second(self.first(x))
        for _ in range(times):
            # Use reentrant checkpoints, as Megatron-core does. Each of them adds to the gradient
            # separately.
            x = checkpoint(self.last, x, use_reentrant=True)
        return x.sum()


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    distributed.destroy_process_group()


class Training:
    """A chain whose gradients are averaged over the ranks, and the events of a training step.

    These are the events:

    - "first": the first layer's weight has received a gradient.
    - "sum 1", "sum 2", "sum 3", "sum u": the all-reduce of a layer begins; "u" is the unused layer.
    - "step": all backward passes have ended.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, unused: bool = False) -> None:
        torch.manual_seed(0)
        self.chain, self.events = Chain(), []
        self.parameters = list(self.chain.parameters())[: 4 if unused else 3]
        groups = []
        for parameter in self.parameters:
            groups.append(FlatGroup(torch.zeros(parameter.numel()), [parameter]))
            parameter.grad = next(gradient for _, gradient in groups[-1].gradients())
        gradients = mock.Mock(groups=groups)
        self.reduction = GradientReduction(gradients, self.chain, distributed.group.WORLD, 1)
        flats = {group.flat.data_ptr(): name for group, name in zip(groups, "123u", strict=False)}
        all_reduce = distributed.all_reduce

        def recording(tensor: Tensor, **kwargs: object) -> object:
            self.events.append("sum " + flats[tensor.data_ptr()])
            return all_reduce(tensor, **kwargs)

        monkeypatch.setattr(distributed, "all_reduce", recording)
        self.chain.first.weight.register_post_accumulate_grad_hook(
            lambda _: self.events.append("first")
        )

    def step(self, *, times: int = 1, microbatches: int = 1, overlapping: bool = True) -> list[str]:
        self.events.clear()
        x = torch.ones(2, SIZE)
        for _ in range(microbatches - 1):
            self.chain(x, times).backward()
        if overlapping:
            with self.reduction.overlapping():
                self.chain(x, times).backward()
        else:
            self.chain(x, times).backward()
        self.events.append("step")
        self.norms = dict(zip(*self.reduction.finish(), strict=True))
        return list(self.events)


SUMS = ["sum 3", "sum 2", "sum 1"]


def test_sums_overlap_the_backward_pass_from_the_second_step(monkeypatch):
    training = Training(monkeypatch)
    assert training.step() == ["first", *SUMS, "step"]
    # "sum 1" precedes "first", because the reduction registered its hook on the first layer's
    # weight before the test registered the hook that records "first".
    assert training.step() == ["sum 3", "sum 2", "sum 1", "first", "step"]


def test_gradients_accumulate_before_the_last_microbatch(monkeypatch):
    training = Training(monkeypatch)
    training.step()
    assert training.step(microbatches=3) == ["first", "first", *SUMS, "first", "step"]


def test_sums_begin_in_the_step_without_overlap(monkeypatch):
    training = Training(monkeypatch)
    assert training.step(overlapping=False) == ["first", "step", *SUMS]


def test_a_gradient_that_comes_in_parts_is_summed_after_the_last(monkeypatch):
    training = Training(monkeypatch)
    training.step(times=3)
    for parameter in training.parameters:
        parameter.grad.zero_()
    assert training.step(times=3) == [*SUMS, "first", "step"]
    chain = Chain()
    chain.load_state_dict(training.chain.state_dict())
    chain(torch.ones(2, SIZE), 3).backward()
    alone = {name: parameter.grad for name, parameter in chain.named_parameters()}
    for name, parameter in training.chain.named_parameters():
        if parameter in training.norms:
            # The fake group sums nothing, so the mean over two ranks is half the rank's gradient.
            torch.testing.assert_close(parameter.grad, alone[name] / 2, rtol=0, atol=0)
            torch.testing.assert_close(training.norms[parameter], alone[name].norm())


def test_a_gradient_that_comes_after_its_sum_began_is_an_error(monkeypatch):
    training = Training(monkeypatch)
    training.step(times=1)
    with pytest.raises(UserError, match=r"a gradient of last\.weight arrived .*overlap_gradients"):
        training.step(times=2)


def test_a_gradient_that_comes_less_often_is_summed_at_the_end(monkeypatch):
    training = Training(monkeypatch)
    training.step(times=2)
    assert training.step(times=1) == ["first", *SUMS, "step"]
    assert training.step(times=1) == [*SUMS, "first", "step"]


def test_a_parameter_without_gradient_delays_all_sums_to_the_end(monkeypatch):
    training = Training(monkeypatch, unused=True)
    for _ in range(2):
        # The unused layer is the last layer of the network, so its sum is the first in the order.
        # It gets no gradient, so all sums begin after the backward pass.
        assert training.step() == ["first", "sum u", *SUMS, "step"]


def test_closing_the_reduction_removes_its_hooks(monkeypatch):
    training = Training(monkeypatch)
    training.reduction.close()
    assert training.step() == ["first", *SUMS, "step"]
    assert training.step() == ["first", *SUMS, "step"]

"""``tune``'s verification of the Triton kernels and of their other configurations."""

import torch

from diffmegatron.attention.kernels.configuration import Configuration
from diffmegatron.measurements.records import KernelShape
from diffmegatron.model import cross_entropy_kernel
from diffmegatron.tuning.trials import usable_backends
from diffmegatron.tuning.verification import checks_of, verify

CPU = torch.device("cpu")
GROUPED = KernelShape(
    operation="differential", dtype="float32", batch=1, length=20, keys=20, head_dim=8,
    signal_heads=2, noise_heads=1, kv_heads=1, has_norm=True,
)  # fmt: skip
LOSS = KernelShape(
    operation="loss", dtype="float32", batch=1, length=20, head_dim=30, signal_heads=1, kv_heads=1
)


def test_every_configuration_is_right_and_a_failing_one_is_named(monkeypatch):
    names = [name for name in usable_backends(GROUPED, CPU) if name.startswith("triton")]
    assert names == ["triton", "triton:split", "triton:forward=16x32x2x1"]
    checks = checks_of(GROUPED, CPU)[:1]
    assert {name: verify(name, checks).problem for name in names} == dict.fromkeys(names, "")
    blocks = Configuration.blocks

    def too_large(self, kernel, default):
        if self.forward is not None:
            raise RuntimeError("out of resource: shared memory")
        return blocks(self, kernel, default)

    monkeypatch.setattr(Configuration, "blocks", too_large)
    problems = [verify(name, checks).problem for name in names]
    assert problems == ["", "", "RuntimeError: out of resource: shared memory"]


def test_the_kernel_of_the_loss_is_verified(monkeypatch):
    assert usable_backends(LOSS, CPU) == ["triton", "megatron"]
    checks = checks_of(LOSS, CPU)
    assert verify("triton", checks).problem == ""
    statistics = cross_entropy_kernel._statistics

    def wrong_in_one_row(*arguments):
        largest, total, of_label = statistics(*arguments)
        total[7] *= 1.001
        return largest, total, of_label

    monkeypatch.setattr(cross_entropy_kernel, "_statistics", wrong_in_one_row)
    assert "times the allowed error" in verify("triton", checks).problem

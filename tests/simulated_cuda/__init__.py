"""Simulated GPUs, which run the real training step on tensors that have a device but no values.

The code of the package, of Megatron-core and of DeepSpeed runs as one rank of any number of GPUs.
It uses the device ``cuda``, bf16, Triton's launchers and NCCL's process groups. Tensors are torch's
fake tensors, so no numbers are computed, and a step of a 3B model needs only seconds on a laptop.

The simulation records every allocation with its component, every collective, every kernel launch
and every place that waits for the device. It raises an error for

- calls that a GPU or NCCL would refuse, but that torch's fake tensors accept
  (:mod:`tests.simulated_cuda.checks`),
- a step that waits for the device at a place that :mod:`tests.simulated_cuda.waits` does not list.

How to use it::

    from tests.simulated_cuda.simulate import Case, simulate

    (recording,) = simulate([Case("configs/at_scale/diff_3b_64gpus.yaml", world_size=64)])
    recording.peaks["forward_backward"].components   # bytes of weights, gradients, activations, ...
    recording.sent("data")                           # bytes this rank sends to its data group

:class:`~tests.simulated_cuda.recording.Recording` documents what is recorded. To print a recording
in a shell, run ``python -m tests.simulated_cuda RECIPE --gpus 64 [OVERRIDE ...]``.

| file | contents |
|---|---|
| ``simulate.py`` | :func:`simulate`: one process for all cases, a forked child for each |
| ``recording.py`` | cases and recordings, plain data that crosses processes |
| ``device.py``, ``device_library.cpp``, ``library.py`` | replacements of CUDA, Triton and NCCL |
| ``recorder.py`` | allocations, collectives, launches and waits of one case |
| ``checks.py``, ``waits.py`` | checks that refuse calls; places where a step may wait |
| ``step.py``, ``training.py`` | functions that a case runs: training steps, or the whole trainer |
| ``comparison.py`` | comparison of a recording with the counts of ``diffmegatron plan`` |
| ``mutations.py`` | deliberate mistakes that the simulation must refuse |
| ``recipes.py`` | command that runs every recipe of ``configs/`` at its true depth |
| ``layer_kernels.py`` | command that counts the kernels of a layer of each kind of attention |

The replacements exist only in the process that :func:`simulate` starts, so they do not affect any
other test.
"""

"""Simulated GPUs, which run the real training step on tensors with a device and no values.

The code of the package, of Megatron-core and of DeepSpeed runs as one rank of any number of GPUs:
device ``cuda``, bf16, Triton's launchers, NCCL's process groups. Tensors are torch's fake tensors,
so that a step of a 3B model takes seconds on a laptop; numbers are not computed. The simulation
records every allocation with its component, every collective, every kernel launch and every place
that waits for the device. It refuses calls that a GPU or NCCL would refuse and torch's fake tensors
accept (:mod:`tests.simulated_cuda.checks`), and a step that waits for the device at a place that
:mod:`tests.simulated_cuda.waits` does not list.

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
| ``recipes.py`` | command that runs every recipe of ``configs/`` at its true depth |
| ``layer_kernels.py`` | command that counts the kernels of a layer of each kind of attention |

The replacements end with the process that :func:`simulate` starts: no other test sees them.
"""

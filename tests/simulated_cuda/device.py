"""Replacements for ``torch.cuda``, NCCL, Triton launches and ``torch.compile``, to simulate GPUs.

With them, the training code runs on a machine without CUDA. Its ``cuda`` tensors are torch's fake
tensors, which have a shape and a device but no values.

The replacements are installed once, in a process that runs only simulations, before
``diffmegatron`` is imported. They cover the calls of diffmegatron, Megatron-core 0.16 and 0.19 and
DeepSpeed 0.19.8 with torch 2.13 that would fail without CUDA. If a new version of these libraries
calls another function of ``torch.cuda``, this call fails, and its error names the function.
"""

import collections
import contextlib
import importlib
import os
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.simulated_cuda.checks import SimulatedCudaError
from tests.simulated_cuda.recorder import Recorder

GIB = 1 << 30
DEVICES = 8
# Size of a CUDA generator's state: seed and offset, 8 bytes each.
RANDOM_STATE_BYTES = 16
PROPERTIES = types.SimpleNamespace(
    name="simulated NVIDIA H100 80GB HBM3",
    total_memory=80 * GIB,
    major=9,
    minor=0,
    multi_processor_count=132,
    gcnArchName="",
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=232448,
)

_recorder: Recorder | None = None


def record_with(recorder: Recorder | None) -> None:
    """Set the recorder that the replacements report to; with None, they do not report."""
    global _recorder
    _recorder = recorder


def install() -> None:
    """Install the replacements, with which this process seems to have eight GPUs.

    The compiled ``device_library.cpp`` must have been loaded before torch was imported.
    """
    # Import torch._dynamo before a GPU seems available. With a GPU, torch._dynamo would look for
    # functions that exist only in builds of torch with CUDA.
    importlib.import_module("torch._dynamo")
    for name, value in _torch_cuda().items():
        setattr(torch.cuda, name, value)
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    torch.cuda.memory._record_memory_history = lambda *_, **__: None
    torch.cuda.memory._dump_snapshot = lambda path, *_: Path(path).write_bytes(b"")
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, lambda *_, **__: 0)
    torch.profiler.profile = _without_device(torch.profiler.profile)
    torch.compile = _compile
    _replace_tensor()
    torch.Tensor.record_stream = lambda *_: None
    torch.UntypedStorage.data_ptr = lambda storage: _address(storage)
    _make_fake_tensors_usable()
    _replace_triton()
    _replace_process_groups()
    _add_fused_rms_norm()


def _without_device(profile: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that creates the profiler for the CPU only; profiling a GPU needs CUDA."""
    return lambda activities: profile(activities=[torch.profiler.ProfilerActivity.CPU])


class Stream:
    """A stream whose operations are complete; ``synchronize`` is recorded as a wait."""

    device = torch.device("cuda", 0)
    cuda_stream = stream_id = priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        _wait("Stream.synchronize")


class Event:
    """An event that is complete; ``synchronize`` is recorded as a wait."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0

    def synchronize(self) -> None:
        _wait("Event.synchronize")


class Generator:
    """A CUDA random generator that only keeps its state; it draws no numbers."""

    def __init__(self) -> None:
        self._state = torch.zeros(RANDOM_STATE_BYTES, dtype=torch.uint8)

    def manual_seed(self, seed: int) -> "Generator":
        self._state = torch.frombuffer(
            bytearray(int(seed).to_bytes(8, "little") + bytes(8)), dtype=torch.uint8
        )
        return self

    def get_state(self) -> Tensor:
        return self._state

    def set_state(self, state: Tensor) -> "Generator":
        if state.dtype != torch.uint8 or state.numel() != RANDOM_STATE_BYTES:
            # The message is that of at::CUDAGeneratorImpl.
            raise RuntimeError("RNG state is wrong size")
        self._state = state
        return self

    clone_state = graphsafe_get_state = get_state
    graphsafe_set_state = set_state

    def initial_seed(self) -> int:
        return int.from_bytes(bytes(self._state[:8].tolist()), "little")


def _torch_cuda() -> dict[str, Any]:
    stream = Stream()
    generators = tuple(Generator() for _ in range(DEVICES))
    current = [0]

    def set_device(device: Any) -> None:
        current[0] = torch.device(device).index if not isinstance(device, int) else device

    def generator() -> Generator:
        return generators[current[0]]

    def allocated(*_: Any) -> int:
        return _recorder.allocated() if _recorder else 0

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": lambda: current[0],
        "set_device": set_device,
        "device": lambda *_: contextlib.nullcontext(),
        "synchronize": lambda *_, **__: _wait("torch.cuda.synchronize"),
        "Stream": Stream,
        "Event": Event,
        "stream": lambda *_: contextlib.nullcontext(),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *_: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_name": lambda *_: PROPERTIES.name,
        "get_device_properties": lambda *_: PROPERTIES,
        "is_bf16_supported": lambda *_, **__: True,
        "default_generators": generators,
        "manual_seed": lambda seed: generator().manual_seed(seed) and None,
        "manual_seed_all": lambda seed: generator().manual_seed(seed) and None,
        "initial_seed": lambda: generator().initial_seed(),
        "get_rng_state": lambda *_, **__: generator().get_state().clone(),
        "set_rng_state": lambda state, *_, **__: generator().set_state(state.clone()) and None,
        "empty_cache": lambda: None,
        "_sleep": lambda _: None,
        "ipc_collect": lambda: None,
        "reset_peak_memory_stats": lambda *_: None,
        "memory_allocated": allocated,
        "max_memory_allocated": allocated,
        "memory_reserved": allocated,
        "max_memory_reserved": allocated,
        "memory_cached": allocated,
        "max_memory_cached": allocated,
        "memory_stats": lambda *_: collections.defaultdict(int),
        "mem_get_info": lambda *_: (PROPERTIES.total_memory - allocated(), PROPERTIES.total_memory),
    }


def _replace_tensor() -> None:
    """Make ``torch.tensor`` create its tensor on the host, and then move it with ``Tensor.to``.

    A fake mode is active only in the thread that entered it. In any other thread, the original
    ``torch.tensor`` would create a tensor on CUDA itself.
    """
    original = torch.tensor

    def tensor(data: Any, *, device: Any = None, **keywords: Any) -> Tensor:
        made = original(data, device="cpu", **keywords)
        return made if device is None else made.to(device)

    torch.tensor = tensor


def _wait(kind: str) -> None:
    if _recorder is not None:
        _recorder.wait(kind)


def _address(storage: torch.UntypedStorage) -> int:
    """Return a unique address of the storage that is a multiple of any alignment."""
    return storage._cdata << 36


def _make_fake_tensors_usable() -> None:
    """Make fake tensors usable in the training code outside the network, such as the optimizer.

    This code calls ``data_ptr``, ``tolist`` and ``numpy`` of tensors. Fake tensors have no address
    and no values, so the replaced methods return simulated addresses and values. This function also
    replaces ``nn.Module._apply``.
    """
    # With the default, torch initialises CUDA when a fake tensor is on device ``cuda``.
    FakeTensorMode.avoid_device_init = property(lambda _: True)
    FakeTensor.data_ptr = lambda tensor: (
        _address(tensor.untyped_storage()) + tensor.storage_offset() * tensor.element_size()
    )
    FakeTensor.tolist = lambda tensor: _read(tensor, "tolist")
    FakeTensor.numpy = _numpy
    torch.nn.Module._apply = _module_apply


def _read(tensor: Tensor, kind: str) -> Any:
    assert _recorder is not None
    return _recorder.read(tensor, kind)


def _numpy(tensor: Tensor, **_: Any) -> np.ndarray:
    """Return zeros for a host tensor; raise TypeError for a CUDA tensor, as torch does."""
    if tensor.is_cuda:
        raise TypeError("can't convert a cuda tensor to numpy")
    name = str(tensor.dtype).removeprefix("torch.")
    return np.zeros(tuple(tensor.shape), dtype=name)


def _module_apply(
    module: torch.nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> torch.nn.Module:
    """Apply a function to a module's parameters and buffers, as ``nn.Module._apply`` does.

    torch's method cannot change a fake parameter in place. This function therefore replaces a
    parameter that changes, and copies the attributes that Megatron-core has set on the parameter.
    """
    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            applied = function(parameter)
        if applied is parameter:
            continue
        replaced = torch.nn.Parameter(applied.detach(), parameter.requires_grad)
        own = set(FakeTensor.__slots__ if hasattr(FakeTensor, "__slots__") else ())
        for key, value in vars(parameter).items():
            if key not in own and key not in vars(replaced) and not key.startswith("_"):
                setattr(replaced, key, value)
        module._parameters[name] = replaced
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def _replace_triton() -> None:
    """Replace kernel launches of Triton: record a launch, but do not compile or run the kernel.

    A launch on an empty grid raises SimulatedCudaError.
    """
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        if callable(grid):
            grid = grid(named)
        if any(size < 1 for size in grid):
            raise SimulatedCudaError(f"kernel {kernel.__name__} is launched on a grid of {grid}")
        if _recorder is not None:
            tensors = [each for each in named.values() if isinstance(each, Tensor)]
            _recorder.launch(kernel.__name__, tensors)

    JITFunction.run = run


def _compile(model: Any = None, **_: Any) -> Any:
    """Replace ``torch.compile``: return a function whose calls are recorded as one kernel each.

    A module is returned unchanged, so its operations are recorded one by one.
    """
    if model is None:
        return _compile
    if not callable(model) or isinstance(model, torch.nn.Module):
        return model

    def call(*args: Any, **kwargs: Any) -> Any:
        if _recorder is None:
            return model(*args, **kwargs)
        return _recorder.fused(model.__name__, model)(*args, **kwargs)

    return call


def _replace_process_groups() -> None:
    """Replace NCCL's process groups by torch's fake groups, whose collectives change no tensor."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    start, new = distributed.init_process_group, distributed.new_group

    def init_process_group(backend: str, **keywords: Any) -> None:
        if backend != "nccl":
            raise SimulatedCudaError(f"the default group uses {backend} where there are GPUs")
        start("fake", **keywords | {"store": FakeStore()})

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **rest: Any) -> Any:
        if backend not in (None, "nccl", "cpu:gloo,cuda:nccl"):
            raise SimulatedCudaError(f"a group uses {backend} where there are GPUs")
        return new(ranks, timeout, None, **rest)

    def all_gather_object(found: list[Any], own: Any, group: Any = None) -> None:
        found[:] = [own] * len(found)

    distributed.init_process_group = init_process_group
    distributed.new_group = new_group
    # Pretend that every rank has the same objects as this one.
    distributed.all_gather_object = all_gather_object
    distributed.broadcast_object_list = lambda *_, **__: None


def join_as(rank: int, world_size: int) -> None:
    """Set the environment variables that the launcher sets for a rank, and skip the rendezvous.

    Every rank has local rank 0, because a fake tensor that is created on ``cuda`` without an index
    is on device 0.
    """
    from diffmegatron.parallel import default_group

    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    default_group.meet = lambda *_: distributed.HashStore()
    _let_deepspeed_agree()


def _let_deepspeed_agree() -> None:
    """Skip DeepSpeed's checks that all ranks have the same numbers: fake tensors have no values."""
    for name in ("parameter_offload", "partition_parameters", "stage3", "utils",
                 "partitioned_param_coordinator"):  # fmt: skip
        module = importlib.import_module(f"deepspeed.runtime.zero.{name}")
        for function in ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks"):
            if hasattr(module, function):
                setattr(module, function, lambda *_, **__: None)


class _FusedRmsNorm(torch.autograd.Function):
    """RMSNorm as CUDA's fused kernel, which the recorder counts as one launch.

    On a CPU, torch would run several small operations instead.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
    ) -> tuple[Tensor, Tensor]:
        leading = [*x.shape[: -len(shape)], *[1] * len(shape)]
        dtype = torch.promote_types(x.dtype, torch.float32)
        rstd = torch.empty(leading, dtype=dtype, device=x.device)
        ctx.save_for_backward(x, weight, rstd)
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        out = torch.empty_like(x)
        _launched("_fused_rms_norm", x, out)
        return out, rstd

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, weight, _rstd = ctx.saved_tensors
        found = torch.empty_like(x)
        _launched("_fused_rms_norm_backward", x, gradient, found)
        return found, None, None if weight is None else torch.empty_like(weight), None


def _launched(kernel: str, *tensors: Tensor) -> None:
    if _recorder is not None:
        _recorder.launch(kernel, tensors)


def _add_fused_rms_norm() -> None:
    global _library
    _library = torch.library.Library("aten", "IMPL")

    def fused(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
        return _FusedRmsNorm.apply(x, tuple(shape), weight, eps)

    _library.impl("_fused_rms_norm", fused, "AutogradCUDA")


_library: torch.library.Library | None = None

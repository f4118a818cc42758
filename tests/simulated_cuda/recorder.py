"""Recorder that counts or refuses every operation of a case."""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.simulated_cuda.checks import (
    SimulatedCudaError,
    check_collective,
    check_operation,
)
from tests.simulated_cuda.recording import (
    BEFORE_STEPS,
    COMPONENTS,
    Collective,
    Launch,
    Memory,
    Recording,
)
from tests.simulated_cuda.waits import PERMITTED, answer

aten = torch.ops.aten
# Granularity of CUDA's allocator in bytes (c10/cuda/CUDACachingAllocator.cpp).
_BLOCK = 512
# New host tensors with at most this number of elements are real (have values) and not fake:
# ends of documents, random states, batches.
_REAL_ELEMENTS = 1 << 20
_SIZED_BY_VALUES = {
    aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive, aten.unique_dim,
    aten.repeat_interleave, aten.equal,
}  # fmt: skip
_NO_KERNEL = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided,
    aten.set_, aten.resize_, aten.is_pinned, aten._local_scalar_dense, aten._unsafe_view,
    aten.lift_fresh, aten._reshape_alias, aten.detach, aten._pin_memory, aten.pin_memory,
}  # fmt: skip
NO_PLACE = "?"
_OUTPUT_LAYER = ("output_layer",)
# The module of DeepSpeed in which ZeRO 3 gathers weights.
_GATHERS = "deepspeed.runtime.zero.partition_parameters."
_NO_PLACES = ("torch.", "tests.simulated_cuda.", "deepspeed.accelerator.", "deepspeed.utils.nvtx")


@dataclass
class _Allocation:
    """Record of one storage on the device or the host."""

    bytes: int
    device: str
    is_pinned: bool
    phase: str
    module: str
    operation: str
    shape: str
    dtype: str
    component: str


class Recorder(TorchDispatchMode):
    """Dispatch mode that records operations, and refuses those that ``checks`` or ``waits`` refuse.

    Enter it inside a ``FakeTensorMode``. Small host tensors stay real (have values).
    """

    # Flex attention is a higher-order operator.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.group_names: dict[str, str] = {}
        self._alive: dict[int, _Allocation] = {}
        self._now = Counter[str]()  # bytes alive on cuda, on cpu and (part of cpu) pinned
        self._phase = ""
        self._in_step = False
        self._changes: list[tuple[int, _Allocation]] = []
        self._peaks: dict[str, Memory] = {}
        self._host_peaks = Counter[str]()
        self._collectives: Counter[tuple[Any, ...]] = Counter()
        self._collective_bytes: Counter[tuple[Any, ...]] = Counter()
        self._launches: Counter[tuple[str, str, str]] = Counter()
        self._launch_bytes: Counter[tuple[str, str, str]] = Counter()
        self._waits: Counter[str] = Counter()
        self._modules: list[str] = []
        self._module_names: dict[torch.nn.Module, str] = {}
        self._has_modules = False
        self._fused = 0

    # Methods that a case calls.

    @contextmanager
    def phase(self, name: str, *, is_step: bool = False) -> Iterator[None]:
        """Open a phase of a case, which replaces an earlier phase of the same name.

        Args:
            name: name of the phase.
            is_step: whether the phase is part of a training step. A step may wait for the device
                only at the places that :mod:`tests.simulated_cuda.waits` lists.
        """
        gc.collect()
        before = self._phase, self._in_step
        self._forget(name)
        self._phase, self._in_step = name, is_step
        self._changes = []
        start = dict.fromkeys(map(id, self._alive.values()))
        held = [each for each in self._alive.values() if id(each) in start]
        try:
            yield
        finally:
            self._phase, self._in_step = before
        self._peaks[name] = _peak(held, self._changes)

    def label(self, component: str, tensors: Iterable[Tensor]) -> None:
        """Assign the storages of some tensors to a component."""
        for tensor in tensors:
            allocation = self._alive.get(tensor.untyped_storage()._cdata)
            if allocation is not None:
                allocation.component = component

    def watch(self, network: torch.nn.Module) -> None:
        """Attribute all later operations to the modules of a network."""
        self._module_names = {module: name for name, module in network.named_modules()}
        if self._has_modules:
            return
        self._has_modules = True
        torch.nn.modules.module.register_module_forward_pre_hook(self._enter_module)
        torch.nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True)

    def recording(self, outcome: Any = None) -> Recording:
        """Return everything that was recorded, with the return value of the case's function."""
        gc.collect()
        return Recording(
            held=_memory(self._alive.values()),
            peaks=dict(self._peaks),
            host=self._host_peaks["host"],
            pinned=self._host_peaks["pinned"],
            collectives=tuple(
                Collective(*key, count=count, bytes=self._collective_bytes[key])
                for key, count in sorted(self._collectives.items())
            ),
            launches=tuple(
                Launch(*key, count=count, bytes=self._launch_bytes[key])
                for key, count in sorted(self._launches.items())
            ),
            waits=dict(self._waits),
            outcome=outcome,
        )

    # Methods that the replacements in device.py call.

    def allocated(self) -> int:
        """Return the bytes alive on the device."""
        return self._now["cuda"]

    def wait(self, kind: str) -> str:
        """Return the place (``module.function``) where the host waits for the device.

        In a step, the wait is also recorded.

        Raises:
            SimulatedCudaError: a step waits at a place that :mod:`waits` does not permit.
        """
        place = _place()
        if self._in_step:
            self._waits[f"{place} {kind}"] += 1
            if place not in PERMITTED:
                raise SimulatedCudaError(f"{place} waits for the device in a step: {kind}")
        return place

    def read(self, tensor: Tensor, kind: str) -> Any:
        """Record that the host reads a tensor's values, and return simulated values."""
        place = self.wait(kind) if tensor.is_cuda else _place()
        return answer(place, tuple(tensor.shape), tensor.dtype)

    def launch(self, kernel: str, tensors: Iterable[Tensor]) -> None:
        """Record a kernel that is not an operation of torch.

        Raises:
            SimulatedCudaError: one of its tensors is not on the device.
        """
        tensors = list(tensors)
        for tensor in tensors:
            if not tensor.is_cuda:
                raise SimulatedCudaError(f"kernel {kernel} takes a tensor on {tensor.device}")
        self._count_launch(kernel, tensors)

    def fused(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function: each call counts as one kernel that allocates only its outputs."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._fused:
                return function(*args, **kwargs)
            self._fused += 1
            try:
                result = function(*args, **kwargs)
            finally:
                self._fused -= 1
            outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            for each in outputs:
                self._see(each, name)
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            if any(each.is_cuda for each in outputs):
                self._count_launch(name, [*inputs, *outputs])
            return result

        return call

    # Methods that torch calls.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, HigherOrderOperator):
            return self._run_higher_order(func, args, kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        packet = func.overloadpacket
        is_pinned = bool(kwargs.pop("pin_memory", False))
        if packet is aten._local_scalar_dense:
            if isinstance(args[0], FakeTensor):
                return self.read(args[0], "item")
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if packet is aten.is_pinned:
            allocation = self._alive.get(args[0].untyped_storage()._cdata)
            return allocation is not None and allocation.is_pinned
        if packet in (aten._pin_memory, aten.pin_memory):
            func, args, kwargs, is_pinned = aten.clone.default, args[:1], {}, True
        if func.namespace == "c10d":
            self._count_collective(func, args)
        else:
            check_operation(func, args, tensors)
            self._check_wait(packet, args, kwargs, tensors)
        if _stays_real(args, kwargs, tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if self._is_reading(packet, args, kwargs):
            return self._values(args[0], kwargs)
        if func is aten.add.Tensor and _place() == NO_PLACE:
            func, args = _sum_of_gradients(args)
        elif func is aten.index_put.default and _place() == NO_PLACE:
            # For real tensors, the backward pass of indexing (index_backward of torch's
            # FunctionsManual.cpp) writes into zeros in place. For tensors of a subclass, such as
            # fake tensors, index_backward makes a copy. Write in place here, as for real tensors.
            func = aten.index_put_.default
        result = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        for each in outputs:
            self._see(each, str(func), is_pinned)
        if func.namespace not in ("c10d", "prim") and packet not in _NO_KERNEL and not func.is_view:
            touched = [*tensors, *outputs]
            if any(each.is_cuda for each in touched):
                self._count_launch(str(packet), touched)
        return result

    def _is_reading(self, packet: Any, args: Any, kwargs: Any) -> bool:
        """Return whether an operation copies a few numbers to the host, outside of all phases.

        Such a copy gets simulated values, because the evaluation suites of ``training.evaluate``
        branch on them.
        """
        device = kwargs.get("device")
        return (
            packet is aten._to_copy
            and not self._phase
            and device is not None
            and torch.device(device).type == "cpu"
            and args[0].is_cuda
            and args[0].numel() <= _REAL_ELEMENTS
        )

    def _values(self, tensor: Tensor, kwargs: Any) -> Tensor:
        """Return a real host tensor with simulated values instead of a fake device tensor."""
        values = answer(_place(), tuple(tensor.shape), tensor.dtype)
        with unset_fake_temporarily():
            return torch.tensor(values, dtype=kwargs.get("dtype") or tensor.dtype)

    def _run_higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._see(each, str(func))
        self.launch(str(func), [each for each in tensors if each.is_cuda])
        return result

    def _check_wait(self, packet: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        """Record an operation that waits for the device, except ``item``, which ``read`` records.

        Raises:
            SimulatedCudaError: the size of the result depends on values of the device, or a step
                waits at a place that :mod:`waits` does not permit.
        """
        if packet in _SIZED_BY_VALUES and any(x.is_cuda for x in tensors):
            place = self.wait(str(packet))
            raise SimulatedCudaError(f"{place} makes a tensor whose size depends on values")
        if kwargs.get("non_blocking"):
            return
        if packet is aten._to_copy:
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "cpu" and args[0].is_cuda:
                self.wait("copy to the host")
        elif packet is aten.copy_ and not args[0].is_cuda and args[1].is_cuda and not args[2:3]:
            self.wait("copy to the host")

    def _count_collective(self, func: Any, args: Any) -> None:
        group = next(
            ProcessGroup.unbox(each) for each in args if isinstance(each, torch.ScriptObject)
        )
        payload = check_collective(func._schema.name.split("::")[1], args, group.size())
        names = [argument.name for argument in func._schema.arguments]
        place = names.index("async_op") if "async_op" in names else len(args)
        key = (
            self._phase,
            payload.operation,
            self.group_names.get(group.group_name, group.group_desc or group.group_name),
            group.size(),
            "/".join(sorted({str(x.dtype).removeprefix("torch.") for x in payload.tensors})),
            # True if the call blocks. torch omits arguments that have their default; the default of
            # async_op is True.
            place < len(args) and not args[place],
        )
        self._collectives[key] += 1
        self._collective_bytes[key] += payload.bytes

    def _count_launch(self, kernel: str, tensors: list[Tensor]) -> None:
        if self._fused:
            return
        key = (self._phase, self._modules[-1] if self._modules else "", kernel)
        self._launches[key] += 1
        whole = {id(each): min(_size(each), each.untyped_storage().nbytes()) for each in tensors}
        self._launch_bytes[key] += sum(whole.values())

    def _see(self, tensor: Tensor, operation: str, is_pinned: bool = False) -> None:
        """Record the storage of a tensor as an allocation, unless it was recorded before."""
        if self._fused or not isinstance(tensor, FakeTensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or storage.nbytes() == 0:
            return
        device = tensor.fake_device.type
        size = storage.nbytes()
        size = 1 << (size - 1).bit_length() if is_pinned else -(-size // _BLOCK) * _BLOCK
        allocation = _Allocation(
            size,
            device,
            is_pinned,
            self._phase,
            self._modules[-1] if self._modules else "",
            operation,
            str(tuple(tensor.shape)),
            str(tensor.dtype).removeprefix("torch."),
            self._component(),
        )
        self._alive[key] = allocation
        weakref.finalize(storage, self._free, key).atexit = False
        self._change(1, allocation)

    def _free(self, key: int) -> None:
        allocation = self._alive.pop(key, None)
        if allocation is not None:
            self._change(-1, allocation)

    def _change(self, sign: int, allocation: _Allocation) -> None:
        self._now[allocation.device] += sign * allocation.bytes
        if allocation.device == "cuda":
            self._changes.append((sign, allocation))
            return
        self._now["pinned"] += sign * allocation.bytes * allocation.is_pinned
        for name, held in (("host", "cpu"), ("pinned", "pinned")):
            self._host_peaks[name] = max(self._host_peaks[name], self._now[held])

    def _component(self) -> str:
        if self._phase in BEFORE_STEPS:
            return "buffers"
        if self._phase == "update":
            return "update"
        if _place().startswith(_GATHERS):
            return "buffers"
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        if not self._modules:
            # Outside of modules, a pipeline stage allocates the input that it receives.
            return "activations"
        is_whole_stage = self._modules[-1].count(".") <= 1
        is_loss = self._modules[-1].endswith(_OUTPUT_LAYER)
        return "loss" if is_loss or is_whole_stage else "activations"

    def _enter_module(self, module: torch.nn.Module, _: Any) -> None:
        name = self._module_names.get(module)
        self._modules.append(self._modules[-1] if name is None and self._modules else name or "")

    def _leave_module(self, *_: Any) -> None:
        self._modules.pop()

    def _forget(self, phase: str) -> None:
        """Drop the records of an earlier phase of this name."""
        self._peaks.pop(phase, None)
        for counter in (
            self._collectives, self._collective_bytes, self._launches, self._launch_bytes
        ):  # fmt: skip
            for key in [key for key in counter if key[0] == phase]:
                del counter[key]


def _stays_real(args: Any, kwargs: Any, tensors: list[Tensor]) -> bool:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    if tensors:
        return not any(isinstance(x, FakeTensor) or x.device.type != "cpu" for x in tensors)
    elements = 1
    for size in args[0] if args and isinstance(args[0], (list, tuple)) else ():
        elements *= int(size)
    return elements <= _REAL_ELEMENTS


def _sum_of_gradients(args: Any) -> tuple[Any, Any]:
    """Return the operation, and its arguments, by which autograd would add two real gradients.

    If autograd's engine holds the last reference to one of the gradients, it adds in place to this
    gradient (InputBuffer.cpp of torch). The engine never does so with tensors of a subclass, such
    as fake tensors.
    """
    for one, other in (args, args[::-1]):
        # The tensor holds one reference, and the object that this call creates holds the other.
        if torch._C._storage_Use_Count(one.untyped_storage()._cdata) == 2:
            return aten.add_.Tensor, (one, other)
    return aten.add.Tensor, args


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _place() -> str:
    """Return ``module.function`` of the innermost frame outside torch and ``_NO_PLACES``.

    Return ``NO_PLACE`` for a call of autograd's engine, which has no such frame.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(_NO_PLACES) and module != "torch":
            return f"{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return NO_PLACE


def _peak(held: Iterable[_Allocation], changes: Iterable[tuple[int, _Allocation]]) -> Memory:
    """Return the memory at its peak, from the allocations at the start and the later changes."""
    alive = {id(each): each for each in held if each.device == "cuda"}
    now = most = sum(each.bytes for each in alive.values())
    changes = list(changes)
    moment = 0
    for number, (sign, each) in enumerate(changes, 1):
        now += sign * each.bytes
        if now > most:
            most, moment = now, number
    for sign, each in changes[:moment]:
        if sign > 0:
            alive[id(each)] = each
        else:
            alive.pop(id(each), None)
    return _memory(alive.values())


def _memory(allocations: Iterable[_Allocation]) -> Memory:
    allocations = [each for each in allocations if each.device == "cuda"]
    components = Counter(dict.fromkeys(COMPONENTS, 0))
    by_kind: Counter[tuple[str, str, str, str, str]] = Counter()
    for each in allocations:
        components[each.component] += each.bytes
        by_kind[each.component, each.module, each.operation, each.shape, each.dtype] += each.bytes
    largest = tuple((*key, size) for key, size in by_kind.most_common(200))
    return Memory(sum(components.values()), dict(components), largest)

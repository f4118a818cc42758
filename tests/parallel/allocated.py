"""Count of the bytes of live tensors and of its peak, updated when torch creates or frees one."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocatedTensors(TorchDispatchMode):
    """Mode that counts the bytes of all storages that are not in ``known``.

    The mode counts storages that exist when the mode is created, and storages that are created
    while the mode is active. torch's profiler would be simpler, but it misses storages that gloo's
    threads free.

    Attributes:
        now: bytes of the counted storages that are alive.
        peak: largest value of ``now`` since :meth:`reset`.
    """

    def __init__(self, known: dict[int, torch.UntypedStorage]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive = dict.fromkeys(known, 0)
        for storage in living_storages().values():
            self._count(storage)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return result

    def reset(self) -> None:
        self.peak = self.now

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key).atexit = False

    def _forget(self, key: int) -> None:
        self.now -= self._alive.pop(key)


def living_storages() -> dict[int, torch.UntypedStorage]:
    """Return the storages of all CPU tensors and of their gradients, by address."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, Tensor) and x.device.type == "cpu"]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage for storage in storages}

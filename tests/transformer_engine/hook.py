"""The import hook that completes Transformer Engine's modules for a CPU.

It imports neither torch nor Transformer Engine before a program does.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

Execute = Callable[[ModuleType], None]


class Hook(MetaPathFinder):
    """Finder for the modules of ``AROUND``, which executes each by its function there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec with a loader of our own, None for every other module."""
        if name not in AROUND:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Around(spec.loader, AROUND[name])
        return spec


class _Around(Loader):
    """Loader that creates a module as another loader does, and executes it by a function."""

    def __init__(self, loader: Loader, around: Callable[[ModuleType, Execute], None]) -> None:
        self._loader, self._around = loader, around

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._around(module, self._loader.exec_module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


def _package(module: ModuleType, execute: Execute) -> None:
    """Execute ``transformer_engine`` with the stand-in in the place of its compiled extension."""
    from tests.transformer_engine import extension

    sys.modules["transformer_engine_torch"] = extension.build()
    # It imports onnxscript, which nothing here needs.
    onnx = "transformer_engine.pytorch.onnx_extensions"
    sys.modules[onnx] = extension.Unsupported(onnx)
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda _: None
    execute(module)
    extension.accept_cpu_tensors()


def _layer_specs(module: ModuleType, execute: Execute) -> None:
    """Execute the module that chooses the layers' host, which asks torch for a GPU."""
    from tests.transformer_engine import extension

    execute(module)
    module.torch = extension.TorchWithCuda()


AROUND: dict[str, Callable[[ModuleType, Execute], None]] = {
    "transformer_engine": _package,
    "diffmegatron.attention.layer_specs": _layer_specs,
}

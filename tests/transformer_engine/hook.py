"""The import hook that completes Transformer Engine's modules for a CPU.

The hook imports neither torch nor Transformer Engine before the program does.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

Execute = Callable[[ModuleType], None]


class Hook(MetaPathFinder):
    """Finder that loads each module in ``AROUND`` with the function that ``AROUND`` maps it to."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec with our own loader; None for modules outside ``AROUND``."""
        if name not in AROUND:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Around(spec.loader, AROUND[name])
        return spec


class _Around(Loader):
    """Loader that wraps another loader and executes the module with a given function."""

    def __init__(self, loader: Loader, around: Callable[[ModuleType, Execute], None]) -> None:
        self._loader, self._around = loader, around

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._around(module, self._loader.exec_module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


def _package(module: ModuleType, execute: Execute) -> None:
    """Execute ``transformer_engine`` with the stand-in instead of its compiled extension."""
    from tests.transformer_engine import extension, fp8

    sys.modules["transformer_engine_torch"] = extension.build()
    # The real module imports onnxscript, which is not needed here.
    onnx = "transformer_engine.pytorch.onnx_extensions"
    sys.modules[onnx] = extension.Unsupported(onnx)
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda _: None
    execute(module)
    extension.accept_cpu_tensors()
    fp8.emulate()


def _layer_specs(module: ModuleType, execute: Execute) -> None:
    """Execute ``layer_specs``, and make a GPU seem available to this module.

    Without a GPU, ``layer_specs`` would not choose Transformer Engine's layers.
    """
    from tests.transformer_engine import extension

    execute(module)
    module.torch = extension.TorchWithCuda()


def _fp8(module: ModuleType, execute: Execute) -> None:
    """Execute ``fp8``, and record its calls."""
    from tests.transformer_engine import fp8

    execute(module)
    fp8.record(module)


AROUND: dict[str, Callable[[ModuleType, Execute], None]] = {
    "transformer_engine": _package,
    "diffmegatron.model.layers.layer_specs": _layer_specs,
    "diffmegatron.model.layers.fp8": _fp8,
}

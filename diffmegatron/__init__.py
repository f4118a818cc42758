"""Train Differential Transformers at scale; docs/python.md describes the names exported here."""

import logging
import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffmegatron.api import evaluate, export, train
    from diffmegatron.config.load import load_recipe, load_stages
    from diffmegatron.config.schema import Recipe
    from diffmegatron.data.prepare.prepare import prepare
    from diffmegatron.errors import UserError
    from diffmegatron.hf.import_model import import_model
    from diffmegatron.plan.summary import plan_recipe
    from diffmegatron.training.hook import Hook, register_hook
    from diffmegatron.training.monitoring.metrics import read_metrics
    from diffmegatron.training.run import Run

__version__ = "0.1.0"

__all__ = [
    "Hook",
    "Recipe",
    "Run",
    "UserError",
    "evaluate",
    "export",
    "import_model",
    "load_recipe",
    "load_stages",
    "plan_recipe",
    "prepare",
    "read_metrics",
    "register_hook",
    "train",
]

# Exported name -> its module. Modules are imported on first use, because some import torch.
_MODULES = {
    "Hook": "training.hook",
    "Recipe": "config.schema",
    "Run": "training.run",
    "UserError": "errors",
    "evaluate": "api",
    "export": "api",
    "import_model": "hf.import_model",
    "load_recipe": "config.load",
    "load_stages": "config.load",
    "plan_recipe": "plan.summary",
    "prepare": "data.prepare.prepare",
    "read_metrics": "training.monitoring.metrics",
    "register_hook": "training.hook",
    "train": "api",
}

# Regular expressions for the message and the module of library warnings that a user cannot act on.
# Some warnings appear while Megatron-core is imported, so the filters are set before that import.
# Python's option -W disables the filters.
_LIBRARY_WARNINGS = (
    (r"(Transformer Engine and )?Apex (is|are) not installed\. Falling back", r"megatron\.core"),
    (r"full scope is deprecated", r"megatron\.core"),
    (r".* set the environment variable CUDA_DEVICE_MAX_CONNECTIONS", r"megatron\.core"),
    (r"`torch\.distributed\.\w+` is deprecated", r"torch\.distributed"),
    (r"Could not determine (rank|world size) from torch\.distributed", r"megatron\.core"),
    # Python gives this warning when it first compiles a file of Megatron-core.
    (r"invalid escape sequence", r".*megatron"),
    (r"barrier\(\): using the device under current context", r"torch\.distributed"),
)
if not sys.warnoptions:
    for _message, _module in _LIBRARY_WARNINGS:
        warnings.filterwarnings("ignore", _message, module=_module)
    # When DeepSpeed is imported, torch logs a warning if the CUDA toolkit exists without a GPU.
    logging.getLogger("torch.utils.cpp_extension").addFilter(
        lambda record: "No CUDA runtime is found" not in record.getMessage()
    )


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'diffmegatron' has no attribute {name!r}")
    return getattr(import_module(f"diffmegatron.{_MODULES[name]}"), name)

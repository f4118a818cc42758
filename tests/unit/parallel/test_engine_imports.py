"""Imports of Megatron-core and DeepSpeed that do not load the compiler before its first use."""

import gc
import subprocess
import sys

import pytest
import torch

from diffmegatron.parallel.engine_imports import importing_engines

START = """
import sys
from diffmegatron.parallel.engine_imports import importing_engines
with importing_engines():
    import diffmegatron.training.trainer
from diffmegatron.optim.zero import import_deepspeed
import_deepspeed()
import deepspeed.runtime.zero.stage_1_and_2, deepspeed.runtime.zero.stage3
print("torch._inductor.compile_fx" in sys.modules)
"""


def test_a_start_does_not_load_the_compiler():
    result = subprocess.run(
        [sys.executable, "-c", START], capture_output=True, text=True, check=True, timeout=600
    )
    assert result.stdout.strip() == "False"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Replace ``torch.compile`` with a function that only records its arguments in a list."""
    calls: list[object] = []

    def compile_(model: object, **options: object) -> object:
        calls.append((model, options))
        return model

    monkeypatch.setattr(torch, "compile", compile_)
    return calls


def double(x: int) -> int:
    """Return twice ``x``."""
    return 2 * x


def test_a_function_is_compiled_once_when_it_is_called(compiled):
    with importing_engines():
        plain, chosen = torch.compile(double), torch.compile(dynamic=True)(double)
    assert not compiled and plain.__doc__ == double.__doc__
    assert [plain(1), plain(2), plain(x=3)] == [2, 4, 6] and compiled == [(double, {})]
    assert chosen(4) == 8 and compiled[1:] == [(double, {"dynamic": True})]


def test_a_module_is_compiled_at_once(compiled):
    module = torch.nn.Linear(1, 1)
    with importing_engines():
        assert torch.compile(module, dynamic=True) is module
    assert compiled == [(module, {"dynamic": True})]


# The compiler warns about functions that it cannot trace, so warnings are errors here.
@pytest.mark.filterwarnings("error")
def test_a_function_called_in_a_compiled_one_is_inlined():
    counts: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        counts.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph

    with importing_engines():
        inner = torch.compile(double, backend=backend)
    outer = torch.compile(lambda x: inner(x) + 1, backend=backend, fullgraph=True)
    assert outer(torch.tensor(3)) == 7
    assert counts == [2]


def test_torch_and_the_collector_are_as_before(monkeypatch):
    before = torch.compile
    with pytest.raises(ImportError), importing_engines():
        assert not gc.isenabled()
        raise ImportError
    assert torch.compile is before and gc.isenabled()
    monkeypatch.setattr(gc, "isenabled", lambda: False)
    enabled: list[bool] = []
    monkeypatch.setattr(gc, "enable", lambda: enabled.append(True))
    with importing_engines():
        pass
    assert not enabled
    monkeypatch.undo()
    gc.enable()

"""Test that two tables list every function of the package whose code depends on CUDA.

``ENTERED`` names the test that runs a function on a simulated GPU. ``NOT_ENTERED`` contains the
reason why no simulation runs a function.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.paths import ROOT

PACKAGE = ROOT / "diffmegatron"
STEP = "test_faults.py and test_mutations.py: steps on simulated GPUs"
TRAINER = "test_trainer.py: the trainer on a simulated GPU"
TUNE = "test_trainer.py: tune on a simulated GPU"
PREFLIGHT = "tests/end_to_end/test_gpu_report.py: preflight on a simulated GPU"
HARDWARE = "a GPU only: it measures or describes the device, or computes values"
CUDNN = "a GPU only: it calls the library cuDNN"

# Keys are ``file:function``, or ``file:`` for code outside of functions.
ENTERED = {
    "attention/kernels/registry.py:": STEP + ", which choose from the table of a device",
    "attention/kernels/installed_backends.py:_unusable_reason": STEP,
    "attention/kernels/installed_backends.py:chip_of": STEP,
    "attention/kernels/triton/kernel_launch.py:on_device": STEP,
    "attention/kernels/triton/block_sizes.py:target_for": STEP,
    "attention/kernels/wrappers/sdpa.py:_flash": STEP + ", on a ring",
    "attention/kernels/wrappers/sdpa.py:_flash_gradients": STEP + ", on a ring",
    "model/layers/layer_specs.py:available_host": STEP,
    "model/build.py:transformer_config": STEP,
    "model/language_model_loss.py:_has_kernel": STEP,
    "optim/zero.py:engine_config": STEP + ", offloaded",
    "optim/zero.py:import_deepspeed": STEP,
    "parallel/random.py:restore_random_states": TRAINER + ", resumed",
    "training/builtin_hooks.py:ProfileHook._begin_if_due": TRAINER,
    "training/builtin_hooks.py:ProfileHook._end": TRAINER,
    "attention/kernels/pytorch/blocked.py:_row_blocks": "test_kinds.py",
    "attention/kernels/wrappers/flex.py:attend": "test_kinds.py",
    "parallel/cpu.py:without_cuda": STEP,
    "parallel/default_group.py:default_group": STEP,
    "parallel/default_group.py:own_device": STEP,
    "parallel/random.py:random_states": TRAINER,
    "training/builtin_hooks.py:_gpu_name": TRAINER,
    "training/builtin_hooks.py:_peak_memory": TRAINER,
    "training/saving/saver.py:Saver._copy_to_host": TRAINER,
    "parallel/deterministic.py:deterministic_algorithms": "test_kinds.py",
    "training/compute/step.py:offloaded_activations": "test_kinds.py",
    "attention/kernels/wrappers/flex.py:_flex_attention": "test_kinds.py",
    "measurements/machine.py:this_machine": TUNE,
    "tuning/rates.py:": TUNE,
    "tuning/timing.py:timed": TUNE,
    "tuning/timing.py:clear_cache": TUNE,
    "tuning/timing.py:_buffer": TUNE,
    "tuning/trials.py:same_numbers": TUNE,
    "tuning/trials.py:usable_backends": TUNE,
    "tuning/tune.py:_is_lost": TUNE,
    "tuning/verification.py:": TUNE,
    "tuning/verification.py:_check": TUNE,
    "operations/preflight.py:": PREFLIGHT,
    "operations/preflight.py:_check_this_machine": PREFLIGHT,
    "operations/preflight.py:_product_seconds": PREFLIGHT,
    "operations/preflight.py:_seconds": PREFLIGHT,
    "operations/preflight.py:_measure_collectives": PREFLIGHT,
    "operations/device_bits.py:": PREFLIGHT,
    "operations/device_bits.py:_computations": PREFLIGHT,
    "operations/device_bits.py:_multiply": PREFLIGHT,
    "operations/device_bits.py:computed_bits": PREFLIGHT,
    "operations/device_bits.py:device_name": PREFLIGHT,
}
NOT_ENTERED = {
    "tuning/rates.py:_wall_seconds": HARDWARE,
    "plan/rates.py:Hardware.with_backend": "computes for `plan`, on no device",
    "plan/rates.py:_attention_in_words": "prints what `plan` computes, on no device",
    "config/attention_backend.py:planned_backend": "computes for `plan`, on no device",
    "attention/kernels/installed_backends.py:backend_table": "prints; the CPU's table is tested",
    "attention/kernels/wrappers/cudnn_graphs.py:_handle": CUDNN,
    "attention/kernels/wrappers/cudnn_graphs.py:_handle_on_stream": CUDNN,
    "doctor.py:_attention_choices": HARDWARE,
    "doctor.py:_gpus": HARDWARE,
    "doctor.py:_missing": HARDWARE,
    "doctor.py:_communication": HARDWARE,
    "doctor.py:_has_gpu": HARDWARE,
    "measurements/cache.py:cached_gpus": HARDWARE,
    "evaluation/evaluate_settings.py:EngineSettings.__post_init__": HARDWARE,
    "evaluation/evaluate_settings.py:EngineSettings.dtype_of": HARDWARE,
    "evaluation/evaluate_settings.py:EngineSettings.is_gpu": HARDWARE,
    "evaluation/evaluate_settings.py:Computing.tokens": HARDWARE,
    "evaluation/model.py:Model._answers_of": HARDWARE,
    "evaluation/model.py:Model.network": HARDWARE,
    "evaluation/results.py:_provenance": HARDWARE,
    "evaluation/suites/throughput.py:Throughput.score": HARDWARE,
    "evaluation/suites/throughput.py:_wait": HARDWARE,
    "operations/quickstart.py:write_report": HARDWARE,
    "operations/quickstart.py:with_machine_overrides": "the precision of the quickstart on a GPU",
    "operations/quickstart.py:ranks": "the number of ranks of the quickstart on GPUs",
}


NOT_A_BRANCH = """
def draw(device: Literal["cpu", "cuda"]) -> str:
    "Draw on cuda."
    return device
"""
BRANCHES = {
    "device = 'cuda'": "",
    "def a(x):\n    return x.is_cuda": "a",
    "def a(x):\n    return x.device.type != 'cpu'": "a",
    "class A:\n    def b(self):\n        torch.cuda.synchronize()": "A.b",
    "def a(x):\n    return x.cuda()": "a",
    "def a():\n    return {'nccl': 1, 'gloo': 2}": "a",
    "def a(computing):\n    return computing.is_gpu": "a",
    "def a():\n    from torch import cuda": "a",
}


def test_every_branch_for_cuda_is_listed():
    found = {f"{path}:{function}" for path, function in branches()}
    listed = ENTERED.keys() | NOT_ENTERED.keys()
    assert sorted(found - listed) == [], "add these functions to ENTERED or to NOT_ENTERED"
    assert sorted(listed - found) == [], "remove these entries: no such code depends on CUDA"
    assert ENTERED.keys().isdisjoint(NOT_ENTERED)


@pytest.mark.parametrize("source", BRANCHES)
def test_a_branch_is_found(source):
    assert list(_functions(ast.parse(source), "")) == [BRANCHES[source]]


def test_annotations_and_docstrings_are_not_branches():
    assert list(_functions(ast.parse(NOT_A_BRANCH), "")) == []


def branches() -> Iterator[tuple[str, str]]:
    """Yield (file, function) for each place in the package where code depends on CUDA."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for function in _functions(ast.parse(path.read_text()), ""):
            yield str(path.relative_to(PACKAGE)), function


def _functions(node: ast.AST, name: str) -> Iterator[str]:
    """Yield the name of the function around each node that depends on CUDA."""
    for child in ast.iter_child_nodes(node):
        inner = name
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}".lstrip(".")
        if isinstance(child, ast.Subscript) and ast.unparse(child.value) == "Literal":
            continue
        if _depends_on_cuda(child):
            yield name
        yield from _functions(child, inner)


def _depends_on_cuda(node: ast.AST) -> bool:
    """Return whether a node names CUDA or NCCL, or compares a device type with "cpu"."""
    if isinstance(node, ast.Compare):
        values = (node.left, *node.comparators)
        is_type = any(isinstance(x, ast.Attribute) and x.attr == "type" for x in values)
        return is_type and any(isinstance(x, ast.Constant) and x.value == "cpu" for x in values)
    if isinstance(node, ast.Constant):
        return node.value in ("cuda", "nccl")
    if isinstance(node, ast.alias):
        return node.name == "cuda"
    return isinstance(node, ast.Attribute) and node.attr in ("cuda", "is_cuda", "is_gpu")

"""Deliberate mistakes in a copy of the project, each of which named tests must find.

    python -m tests.mutations                 # all
    python -m tests.mutations schedule guard  # those whose file or tests contain a word

A mistake replaces a piece of text that occurs once in a file. The tests run in a fork of this
process, which has imported the libraries but neither diffmegatron nor its tests. Add a mistake here
when you replace tests by cheaper ones, and run it with the old tests first.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "megatron.core", "deepspeed", "transformers", "hypothesis", "pytest")


class Mutation(NamedTuple):
    """A mistake.

    Attributes:
        file: file in ``diffmegatron``.
        right: text of the code, which occurs once in the file.
        wrong: text that replaces it.
        tests: arguments of pytest; one of the selected tests must fail.
    """

    file: str
    right: str
    wrong: str
    tests: str


MUTATIONS = [
    Mutation(*each)
    for each in (
        ("optim/schedule.py", "optimizer.lr * step / warmup", "optimizer.lr * (step - 1) / warmup",
         "tests/unit/optim/test_schedule.py"),
        ("optim/schedule.py", "0.5 * (1.0 - math.cos", "0.5 * (1.0 + math.cos",
         "tests/unit/optim/test_schedule.py"),
        ("optim/guard.py", "if not 0 <= x < math.inf", "if not 0 <= x <= math.inf",
         "tests/unit/optim/test_guard.py"),
        ("optim/guard.py", "self._in_a_row < self._config", "self._in_a_row <= self._config",
         "tests/unit/optim/test_guard.py"),
        ("optim/adamw.py", 'if is_lambda else declared.role == "matrix"',
         'if is_lambda else declared.role != "matrix"', "tests/unit/optim/test_adamw.py"),
        ("config/width_scaling.py", "return WidthFactors(1 / m, 1 / m, 1 / m)",
         "return WidthFactors(1 / m)", "tests/unit/optim/test_width_scaling.py"),
        ("hf/kinds/network.py", "setdefault((number, window), [])",
         "setdefault((number, None), [])", "tests/unit/hf/test_import_model.py"),
        ("hf/modeling/modeling_diff_v2.py", "sliding_window=self.sliding_window",
         "sliding_window=None", "tests/unit/hf/modeling/test_generation.py"),
        ("attention/kinds/diff_v2.py", '("q1",) * self.ratio + ("q2",)',
         '("q2",) + ("q1",) * self.ratio', "tests/unit/optim/test_muon.py"),
        ("data/sampling/permutation.py", "value += np.uint64(1)", "value += np.uint64(2)",
         "tests/unit/data/sampling/test_order.py"),
        ("data/sampling/document_order.py", "min(max(1, round(", "min(max(0, round(",
         "tests/unit/data/sampling/test_order.py"),
        ("data/sampling/document_order.py", "training &= ~held_out", "training |= held_out",
         "tests/unit/data/sampling/test_order.py"),
        ("data/sampling/packing.py", "(np.arange(len(owners)) - first_piece[owners])",
         "(np.arange(len(owners)) - owners)", "tests/unit/data/sampling/test_samples.py"),
        ("data/sampling/packing.py", "(sufficient & -sufficient).bit_length()",
         "sufficient.bit_length()", "tests/unit/data/sampling/test_packing.py"),
        ("data/sampling/length_upsampling.py", "lengths - 1 >= long", "lengths - 1 > long",
         "tests/unit/data/sampling"),
        ("data/sampling/mixture.py", "index * share.numerator // share.denominator",
         "index * share.numerator // (share.denominator + 1)", "tests/unit/data/sampling"),
        ("data/prepare/encode.py", "self._seen.add(digest)", "pass",
         "tests/unit/data/prepare/test_prepare.py"),
        ("checkpoint/checkpoint_store.py", "keep_every is None or step % keep_every",
         "keep_every is None or not step % keep_every",
         "tests/unit/checkpoint/test_checkpoint_store.py"),
        ("checkpoint/checkpoint_store.py", "self.path(complete[-1])", "self.path(complete[0])",
         "tests/unit/checkpoint"),
        ("checkpoint/checkpoint_manifest.py", "if size != entry.size:", "if size is None:",
         "tests/unit/checkpoint/test_checkpoint_store.py"),
        ("checkpoint/tensor_file.py", "checksum = zlib.crc32(block, checksum)\n            stream",
         "checksum = zlib.crc32(block)\n            stream",
         "tests/unit/checkpoint/test_checkpoint_format.py"),
        ("attention/kinds/lambda_init.py", "math.exp(-0.3 * (number - 1))",
         "math.exp(-0.3 * number)", "tests/unit/attention/kinds/test_lambdas.py"),
        ("attention/kinds/two_maps.py", "scale = 1.0 - self.lambda_init",
         "scale = self.lambda_init", "tests/unit/model/layers/test_self_attention.py"),
        ("attention/context_parallel/chunk_numbers.py", "return rank, 2 * size - 1 - rank",
         "return rank, size + rank", "tests/unit/attention/context_parallel"),
        ("attention/kernels/pytorch/reference.py", "hidden & ~empty, -torch.inf",
         "hidden & ~empty, -5.0", "tests/kernels/test_diff_attention.py"),
        ("attention/kernels/masks.py", "or any(a >= b for", "or any(a > b for",
         "tests/unit/attention/kernels"),
        ("attention/kernels/masks.py", "(key <= query - self.window)",
         "(key < query - self.window)", "tests/unit/attention/kernels/test_masks.py"),
        ("attention/kernels/maps.py", "(by_noise_head(signal, noise.shape[2]) - shared)",
         "(by_noise_head(signal, noise.shape[2]) + shared)",
         "tests/kernels/test_chunks.py tests/kernels/test_library_backends.py"),
        ("model/initialize.py", "math.sqrt(2 * model.num_layers)", "math.sqrt(model.num_layers)",
         "tests/unit/model/test_initialize.py"),
        ("model/language_model_loss.py", "unpadded_size:] = -torch.inf", "unpadded_size:] = 0.0",
         "tests/unit/model/test_language_model_loss.py tests/unit/training/test_largest_logits.py"),
        ("model/accounting/parameters.py", "return 3 * model.hidden_size * model.ffn",
         "return 2 * model.hidden_size * model.ffn", "tests/unit/model/test_accounting.py"),
        ("model/accounting/flops.py", "forward=2 * weights + attention",
         "forward=weights + attention", "tests/unit/model/test_accounting.py"),
        ("plan/timing.py", "(parallel.pipeline - 1) / (microbatches",
         "parallel.pipeline / (microbatches", "tests/unit/plan/test_timing.py"),
        ("config/divisibility.py", '"ring" if heads % parallel.context else "ulysses"',
         '"ulysses" if heads % parallel.context else "ring"', "tests/unit/config"),
        ("section.py", 'type(each) is bool and bool not in types and numbers',
         "False", "tests/unit/config/test_load.py"),
        ("yaml_documents.py", "if self._nodes > MAX_NODES:", "if self._nodes >= MAX_NODES:",
         "tests/unit/test_yaml_documents.py"),
        ("parallel/launcher.py", '"RANK", 0, ranks - 1', '"RANK", 0, ranks',
         "tests/unit/parallel/test_launcher.py"),
        ("attempts/decision.py", "are_few_missing = 0 < 2 * len", "are_few_missing = 0 < len",
         "tests/unit/attempts"),
        ("attempts/decision.py", "return 2 if failed[rank].reason else 1",
         "return 1 if failed[rank].reason else 2", "tests/unit/attempts"),
        ("attempts/ledger.py", "count >= _MAX_HOST_FAULTS", "count > _MAX_HOST_FAULTS",
         "tests/launch/test_ledger.py"),
        ("operations/cluster.py", "seconds + 86_400 * (days or 0)", "seconds + 8_640 * (days or 0)",
         "tests/launch/test_launch.py -k time"),
        ("training/monitoring/due.py", "if is_last or step % every == 0]",
         "if step % every == 0]", "tests/recovery/test_disk.py -k restarts_record"),
        ("hf/weight_mapping.py", "torch.cat((gate, up))", "torch.cat((up, gate))",
         "tests/unit/hf/test_weight_mapping.py"),
        ("evaluation/bootstrap.py", "statistic(drawn @ values / units)",
         "statistic(drawn @ values)", "tests/unit/evaluation"),
        ("training/monitoring/metrics.py", "values = {name: value for name, value in "
         "values.items() if math.isfinite(value)}", "pass", "tests/unit/training/test_metrics.py"),
    )
]  # fmt: skip


def main() -> None:
    words = sys.argv[1:]
    chosen = [each for each in MUTATIONS if any(w in each.file + each.tests for w in words or [""])]
    sys.path = [path for path in sys.path if Path(path or ".").resolve() != ROOT]
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    for name in LIBRARIES:
        __import__(name)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
        for file in filter(None, files):
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, copy / file)
        for mutation in chosen:
            began = time.monotonic()
            is_found = find(mutation, copy)
            missed += not is_found
            said = "found" if is_found else "MISSED"
            seconds = f"{time.monotonic() - began:.0f} s"
            print(f"{said} in {seconds}: {mutation.file}: {mutation.wrong!r}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mistakes are found")
    sys.exit(missed > 0)


def find(mutation: Mutation, copy: Path) -> bool:
    """Run the tests on a copy with the mistake; return whether one fails."""
    file = copy / "diffmegatron" / mutation.file
    code = file.read_text()
    file.write_text(code.replace(mutation.right, mutation.wrong))
    try:
        process = os.fork()
        if process == 0:
            os._exit(run_tests(mutation.tests.split(), copy))
        _, status = os.waitpid(process, 0)
    finally:
        file.write_text(code)
    # The status 1 of pytest means failed tests; others mean that it could not run them.
    assert os.waitstatus_to_exitcode(status) in (0, 1), (copy / "output").read_text()[-3000:]
    return os.waitstatus_to_exitcode(status) == 1


def run_tests(arguments: list[str], copy: Path) -> int:
    import pytest

    output = os.open(copy / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copy)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tests", "diffmegatron"):
            del sys.modules[name]
    sys.path.insert(0, str(copy))
    # A .pyc file of the code without the mistake may have the same size and time.
    sys.dont_write_bytecode = True
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments]))


if __name__ == "__main__":
    main()

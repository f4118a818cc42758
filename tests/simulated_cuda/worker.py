"""Process that runs cases on a simulated GPU; ``tests/simulated_cuda/simulate.py`` starts it.

A case is one rank of one recipe. The recording of a case contains its memory, its collectives and
the other observations of the simulation. The arguments of the process are the compiled library that
simulates the CUDA device, and a folder. The process reads the cases from ``cases.json`` in the
folder, and writes the recording or the error of each case into a file in ``results/`` of the
folder.
"""

import ctypes
import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.simulated_cuda.recording import Case


def main() -> None:
    library, folder = map(Path, sys.argv[1:])
    cases = [Case(**_tuples(each)) for each in json.loads((folder / "cases.json").read_text())]
    import_everything(library)
    for number, case in enumerate(cases):
        process = os.fork()
        if process == 0:
            with suppress(BaseException):
                write(case, folder / "results" / str(number))
            os._exit(0)
        os.waitpid(process, 0)


def import_everything(library: Path) -> None:
    """Install the simulated GPU, then import the modules that all cases need."""
    # Load the library before torch is imported, because torch looks for CUDA's hooks only once.
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    from tests.simulated_cuda import device

    device.install()
    from diffmegatron.optim.zero import import_deepspeed

    import_deepspeed()
    for module in (
        "diffmegatron.training.trainer",
        "tests.simulated_cuda.step",
        # On a GPU, every engine of DeepSpeed imports this module, which imports Inductor.
        "deepspeed.compile.backend",
    ):
        importlib.import_module(module)
    # Exclude the imported objects from garbage collection, so that it is fast in each case.
    gc.freeze()


def write(case: Case, file: Path) -> None:
    try:
        plain = run(case).to_plain()
    except BaseException:
        plain = {"error": traceback.format_exc()}
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(plain))
    unfinished.rename(file)


def run(case: Case) -> Any:
    """Run a case and return its recording; a process can run only one case."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from diffmegatron.config.load import load_stages
    from tests.simulated_cuda import device
    from tests.simulated_cuda.recorder import Recorder

    device.join_as(case.rank, case.world_size)
    if case.prepare is not None:
        _function(case.prepare)()
    recipe = load_stages(case.recipe, case.overrides)[case.stage]
    recorder = Recorder()
    device.record_with(recorder)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        outcome = _function(case.run)(recipe, case, recorder)
    return recorder.recording(outcome)


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _tuples(plain: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}


if __name__ == "__main__":
    main()

"""What every node of a job is checked for before its first step, in less than a minute.

Each rank looks at its own machine, all tell each other what they have found, and all come to the
same decision. A machine that is unlike the others is not fit, and the next attempt goes without
it; what is wrong on all of them is for a person.
"""

import os
import shutil
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from pydantic import Field
from torch import distributed

from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.schema import Recipe
from diffmegatron.data.index.corpus_manifest import read_manifest
from diffmegatron.data.index.verify_corpus import check_sizes
from diffmegatron.errors import UnfitNodeError, UserError
from diffmegatron.files import clipped, reason, shown, write_durably
from diffmegatron.model.accounting import count_parameters
from diffmegatron.operations.attempt import commit, versions
from diffmegatron.parallel.default_group import default_group
from diffmegatron.parallel.launcher import read_launch
from diffmegatron.section import Section

# Once all are there; until then they wait for each other as a run does.
_TIMEOUT = timedelta(minutes=5)
# Bytes that a rank writes and sends; sizes of the product's matrices.
_WRITTEN = 1 << 26
_REDUCED = {"cpu": 1 << 22, "cuda": 1 << 28}
_MATRIX = {"cpu": 512, "cuda": 8192}
_REPEATS, _PRODUCTS = 5, 20
# Of a checkpoint, per parameter: the weight and two moments in float32.
_STATE_BYTES = 12
# What a machine may differ by from the others' median, and its clock from theirs in seconds.
_SLOWER, _CLOCK_SECONDS = 2.0, 5.0
_FREE_SHARE = 0.9
REPORT = "preflight.json"
_NO_GPU = "no GPU for LOCAL_RANK"


class Findings(Section):
    """What one rank has found on its machine.

    Attributes:
        host: its name.
        problem: what it cannot do at all; empty: nothing.
        memory_free: share of its GPU's memory; 1 on processors.
        product_seconds: of a matrix product, the best of five.
        write_rate: bytes/s into ``run_dir``, flushed.
        space: bytes free there.
        clock: seconds since 1970, read by all ranks at once.
        versions: of the code and its libraries, with its git commit.
        reduce_rate: bytes/s of an all-reduce among all ranks: bytes of the tensor over seconds.
    """

    host: str
    problem: str = ""
    memory_free: float = 1.0
    product_seconds: float = 0.0
    write_rate: float = 0.0
    space: int = 0
    clock: float = 0.0
    versions: dict[str, str] = Field(default_factory=dict)
    reduce_rate: float = 0.0


def check_nodes(recipes: Sequence[Recipe], folder: Path | None) -> None:
    """Look at this machine, hear of the others, and decide.

    Args:
        recipes: the stages of a run.
        folder: of the attempt, for ``preflight.json``; None: it is not written.

    Raises:
        UnfitNodeError: this machine is not fit.
        UserError: no machine is, or the disk has no space for two checkpoints.
        MachineError: the ranks cannot meet.
    """
    launch = read_launch()
    findings = _on_this_machine(recipes)
    if findings.problem.startswith(_NO_GPU):
        raise UnfitNodeError(findings.problem)  # without one it cannot even tell the others
    with default_group(_TIMEOUT):
        findings = findings.model_copy(update=_together())
        every: list[Findings] = [findings] * launch.ranks
        distributed.all_gather_object(every, findings)
    if launch.rank == 0 and folder is not None:
        lines = ",\n".join(each.model_dump_json() for each in every)
        write_durably(folder / REPORT, f"[{lines}]\n".encode())
    problems = find_problems(every, _space(recipes[-1]), recipes[-1].run_dir)
    if len(problems) == launch.ranks:
        raise UserError(problems[launch.rank])
    if launch.rank in problems:
        raise UnfitNodeError(problems[launch.rank])
    if launch.rank == 0 and not problems:
        print(_summary(every), flush=True)


def _space(recipe: Recipe) -> int:
    """Bytes of two checkpoints; of one where the older ones go and there are some."""
    is_steady = recipe.checkpoint.keep_last and CheckpointStore(Path(recipe.run_dir)).steps()
    return (1 if is_steady else 2) * count_parameters(recipe.model).total * _STATE_BYTES


def find_problems(every: Sequence[Findings], space: int, run_dir: str) -> dict[int, str]:
    """What is wrong, by rank.

    Args:
        every: rank's findings.
        space: bytes that ``run_dir`` must have free.
        run_dir: for the sentence.
    """
    problems: dict[int, str] = {}
    product = statistics.median(each.product_seconds for each in every)
    clock = statistics.median(each.clock for each in every)
    usual = Counter(tuple(sorted(each.versions.items())) for each in every).most_common(1)[0][0]
    for rank, each in enumerate(every):
        problem = each.problem
        if not problem and each.memory_free < _FREE_SHARE:
            problem = (
                f"{each.memory_free:.0%} of its GPU's memory are free; another process is on it"
            )
        if not problem and each.product_seconds > _SLOWER * product:
            problem = (
                f"a matrix product takes {1e3 * each.product_seconds:.1f} ms, and "
                f"{1e3 * product:.1f} ms on the others"
            )
        if not problem and abs(each.clock - clock) > _CLOCK_SECONDS:
            problem = f"its clock is {each.clock - clock:+.1f} s off the others'"
        if not problem and each.space < space:
            problem = (
                f"run_dir {clipped(run_dir)} has {each.space / 2**30:.1f} GiB free, and the next "
                f"saves take {space / 2**30:.1f}"
            )
        if not problem and tuple(sorted(each.versions.items())) != usual:
            problem = _other_versions(each.versions, dict(usual))
        if problem:
            problems[rank] = problem
    return problems


def _other_versions(own: dict[str, str], usual: dict[str, str]) -> str:
    name = next(name for name in sorted({*own, *usual}) if own.get(name) != usual.get(name))
    return (
        f"{name} is {own.get(name, 'not there')}, and {usual.get(name, 'not there')} on the others"
    )


def _on_this_machine(recipes: Sequence[Recipe]) -> Findings:
    """All that needs no other rank; the first thing that does not work is the problem."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    wanted = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    gpus, local_rank = torch.cuda.device_count(), read_launch().local_rank
    if (gpus or (wanted.isdecimal() and int(wanted))) and local_rank >= gpus:
        problem = f"{_NO_GPU} {local_rank}: {host} shows {gpus} GPUs"
        return Findings(host=host, problem=problem)
    values: dict[str, object] = {"host": host, "versions": _versions()}
    try:
        for recipe in recipes:
            for source in recipe.data.sources:
                check_sizes(source.path, read_manifest(source.path))
        if gpus:
            torch.cuda.set_device(local_rank)
            free, total = torch.cuda.mem_get_info()
            values["memory_free"] = free / total
        values["product_seconds"] = _product_seconds()
        values["write_rate"], values["space"] = _disk(Path(recipes[-1].run_dir))
    except (UserError, RuntimeError) as error:  # torch's of a GPU that fails
        values["problem"] = clipped(str(error))
    return Findings.model_validate(values)


def _versions() -> dict[str, str]:
    found, revision = versions(), commit()
    return found if revision is None else found | {"commit": revision}


def _product_seconds() -> float:
    """Of a product of two square matrices, in bfloat16 on a GPU and float32 on a processor.

    On a processor by the time that it spent: what else runs there for a moment is no fault of it.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    matrix = torch.ones(_MATRIX[kind], _MATRIX[kind], device=kind, dtype=dtype)
    clock = time.perf_counter if kind == "cuda" else time.process_time
    return min(_seconds(lambda: matrix @ matrix, clock) for _ in range(_PRODUCTS))


def _seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = clock()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - started


def _disk(run_dir: Path) -> tuple[float, int]:
    """Bytes per second that this rank writes into ``run_dir``, and the bytes that are free."""
    # What a killed check leaves the next one writes over.
    path = run_dir / f"preflight_{read_launch().rank:05}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            seconds = _seconds(lambda: write_durably(path, bytes(_WRITTEN)))
        finally:
            path.unlink(missing_ok=True)
        return _WRITTEN / seconds, shutil.disk_usage(run_dir).free
    except OSError as error:
        raise UserError(f"cannot write in run_dir {shown(run_dir)}: {reason(error)}") from None


def _together() -> dict[str, float]:
    """What all ranks do at once: an all-reduce, and a look at the clock."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    tensor = torch.ones(_REDUCED[kind] // 4, device=kind)
    distributed.all_reduce(tensor)  # the first one connects
    best = min(_seconds(lambda: distributed.all_reduce(tensor)) for _ in range(_REPEATS))
    distributed.barrier()
    return {"clock": time.time(), "reduce_rate": tensor.nbytes / best}


def _summary(every: Sequence[Findings]) -> str:
    slowest = min(every, key=lambda each: each.write_rate)
    return (
        f"preflight: {len(every)} ranks on {len({each.host for each in every})} nodes, "
        f"all-reduce {min(each.reduce_rate for each in every) / 1e9:.2f} GB/s, matrix product "
        f"{1e3 * max(each.product_seconds for each in every):.1f} ms, disk "
        f"{slowest.write_rate / 1e6:.0f} MB/s per rank at least"
    )

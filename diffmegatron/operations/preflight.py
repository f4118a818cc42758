"""``diffmegatron preflight``: check every node of a job before training, in less than a minute.

Each rank checks its own machine. A machine is unfit if it has a problem that not all ranks have.
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

from diffmegatron.attempts.ends import PREFLIGHT
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.parallel_config import ParallelConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.data.index.corpus_manifest import check_sizes, read_corpus_manifest
from diffmegatron.errors import UnfitNodeError, UserError
from diffmegatron.files import format_path, os_error_text, shorten, write_durably
from diffmegatron.model.accounting.parameters import count_parameters
from diffmegatron.model.layers.fp8 import fp8_problem
from diffmegatron.operations.device_bits import (
    UNSTEADY,
    computed_bits,
    device_name,
    with_kernels_of_rank_0,
)
from diffmegatron.operations.installed_code import git_commit, library_versions
from diffmegatron.parallel.default_group import default_group
from diffmegatron.parallel.launcher import read_launch
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.plan.rank_layout import nodes_in_words, ranks_in_words
from diffmegatron.section import Section

# Timeout of each collective operation.
_TIMEOUT = timedelta(minutes=5)
# Bytes that each rank writes to the disk.
_WRITTEN = 1 << 26
# Bytes of the tensor in the timed all-reduce.
_REDUCED = {"cpu": 1 << 22, "cuda": 1 << 28}
# Rows and columns of the square matrices in the timed matrix product.
_MATRIX = {"cpu": 512, "cuda": 8192}
# Repetitions of the all-reduce and of the matrix product; the fastest one counts.
_REDUCTIONS, _PRODUCTS = 5, 20
# A checkpoint stores at most three float32 values per parameter: the weight and Adam's two moments.
_STATE_BYTES = 12
# Largest accepted matrix product time / median, and clock difference from the median in seconds.
_MAX_SLOWDOWN, _CLOCK_SECONDS = 2.0, 5.0
# Smallest accepted free share of a GPU's memory.
_FREE_SHARE = 0.9
_NO_GPU = "no GPU for LOCAL_RANK"


class Findings(Section):
    """Findings of one rank about its machine.

    Attributes:
        problem: sentence about the first check that failed; empty: none failed.
        memory_free: free share of the GPU's memory, from 0 to 1; 1 without a GPU.
        product_seconds: seconds of the fastest matrix product.
        write_rate: bytes per second written to ``run_dir`` and synced to the disk.
        space: free bytes on the file system of ``run_dir``.
        clock: seconds since 1970, read by all ranks directly after a barrier.
        versions: versions of this package and its libraries; the git commit under "commit".
        device: name of the GPU, or of the CPU with its threads; devices of one name compute the
            same bits.
        bits: checksum of each computation of :func:`computed_bits`.
        reduce_rate: bytes per second of the fastest all-reduce.
    """

    host: str
    problem: str = ""
    memory_free: float = 1.0
    product_seconds: float = 0.0
    write_rate: float = 0.0
    space: int = 0
    clock: float = 0.0
    versions: dict[str, str] = Field(default_factory=dict)
    device: str = ""
    bits: dict[str, int] = Field(default_factory=dict)
    reduce_rate: float = 0.0


def check_nodes(recipes: Sequence[Recipe], folder: Path | None) -> None:
    """Check the machines of all ranks, and raise an error if this rank's machine is unfit.

    Every rank must call this function. Rank 0 writes ``preflight.json`` into ``folder``, the
    directory of the attempt.

    Raises:
        UnfitNodeError: this machine has no GPU for this rank, or a problem that not all ranks have.
        UserError: all ranks have a problem.
        MachineError: the ranks cannot connect to each other.
    """
    launch = read_launch()
    findings = _check_this_machine(recipes)
    if findings.problem.startswith(_NO_GPU):
        raise UnfitNodeError(findings.problem)  # NCCL cannot connect without a GPU.
    with default_group(_TIMEOUT), process_groups(ParallelConfig(), seed=0) as parallel_state:
        resolved = with_kernels_of_rank_0(recipes, parallel_state.device)
        findings = _with_bits(findings, resolved, parallel_state.device)
        findings = findings.model_copy(update=_measure_collectives())
        every: list[Findings] = [findings] * launch.ranks
        distributed.all_gather_object(every, findings)
    if launch.rank == 0 and folder is not None:
        lines = ",\n".join(each.model_dump_json() for each in every)
        write_durably(folder / PREFLIGHT, f"[{lines}]\n".encode())
    problems = find_problems(every, _needed_space(recipes[-1]), recipes[-1].run_dir)
    if len(problems) == launch.ranks:
        raise UserError(problems[launch.rank])
    if launch.rank in problems:
        raise UnfitNodeError(problems[launch.rank])
    if launch.rank == 0 and not problems:
        print(_summary(every), flush=True)


def _needed_space(recipe: Recipe) -> int:
    """Return the bytes that must be free in ``run_dir``: the size of two checkpoints, or of one."""
    # An old checkpoint is removed only after the next one is written. If keep_last is set and the
    # run has a checkpoint, only one more must fit.
    removes_old = recipe.checkpoint.keep_last and CheckpointStore(Path(recipe.run_dir)).steps()
    return (1 if removes_old else 2) * count_parameters(recipe.model).total * _STATE_BYTES


def find_problems(every: Sequence[Findings], space: int, run_dir: str) -> dict[int, str]:
    """Compare the findings of all ranks, and return a dict: rank -> its first problem.

    ``space`` is the number of bytes that must be free in ``run_dir``.
    """
    problems: dict[int, str] = {}
    product = statistics.median(each.product_seconds for each in every)
    clock = statistics.median(each.clock for each in every)
    usual = Counter(tuple(sorted(each.versions.items())) for each in every).most_common(1)[0][0]
    for rank, each in enumerate(every):
        problem = each.problem
        if not problem and each.memory_free < _FREE_SHARE:
            problem = (
                f"only {each.memory_free:.0%} of its GPU's memory is free; another process uses it"
            )
        if not problem and each.product_seconds > _MAX_SLOWDOWN * product:
            problem = (
                f"a matrix product takes {1e3 * each.product_seconds:.1f} ms, and "
                f"{1e3 * product:.1f} ms on the other ranks"
            )
        if not problem and abs(each.clock - clock) > _CLOCK_SECONDS:
            problem = f"its clock differs from the others' by {each.clock - clock:+.1f} s"
        if not problem and each.space < space:
            problem = (
                f"run_dir {shorten(run_dir)} has {each.space / 2**30:.1f} GiB free, and the next "
                f"saves need {space / 2**30:.1f} GiB"
            )
        if not problem and tuple(sorted(each.versions.items())) != usual:
            problem = _version_problem(each.versions, dict(usual))
        if not problem:
            problem = _bits_problem(each, every)
        if problem:
            problems[rank] = problem
    return problems


def _version_problem(own: dict[str, str], usual: dict[str, str]) -> str:
    name = next(name for name in sorted({*own, *usual}) if own.get(name) != usual.get(name))
    return (
        f"{name} is {own.get(name, 'missing')}, and {usual.get(name, 'missing')} on the other ranks"
    )


def _bits_problem(own: Findings, every: Sequence[Findings]) -> str:
    """Return a sentence if this rank computes other bits than most ranks with such a device.

    Of bits that are equally frequent, steady ones count as right, and then the lowest rank's.
    """
    peers = {rank: each for rank, each in enumerate(every) if each.device == own.device}
    for name, checksum in own.bits.items():
        found = {rank: each.bits[name] for rank, each in peers.items() if name in each.bits}
        counts = Counter(found.values())
        usual = max(counts, key=lambda each: (counts[each], each != UNSTEADY))
        if checksum != usual and usual != UNSTEADY:
            other = next(rank for rank, each in found.items() if each == usual)
            how = "other bits in each repetition" if checksum == UNSTEADY else "other bits"
            return f"{own.device} computes {name} with {how}, unlike rank {other}"
    return ""


def _check_this_machine(recipes: Sequence[Recipe]) -> Findings:
    """Run the checks that need no other rank, and stop at the first check that fails."""
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
                check_sizes(source.path, read_corpus_manifest(source.path))
        device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(device)
            free, total = torch.cuda.mem_get_info()
            values["memory_free"] = free / total
        for fp8 in [recipe.training.fp8 for recipe in recipes if recipe.training.fp8 is not None]:
            if (unfit := fp8_problem(fp8.recipe)) is not None:
                raise UserError(unfit)
        values["product_seconds"] = _product_seconds()
        values["device"] = device_name(device)
        values["write_rate"], values["space"] = _disk(Path(recipes[-1].run_dir))
    except Exception as error:  # torch raises errors of many classes if a GPU fails.
        values["problem"] = _sentence(error)
    return Findings.model_validate(values)


def _with_bits(findings: Findings, recipes: Sequence[Recipe], device: torch.device) -> Findings:
    """Return the findings with the bits that this rank computes, unless a check has failed."""
    if findings.problem:
        return findings
    try:
        found: dict[str, object] = {"bits": computed_bits(recipes, device)}
    except Exception as error:  # Triton raises errors of many classes, too.
        found = {"problem": _sentence(error)}
    return findings.model_copy(update=found)


def _sentence(error: Exception) -> str:
    is_sentence = isinstance(error, UserError)
    return shorten(str(error) if is_sentence else f"{type(error).__name__}: {error}")


def _versions() -> dict[str, str]:
    commit = git_commit()
    return library_versions() | ({} if commit is None else {"commit": commit})


def _product_seconds() -> float:
    """Return the seconds (on a CPU: of CPU time) of the fastest of several matrix products."""
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
    """Return the bytes per second written to ``run_dir``, and the free bytes of its file system."""
    path = run_dir / f"preflight_{read_launch().rank:05}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            seconds = _seconds(lambda: write_durably(path, bytes(_WRITTEN)))
        finally:
            path.unlink(missing_ok=True)
        return _WRITTEN / seconds, shutil.disk_usage(run_dir).free
    except OSError as error:
        raise UserError(
            f"cannot write in run_dir {format_path(run_dir)}: {os_error_text(error)}"
        ) from None


def _measure_collectives() -> dict[str, float]:
    """Measure ``clock`` and ``reduce_rate`` of :class:`Findings` together with all other ranks."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    tensor = torch.ones(_REDUCED[kind] // 4, device=kind)
    distributed.all_reduce(tensor)  # The first all-reduce also opens the connections.
    best = min(_seconds(lambda: distributed.all_reduce(tensor)) for _ in range(_REDUCTIONS))
    distributed.barrier()
    return {"clock": time.time(), "reduce_rate": tensor.nbytes / best}


def _summary(every: Sequence[Findings]) -> str:
    slowest = min(every, key=lambda each: each.write_rate)
    names = {name for each in every for name in each.bits}
    unsteady = {name for each in every for name in each.bits if each.bits[name] == UNSTEADY}
    rate = min(each.reduce_rate for each in every)
    # With one rank, nothing is sent.
    reduced = f"all-reduce {rate / 1e9:.2f} GB/s, " if len(every) > 1 else ""
    return (
        f"preflight: {ranks_in_words(len(every))} on "
        f"{nodes_in_words(len({each.host for each in every}))}, {reduced}matrix product "
        f"{1e3 * max(each.product_seconds for each in every):.1f} ms, disk "
        f"at least {slowest.write_rate / 1e6:.0f} MB/s per rank, "
        f"{len(names - unsteady)} computations with equal bits"
    )

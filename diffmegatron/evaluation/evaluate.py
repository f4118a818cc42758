"""``diffmegatron evaluate``: run every suite (benchmark) on every target (model)."""

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import chain
from pathlib import Path

from diffmegatron.errors import NotFiniteError, UserError
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.result_file import (
    NOT_FINITE,
    Measured,
    Ranks,
    SharedRecords,
    check_records,
    digest,
)
from diffmegatron.evaluation.results import REPORT, write_results
from diffmegatron.evaluation.suite import Item, Suite
from diffmegatron.evaluation.suites import MAX_DEFAULT_CONTEXT, make_suites
from diffmegatron.evaluation.targets import Target, find_targets, have_one_tokenizer
from diffmegatron.evaluation.vllm_model import VllmModel, check_served
from diffmegatron.file_lock import FileLock
from diffmegatron.files import check_utf8, format_path
from diffmegatron.parallel.default_group import default_group
from diffmegatron.parallel.launcher import read_launch

_LOCK = "evaluate.lock"
# Timeout of collectives: processes may finish their shares of the items at very different times.
_TIMEOUT = timedelta(days=1)
# Prefixes of the environment variables that a launcher sets.
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_")
_SECONDS_BETWEEN_LINES = 5.0


def evaluate(
    paths: Sequence[Path],
    names: Sequence[str],
    out: Path,
    settings: EvaluateSettings,
    overrides: Sequence[str],
) -> Path:
    """Run suites on targets, write the report, and return the path of ``report.html``.

    An interrupted evaluation of the same suites and targets is resumed. If a launcher (torchrun)
    has started several processes, they divide the items of a suite among themselves. For a suite
    whose ``is_parallel`` is false, rank 0 scores all items.

    Args:
        settings: data of the suites, and how to compute.
        overrides: settings of suites, as ``SUITE.KEY=VALUE``.
    """
    options = settings.suite_fields()
    given = chain.from_iterable(
        value if isinstance(value, tuple) else (value,) for value in options.values()
    )
    check_utf8(*paths, out, *map(Path, given))
    lock = FileLock(out / _LOCK, f"--out {format_path(out)}", "give another --out")
    launch = read_launch()
    ranks = Ranks(launch.rank, launch.ranks)
    group = default_group(_TIMEOUT) if ranks.count > 1 else nullcontext()
    with group, lock if ranks.is_main else nullcontext():
        ranks.barrier()
        targets = find_targets(paths, out, serving=settings.engine == "vllm")
        export_targets(targets, ranks)
        suites = make_suites(names, options, overrides, lambda: shortest_context(targets))
        if settings.engine == "vllm":
            check_served(suites, targets, settings, ranks.count)
        _check(suites, targets)
        # Read the data of all suites before the first one runs, because a suite may take hours.
        items = {
            (suite.name, target.name): _items(suite, target)
            for suite in suites
            for target in targets
        }
        measured: dict[str, dict[str, Measured]] = {suite.name: {} for suite in suites}
        kind = VllmModel if settings.engine == "vllm" else Model
        for suite in suites if len(targets) > 1 else ():
            rounds = (suite.rounds(items[suite.name, target.name]) for target in targets)
            for each in zip(*rounds, strict=True):
                for target, of_round in zip(targets, each, strict=True):
                    of_suite = items[suite.name, target.name]
                    model = kind(target, settings)
                    with _open_records(suite, of_suite, model, out, ranks) as file:
                        fitting, _ = _divide(of_round, target)
                        _score_items(suite, model, fitting, file, ranks, suite.passes[0])
        for target in targets:
            model = kind(target, settings)
            for suite in suites:
                of_suite = items[suite.name, target.name]
                measured[suite.name][target.name] = _run(suite, of_suite, model, out, ranks)
        if ranks.is_main:
            write_results(out, suites, targets, measured, settings)
        return out / REPORT


def export_targets(targets: Sequence[Target], ranks: Ranks) -> None:
    """Export the checkpoints among the targets to Hugging Face folders, if there are several ranks.

    Rank 0 starts a new process for each export, because an export needs process groups of a single
    rank. With one rank, the first access to :attr:`Target.folder` exports a checkpoint.
    """
    if ranks.count == 1:
        return
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)
    }
    for target in targets if ranks.is_main else ():
        if target.checkpoint is not None and not target.export.exists():
            command = ["-m", "diffmegatron", "export", str(target.checkpoint), str(target.export)]
            export = subprocess.run([sys.executable, *command], env=environment, check=False)
            if export.returncode:
                raise UserError(
                    f"the export of {format_path(target.checkpoint)} failed with the error above; "
                    "correct it, or give a Hugging Face folder"
                )
    ranks.barrier()


def shortest_context(targets: Sequence[Target]) -> int:
    """Return the default context of suites in tokens: the targets' shortest, but at most 2,048."""
    return int(min(MAX_DEFAULT_CONTEXT, *(target.context for target in targets)))


def _check(suites: Sequence[Suite], targets: Sequence[Target]) -> None:
    for target in targets:
        _ = target.fingerprint  # refuses a folder without usable weights
    for suite in suites:
        if suite.needs_one_tokenizer and not have_one_tokenizer(targets):
            raise UserError(
                f"suite {suite.name!r} counts tokens, and the tokenizers of "
                f"{', '.join(target.name for target in targets)} differ; evaluate targets with "
                "different tokenizers in separate commands"
            )
        for target in targets:
            if not suite.reads_runs:
                target.check_vocabulary()
            suite.check(target)


def _items(suite: Suite, target: Target) -> Sequence[Item]:
    items = suite.items(target)
    keys = {item.key for item in items}
    if len(keys) < len(items):
        raise ValueError(f"suite {suite.name!r} has {len(items)} items, but only {len(keys)} keys")
    if not items:
        raise UserError(f"suite {suite.name!r} has no items; give data that are not empty")
    return items


@contextmanager
def _open_records(
    suite: Suite, items: Sequence[Item], model: Model, out: Path, ranks: Ranks
) -> Iterator[SharedRecords]:
    """Open the records of a suite and a target, and check those of an earlier evaluation."""
    target = model.target
    header = {
        "suite": suite.name,
        "settings": suite.model_dump(mode="json", exclude=set(suite.follow_up_settings)),
        "items": digest(items),
        "weights": target.fingerprint,
    }
    if not suite.reads_runs:
        header["dtype"] = model.computing.dtype_of(target)
        header["engine"] = model.computing.engine
    with SharedRecords(out / suite.name / f"{target.name}.jsonl", header, ranks) as file:
        # Check the records of an earlier evaluation before scoring, which may take hours.
        check_records(file.records.values(), suite.means)
        yield file


def _divide(items: Sequence[Item], target: Target) -> tuple[list[Item], list[Item]]:
    """Return the items that fit the target's context, and those that are too long."""
    # Reading `target.context` may export a checkpoint, so skip it if `tokens` is 0.
    long = [item for item in items if item.tokens and item.tokens > target.context]
    too_long = {item.key for item in long}
    return [item for item in items if item.key not in too_long], long


def _run(suite: Suite, items: Sequence[Item], model: Model, out: Path, ranks: Ranks) -> Measured:
    target, measured = model.target, Measured()
    with _open_records(suite, items, model, out, ranks) as file:
        fitting, long = _divide(items, target)
        _score_items(suite, model, fitting, file, ranks, suite.passes[0])
        if long:
            measured.remarks.append(
                f"{len(long)} of {len(items)} items need a context of up to "
                f"{max(item.tokens for item in long):,} tokens, and max_position_embeddings is "
                f"{target.context:,.0f}"
            )
        finite = [file.records[i.key] for i in fitting if NOT_FINITE not in file.records[i.key]]
        # Follow-ups need finite records of all items that fit the context.
        if len(finite) == len(fitting):
            more = suite.follow_ups(target, finite)
            _score_items(suite, model, more, file, ranks, suite.passes[1])
            fitting += more
        measured.records = {item.key: file.records[item.key] for item in fitting}
    bad = [key for key, record in measured.records.items() if NOT_FINITE in record]
    if bad:
        measured.remarks.append(
            f"{len(bad)} of {len(fitting)} items have numbers that are not finite, so no mean is "
            f"computed; the first is {bad[0]}: {measured.records[bad[0]][NOT_FINITE]}"
        )
        measured.records = {}
    return measured


def _score_items(
    suite: Suite,
    model: Model,
    items: Sequence[Item],
    file: SharedRecords,
    ranks: Ranks,
    pass_name: str,
) -> None:
    left = [item for item in items if item.key not in file.records]
    count = ranks.count if suite.is_parallel else 1
    share = left[ranks.rank :: ranks.count]
    own = share if suite.is_parallel else left if ranks.is_main else []
    if ranks.is_main:
        name = f"{suite.name}, {pass_name}," if pass_name else suite.name
        progress = _Progress(f"{name} on {model.target.name}", len(items), len(left), count)
    for key, record in suite.scores(model, own):
        if isinstance(record, NotFiniteError):
            record = {NOT_FINITE: str(record)}
        file.add(key, record)
        if ranks.is_main:
            progress.advance()
    file.gather([item.key for item in items])


class _Progress:
    """Printer of progress lines to stderr on rank 0, with the estimated remaining time (ETA).

    For each item that rank 0 scores, the count advances by ``processes``.
    """

    def __init__(self, name: str, total: int, left: int, processes: int) -> None:
        self._name, self._total, self._left = name, total, left
        self._first, self._processes = left, processes
        self._started, self._printed = time.monotonic(), -math.inf
        if left < total:
            self._print(f"{total - left} of {total} items have records already")

    def advance(self) -> None:
        self._left = max(0, self._left - self._processes)
        now = time.monotonic()
        if now - self._printed < _SECONDS_BETWEEN_LINES and self._left:
            return
        self._printed = now
        per_item = (now - self._started) / (self._first - self._left)
        eta = timedelta(seconds=round(per_item * self._left))
        done = self._total - self._left
        self._print(f"{done}/{self._total} items ({done / self._total:.0%}) | ETA {eta}")

    def _print(self, text: str) -> None:
        print(f"{self._name} | {text}", file=sys.stderr, flush=True)

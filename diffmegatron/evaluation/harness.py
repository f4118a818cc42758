"""Use EleutherAI's lm-eval as a library: load its tasks, and compute their metrics.

Importing this module imports lm-eval (the extra ``evaluation``).
"""

import difflib
import io
import json
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lm_eval.api.group import Group
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean, stderr_for_metric
from lm_eval.api.task import Task
from lm_eval.defaults import DEFAULT_MAX_GEN_TOKS, DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.models.utils import (
    normalize_gen_kwargs,
)
from lm_eval.tasks import TaskManager

from diffmegatron.errors import NotFiniteError, UserError
from diffmegatron.files import format_path, shorten
from diffmegatron.parallel.launcher import read_launch

# Bootstrap resamples for metrics whose standard error has no formula. lm-eval draws 100,000, which
# takes minutes. With 1,000 resamples, the standard error has a relative error of about 2%.
_BOOTSTRAP_ITERATIONS = 1000
# Metrics that are slow to compute. Only 100 resamples are drawn for them, as in lm-eval.
_SLOW_METRICS = ("bleu", "chrf", "chrf++", "ter")


@dataclass(frozen=True)
class Question:
    """A question of a task (in lm-eval's words, a document), with its requests to the model.

    Attributes:
        shots: number of examples before the question.
        number: position of the question within the task, from 0.
        arguments: arguments of each request. They depend on the task's ``OUTPUT_TYPE``:
            (prompt, continuation) for ``loglikelihood`` and ``multiple_choice``; (text,) for
            ``loglikelihood_rolling``; (prompt, settings of decoding) for ``generate_until``.
        instances: the requests as ``Instance`` objects of lm-eval.
    """

    task: str
    shots: int
    number: int
    arguments: list[tuple[Any, ...]]
    instances: list[Instance] = field(repr=False)


class Tasks:
    """The tasks of lm-eval that an evaluation uses, and the groups of tasks, by name.

    ``names`` contains names of tasks, groups and tags. ``include_path`` is a folder with further
    tasks. Relative paths in task configurations refer to ``data_dir``. If ``data_dir`` has a folder
    with the name of a Hugging Face data set, e.g. ``allenai/ai2_arc``, that folder is read instead.
    """

    def __init__(self, names: Sequence[str], include_path: Path | None, data_dir: Path) -> None:
        for path in (data_dir, include_path):
            if path is not None and not path.is_dir():
                raise UserError(
                    f"{format_path(path)} is not a folder; give the folder of the tasks' files"
                )
        self.tasks: dict[str, Task] = {}
        self.groups: dict[str, Group] = {}
        index = _index(names, include_path)
        # Seed the global random generators, with which some tasks select documents.
        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        for number, name in enumerate(names, start=1):
            _print(f"loading {name} ({number} of {len(names)}), from local files or the hub")
            try:
                with _quiet(), chdir(data_dir):
                    loaded = index.load(name)
            except Exception as error:  # lm-eval, datasets and tasks raise errors of any type.
                raise UserError(
                    f"lm-eval cannot load task {name!r}: {_described(error)}; its data set must "
                    "be on Hugging Face's hub and reachable, or below --data-dir, or in the "
                    "data_files of a task configuration in lm-eval.include_path"
                ) from None
            if twice := self.tasks.keys() & loaded["tasks"].keys():
                raise UserError(
                    f"lm-eval.tasks {list(names)} contain task {sorted(twice)[0]!r} twice; give "
                    "each task once"
                )
            self.tasks |= loaded["tasks"]
            self.groups |= loaded["groups"]
        for name, task in self.tasks.items():
            _check_supported(name, task)
        self._own_shots = {
            name: task.get_config("num_fewshot") for name, task in self.tasks.items()
        }

    def questions(
        self, shots: int | None, samples: int | None, chat_template: Callable[..., str] | None
    ) -> list[Question]:
        """Return the first ``samples`` questions of every task, with their prompts.

        ``shots`` is the number of examples before a question; None stands for each task's own
        number. If ``samples`` is None, all questions are returned. ``chat_template`` renders
        messages as a prompt; without it, prompts are plain text.
        """
        questions: list[Question] = []
        for name, task in self.tasks.items():
            own = self._own_shots[name]
            if own == 0 and shots:
                raise UserError(
                    f"task {name!r} has num_fewshot 0 in its configuration, which lm-eval never "
                    "changes; leave out lm-eval.shots for it"
                )
            task.set_config("num_fewshot", shots if shots is not None else own or 0)
            task.set_fewshot_seed(DEFAULT_OTHER_SEED)
            try:
                with _quiet():
                    task.build_all_requests(
                        limit=samples,
                        apply_chat_template=chat_template is not None,
                        fewshot_as_multiturn=chat_template is not None,
                        chat_template=chat_template,
                    )
            except Exception as error:  # Functions of a task raise errors of any type.
                raise UserError(
                    f"lm-eval cannot build the prompts of task {name!r} with "
                    f"{task.get_config('num_fewshot')} examples: {_described(error)}"
                ) from None
            by_number: dict[int, Question] = {}
            for instance in task.instances:
                question = by_number.setdefault(
                    instance.doc_id,
                    Question(name, task.get_config("num_fewshot"), instance.doc_id, [], []),
                )
                question.arguments.append(instance.args)
                question.instances.append(instance)
            questions += by_number.values()
        return questions

    def metrics(self, question: Question, answers: Sequence[Any]) -> dict[str, Any]:
        """Return the values of a question's metrics by metric and filter, such as ``acc,none``.

        ``answers`` are from :meth:`Encoder.answers`. A value is a number, or a list if the metric's
        aggregation needs several values. NaN and infinity raise a NotFiniteError.
        """
        task = self.tasks[question.task]
        for instance, answer in zip(question.instances, answers, strict=True):
            instance.resps = [answer] * instance.repeats
        for ensemble in task._filters:
            ensemble.apply(question.instances)
        doc = question.instances[0].doc
        values = {}
        for name in question.instances[0].filtered_resps:
            filtered = [instance.filtered_resps[name] for instance in question.instances]
            for metric, value in task.process_results(doc, filtered).items():
                values[f"{metric},{name}"] = _plain(value, metric)
        return values

    def is_mean(self, task: str, key: str) -> bool:
        """Return whether a task's metric, such as ``acc,none``, is a mean over its questions."""
        return self._aggregation(task, key) is mean

    def better(self, name: str, metric: str) -> Literal["higher", "lower"] | None:
        """Return whether higher or lower values of a metric, such as ``acc``, are better.

        The result is None if lm-eval does not define this, or if the tasks of a group disagree.
        """
        tasks = self.groups[name].get_all_tasks() if name in self.groups else [self.tasks[name]]
        directions = {task.higher_is_better().get(metric) for task in tasks} - {None}
        return None if len(directions) != 1 else "higher" if directions.pop() else "lower"

    def version(self, name: str) -> str:
        """Return the version of a task or group."""
        group = self.groups.get(name)
        return str(self.tasks[name].VERSION if group is None else group.version)

    def aggregate(
        self, values: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> dict[str, dict[str, Any]]:
        """Return lm-eval's results of tasks, and of groups that aggregate their tasks, by name.

        ``values`` maps each task to the :meth:`metrics` of its questions. A result contains the
        number of questions (``sample_len``) and, for each metric and filter, the value (such as
        ``acc,none``) and its standard error (``acc_stderr,none``). A number that lm-eval does not
        define is None.
        """
        results: dict[str, dict[str, Any]] = {}
        for name, metrics in values.items():
            results[name] = {"sample_len": len(metrics)}
            for key in dict.fromkeys(chain.from_iterable(metrics)):
                known = [each[key] for each in metrics if key in each]
                metric, filter_name = key.split(",", 1)
                aggregation = self._aggregation(name, key)
                results[name][key] = float(aggregation(known))
                iterations = 100 if metric in _SLOW_METRICS else _BOOTSTRAP_ITERATIONS
                results[name][f"{metric}_stderr,{filter_name}"] = _stderr(
                    aggregation, known, iterations
                )
        for name, group in self.groups.items():
            if group.has_aggregation:
                with _quiet():
                    of_group = group.aggregate(results)
                numbers = {key: each for key, each in of_group.items() if "," in key}
                results[name] = {"sample_len": of_group["sample_len"]} | {
                    key: None if isinstance(each, str) else float(each)
                    for key, each in numbers.items()
                }
        return results

    def _aggregation(self, task: str, key: str) -> Callable[[Sequence[Any]], float]:
        return self.tasks[task].aggregation().get(key.split(",", 1)[0], mean)


def _index(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """Return an index of lm-eval's tasks that contains all names.

    Reading lm-eval's own 14,000 tasks takes many seconds, so they are read only if needed.
    """
    folder = None if include_path is None else str(include_path.resolve())
    if folder is not None:
        with _quiet():
            index = TaskManager(include_path=folder, include_defaults=False)
        # This index lacks the tasks that come with lm-eval. A group or tag may contain them, so use
        # this index only if all names are tasks.
        if set(names) <= set(index.all_subtasks):
            return index
    _print("reading the index of the library's own tasks")
    with _quiet():
        index = TaskManager(include_path=folder)
    for name in names:
        if name not in index.task_index:
            near = difflib.get_close_matches(name, index.all_tasks, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"lm-eval has no task, group or tag {shorten(repr(name))}{hint}")
    return index


def _print(text: str) -> None:
    """Print a progress line on rank 0: both the index and the hub may need minutes."""
    if read_launch().rank == 0:
        print(f"lm-eval | {text}", file=sys.stderr, flush=True)


def _check_supported(name: str, task: Task) -> None:
    wrong = None
    if getattr(task, "UNSAFE_CODE", False):
        wrong = "runs code that the model writes"
    elif getattr(task, "MULTIMODAL", False):
        wrong = "shows pictures or sound to the model"
    elif task.OUTPUT_TYPE == "generate_until":
        settings = task.get_config("generation_kwargs") or {}
        if normalize_gen_kwargs(settings, DEFAULT_MAX_GEN_TOKS)["do_sample"]:
            wrong = "samples tokens, and only greedy decoding is supported"
    if wrong is not None:
        raise UserError(f"task {name!r} of lm-eval {wrong}; leave it out")


def _stderr(
    aggregation: Callable[[Sequence[Any]], float], values: Sequence[Any], iterations: int
) -> float | None:
    # By default lm-eval forks processes, which is not safe in a process with threads or a GPU.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    compute = stderr_for_metric(aggregation, iterations) if len(values) > 1 else None
    with _quiet():
        return None if compute is None else float(compute(values))


def _plain(value: Any, metric: str) -> Any:
    """Convert a metric's value to types of JSON, which have no NaN and no infinity."""
    try:
        return json.loads(
            json.dumps(value, allow_nan=False, default=lambda number: number.tolist())
        )
    except ValueError:
        raise NotFiniteError(f"{metric} is not finite") from None


def _described(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {' '.join(str(error).split())}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard output to stdout and stderr, and the libraries' log messages below level ERROR."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "huggingface_hub", "datasets")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)

"""Compare the suite ``lm-eval`` with lm-eval's own engine, ``lm_eval.simple_evaluate``.

    python -m tools.benchmarks lm_eval_engine

Both answer the same questions of multiple choice with the same small random model, which this
command writes. The engine receives the model through an adapter class. docs/design/lm_eval.md
shows the results. Writes docs/results/lm_eval_engine.json.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, suppress
from importlib.metadata import version
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from transformers import AutoConfig, AutoModelForCausalLM

from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.errors import NotFiniteError
from diffmegatron.evaluation.evaluate import evaluate
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings
from diffmegatron.evaluation.lm_eval_encoder import Encoder
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.requests import Answer, Request, Scoring
from diffmegatron.evaluation.targets import Target, find_targets
from diffmegatron.hf.tokenizer import write_tokenizer
from tools.benchmarks.json_report import write_json_report
from tools.paths import RESULTS

_WORDS = ("sun", "moon", "rain", "wind", "tree", "stone", "river", "cloud", "fire", "snow", "leaf")
_TASK = {
    "task": "choices",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "choices.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{label}}",
    "doc_to_choice": "{{choices}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


class _Adapter(TemplateLM):
    """The network of a target as a model of lm-eval; answers are computed as in the suite."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._encoder, self._model = Encoder(target), Model(target)
        self.tokenizer = self._encoder.tokenizer

    @property
    def eot_token_id(self) -> int:
        """Id of the token that ends a text."""
        return self._encoder.eot_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list:
        """Return the token ids of a text."""
        return self._encoder.tok_encode(string, add_special_tokens)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple]:
        groups = [list(group) for _, group in groupby(requests, key=itemgetter(1))]
        scorings = [Scoring(group[0][1], [each[2] for each in group]) for group in groups]
        answers: dict[int, list[tuple]] = {}
        for place, answer in self._model.answers(scorings):
            answers[place] = [(math.nan, False)] * len(groups[place])
            if not isinstance(answer, NotFiniteError):
                answers[place] = [
                    (-float(each.losses.double().sum()), bool(each.is_most_likely.all()))
                    for each in answer
                ]
            for (texts, _, _), value in zip(groups[place], answers[place], strict=True):
                self.cache_hook.add_partial("loglikelihood", texts, value)
        return [value for place in range(len(groups)) for value in answers[place]]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Refuse, because the task needs only likelihoods of choices."""
        raise NotImplementedError

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Refuse, because the task needs only likelihoods of choices."""
        raise NotImplementedError


def _write(folder: Path, questions: int) -> Path:
    """Write the task, its data and a random model; return the model's folder."""
    (folder / "choices.yaml").write_text(json.dumps(_TASK))
    rows = (json.dumps(_row(number)) + "\n" for number in range(questions))
    (folder / "choices.jsonl").write_text("".join(rows))
    model = folder / "model"
    model.mkdir()
    write_tokenizer(load_tokenizer("bytes"), 256, model)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = AutoConfig.for_model(
        "llama", vocab_size=320, num_attention_heads=4, max_position_embeddings=256, **sizes
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model)
    return model


def _row(number: int) -> dict[str, Any]:
    first, *choices = (_WORDS[number * step % len(_WORDS)] for step in (1, 2, 3, 5, 7))
    text = f"Question {number} of the {first} and the {choices[0]}:"
    return {"text": text, "choices": choices, "label": number % 4}


class _Counter:
    """Counter of the requests that networks answer; it can interrupt after a number of them."""

    def __init__(self) -> None:
        self.answered, self.limit = 0, math.inf
        self._answers = Model.answers
        counter = self

        def counted(model: Model, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
            for answer in counter._answers(model, requests):
                if counter.answered >= counter.limit:
                    raise KeyboardInterrupt
                counter.answered += 1
                yield answer

        Model.answers = counted  # type: ignore[method-assign]

    def repeated(self, run: Callable[[], object], whole: int) -> int:
        """Interrupt ``run`` after half of all requests; return how many a restart repeats."""
        self.answered, self.limit = 0, whole // 2
        with suppress(KeyboardInterrupt):
            run()
        before, self.limit = self.answered, math.inf
        run()
        return self.answered - before - (whole - before)


def _break(folder: Path) -> None:
    """Change a model so that it computes NaN after a ``w``."""
    network = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        network.get_input_embeddings().weight[ord("w")] = torch.nan
    network.save_pretrained(folder)


def main(given: argparse.Namespace) -> None:
    """Run both engines whole, interrupted, and with a network that computes NaN."""
    with tempfile.TemporaryDirectory() as temporary, chdir(temporary):
        folder = Path(temporary)
        model = _write(folder, given.questions)
        counter = _Counter()

        def suite(out: str) -> float | list[str]:
            settings = [f"lm-eval.include_path={folder}", "lm-eval.tasks=[choices]"]
            evaluate(
                [model], ["lm-eval"], folder / out, EvaluateSettings(data_dir=folder), settings
            )
            report = json.loads((folder / out / "results.json").read_text())["suites"]["lm-eval"]
            if report["not_run"]:
                return report["not_run"]
            return report["measures"]["choices, 0 shots, acc"]["targets"]["model"]["value"]

        def engine(cache: str | None = None) -> float:
            (target,) = find_targets([model], folder)
            results = lm_eval.simple_evaluate(
                _Adapter(target),
                tasks=["choices"],
                task_manager=TaskManager(include_path=str(folder), include_defaults=False),
                use_cache=None if cache is None else str(folder / cache),
                bootstrap_iters=0,
            )
            return results["results"]["choices"]["acc,none"]

        report: dict[str, Any] = {"questions": given.questions}
        for name, run in (("suite", lambda: suite("whole")), ("engine", engine)):
            counter.answered = 0
            wall, cpu = time.perf_counter(), time.process_time()
            accuracy = run()
            report[name] = {
                "requests": counter.answered,
                "seconds": round(time.perf_counter() - wall, 2),
                "cpu_seconds": round(time.process_time() - cpu, 2),
                "accuracy": accuracy,
            }
        whole = report["suite"]["requests"]
        report["requests_repeated_by_a_restart"] = {
            "suite": counter.repeated(lambda: suite("interrupted"), whole),
            "engine": counter.repeated(engine, whole),
            "engine with use_cache": counter.repeated(lambda: engine("cache"), whole),
        }
        _break(model)
        report["accuracy_if_the_network_computes_nan"] = {
            "suite": suite("nan"),
            "engine": engine(),
        }
    report["versions"] = {name: version(name) for name in ("lm_eval", "torch", "transformers")}
    path = RESULTS / "lm_eval_engine.json"
    write_json_report(path, report)
    print(json.dumps(report, indent=1))
    print(f"wrote {path}")

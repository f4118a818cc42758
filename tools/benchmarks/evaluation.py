r"""Time a model on the requests of evaluation suites: singly, in batches, and with lm-eval.

    python -m tools.benchmarks evaluation smollm2 --data-dir sets --data text.jsonl --haystack books

Each of --parts is a suite, of which a few items are taken. Their requests are answered once for
every value of --batch-tokens; the value 1 means one text at a time. For suites that only need
likelihoods, lm-eval's own class for transformers answers the same requests. CPU seconds include
only this process, so that other work on the machine does not count; run the command with
OMP_NUM_THREADS=1. A counted forward pass is one call of the network's layers, without the
projection to the vocabulary. Writes docs/results/NAME.json; --name is evaluation_batches by
default.

On a GPU, with more items and larger batches:

    python -m tools.benchmarks evaluation MODEL --data-dir sets --data text.jsonl --haystack books \
        --items 250 --batch-tokens 1 8192 65536 --name evaluation_batches_gpu
"""

import argparse
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel

from diffmegatron.evaluation.model import Computing, Model
from diffmegatron.evaluation.requests import Answer, Generation, LabelTree, Request, Scored, Scoring
from diffmegatron.evaluation.suites import make_suites
from diffmegatron.evaluation.targets import Target, find_targets
from tools.benchmarks.json_report import write_json_report
from tools.paths import RESULTS

# Settings of each suite. {items} is replaced by --items, the number of items of a task.
PARTS = {
    "lm-eval": ("lm-eval.tasks=[arc_easy,piqa]", "lm-eval.shots=[0]", "lm-eval.samples={items}"),
    "loss": ("loss.documents={items}", "loss.context=512", "loss.characters=2000"),
    "math": ("math.benchmarks=[gsm8k]", "math.samples={items}", "math.answer_tokens=24"),
    "needle": ("needle.pairs=[[1,1]]", "needle.lengths=[512]", "needle.samples={items}",
               "needle.depths=[0.5]", "needle.answer_tokens=24"),
    "many-shot": ("many-shot.tasks=[trec]", "many-shot.shots=[50]", "many-shot.samples={items}"),
}  # fmt: skip


class _Collector:
    """A stand-in for a model, which records the requests that a suite sends to it.

    Attributes:
        target: model or checkpoint that the requests are for.
        requests: all requests received so far.
    """

    def __init__(self, target: Target) -> None:
        self.target, self.requests = target, list[Request]()

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        """Record the requests, and yield the number and a meaningless answer of each."""
        self.requests += requests
        yield from ((number, _any_answer(request)) for number, request in enumerate(requests))


def _any_answer(request: Request) -> Answer:
    if isinstance(request, Scoring):
        lengths = map(len, request.continuations)
        return [Scored(torch.zeros(n), torch.zeros(n, dtype=torch.bool)) for n in lengths]
    return [] if request.labels is None else _any_path(request.labels)


def _any_path(labels: LabelTree) -> list[int]:
    token, following = next(iter(labels.items()))
    return [token, *_any_path(following)] if following else [token]


def _measured(device: torch.device, answer: Callable[[], list[Any]]) -> tuple[dict, list[Any]]:
    """Call a function, and return two values: its figures, and its result.

    The figures are wall seconds, CPU seconds, and the number of forward passes.
    """
    passes = 0

    def count(module: torch.nn.Module, _: Any) -> None:
        nonlocal passes
        passes += isinstance(module, PreTrainedModel) and module.base_model is module

    with register_module_forward_pre_hook(count):
        wall, cpu = time.perf_counter(), time.process_time()
        found = answer()
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent = {
            "seconds": round(time.perf_counter() - wall, 2),
            "cpu_seconds": round(time.process_time() - cpu, 2),
        }
    return spent | {"forward_passes": passes}, found


def _by_lm_eval(target: Target, computing: Computing, requests: list[Scoring], size: int) -> dict:
    """Compute the likelihoods of requests with lm-eval's class for transformers.

    Args:
        target: model to evaluate.
        computing: settings from which the device and the dtype are taken.
        requests: requests for likelihoods.
        size: batch size of lm-eval.

    Returns:
        Wall seconds, CPU seconds, and the number of forward passes.
    """
    from lm_eval.models.huggingface import HFLM

    device = "cuda" if computing.is_gpu else "cpu"
    model = HFLM(
        str(target.folder), device=device, dtype=computing.dtype_of(target), batch_size=size
    )
    asked = [
        (("", str(number)), list(request.context), list(continuation))
        for number, request in enumerate(requests)
        for continuation in request.continuations
    ]
    spent, _ = _measured(
        torch.device(device), lambda: model._loglikelihood_tokens(asked, disable_tqdm=True)
    )
    return spent


def _differences(one: list[Answer], other: list[Answer]) -> dict[str, float]:
    """Compare two lists of answers to the same requests.

    Returns:
        The largest difference of a token's log-likelihood in nats, and the number of generated
        texts that differ.
    """
    nats, texts = 0.0, 0
    for a, b in zip(one, other, strict=True):
        if a and isinstance(a, list) and isinstance(a[0], Scored):
            assert isinstance(b, list)
            pairs = zip(a, b, strict=True)
            nats = max(nats, *(float((x.losses - y.losses).abs().max()) for x, y in pairs))
        else:
            texts += a != b
    return {"largest_difference_in_nats": nats, "texts_that_differ": texts}


def main(given: argparse.Namespace) -> None:
    """Measure every suite with every value of --batch-tokens, and write the report."""
    (target,) = find_targets([given.model], given.model)
    options = {"data": (given.data,), "haystack": given.haystack, "data_dir": given.data_dir}
    parts: dict[str, Any] = {}
    for name in given.parts:
        settings = [each.format(items=given.items) for each in PARTS[name]]
        (suite,) = make_suites([name], options, settings, lambda: 2048)
        collector = _Collector(target)
        # The suites use only two members of a model: target and answers. The collector has both.
        list(suite.scores(collector, suite.items(target)))  # type: ignore[arg-type]
        requests = collector.requests
        parts[name] = {"settings": settings, "requests": len(requests), "batch_tokens": {}}
        single: list[Answer] | None = None
        for tokens in given.batch_tokens:
            model = Model(target, Computing(batch_tokens=tokens))
            # Load the network and find its end tokens before the clock starts.
            list(model.answers([Scoring([target.start_token], [[target.start_token]])]))
            spent, found = _measured(model.device, lambda: list(model.answers(requests)))  # noqa: B023
            answers = [answer for _, answer in sorted(found, key=lambda pair: pair[0])]
            if single is None:
                single = answers
            else:
                spent |= _differences(single, answers)
            parts[name]["batch_tokens"][str(tokens)] = spent
            print(f"{name}, --batch-tokens {tokens}: {spent}", flush=True)
        scoring = [request for request in requests if isinstance(request, Scoring)]
        if scoring and not any(isinstance(request, Generation) for request in requests):
            parts[name]["lm_eval_batch_size"] = {
                str(size): _by_lm_eval(target, Computing(), scoring, size) for size in (1, 8)
            }
            print(f"{name}, lm-eval: {parts[name]['lm_eval_batch_size']}", flush=True)
    is_gpu = torch.cuda.is_available()
    report = {
        "model": given.model.name,
        "device": torch.cuda.get_device_name() if is_gpu else f"a CPU ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "parts": parts,
    }
    path = RESULTS / f"{given.name}.json"
    write_json_report(path, report)
    print(f"wrote {path}")

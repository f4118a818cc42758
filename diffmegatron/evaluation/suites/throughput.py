"""Speed of exported networks in ``transformers``: prefill, decoding and training steps."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from typing_extensions import override

from diffmegatron.evaluation.figures import Figure, plot_measures
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.suite import Direction, Item, Mean, Published, Record, Records, Suite
from diffmegatron.evaluation.targets import Target
from diffmegatron.section import Count, Size

_PHASES = ("prefill", "decoding", "training")
_TABLE = "3B, 4K, H100, table 7"


class Throughput(Suite):
    """Tokens per second in prefill, decoding and training, of the ``transformers`` classes.

    Training is a forward and backward pass without an optimizer. A warm-up precedes each
    repetition. Several targets are timed in turn, once per repetition, so that other work on the
    machine slows down all of them, and widens the intervals. Each turn loads the target again. For
    the training speed of Megatron's layers, see ``metrics.jsonl`` of a run. The suite runs on rank
    0 only.

    Single speeds depend on the GPU and the implementation. To compare with the paper's table 7, use
    the ratio of two models' speeds.
    """

    name = "throughput"
    title = "Throughput in tokens per second"
    description = (
        "The speed of the exported models in plain transformers: a whole prompt (prefill), "
        "token by token (decoding), and forward with backward without an optimizer (training). "
        "Peak memory is measured on a GPU."
    )
    needs_network = True
    # Processes on one machine would slow each other down.
    is_parallel = False
    published = (
        Published("prefill, tokens/s", 44521, 48762, _TABLE),
        Published("training, tokens/s", 6718, 7491, _TABLE),
    )

    context: Size = Field(default=2048, description="tokens of prefill and of training")
    batch: Size = Field(default=1, description="sequences of a batch")
    decoded: Size = Field(default=32, description="number of tokens to decode")
    repetitions: Count = Field(default=5, description="timed repetitions of each phase")

    @model_validator(mode="after")
    def _context_holds_decoded_tokens(self) -> Self:
        if self.decoded >= self.context:
            raise ValueError(
                f"throughput.decoded is {self.decoded} and throughput.context {self.context}; give "
                "fewer decoded tokens, because they follow a prompt within the context"
            )
        return self

    @override
    def items(self, target: Target) -> list[Item]:
        return [
            Item(f"{phase}/{number}", self.context, phase)
            for phase in _PHASES
            for number in range(self.repetitions)
        ]

    @override
    def rounds(self, items: Sequence[Item]) -> list[Sequence[Item]]:
        """Return the repetitions, so that other work on the machine slows down all targets."""
        return [items[number :: self.repetitions] for number in range(self.repetitions)]

    @override
    def score(self, model: Model, item: Item) -> Record:
        vocabulary = model.target.tokenizer.vocab_size
        ids = torch.randint(
            vocabulary, (self.batch, self.context), generator=torch.Generator().manual_seed(0)
        ).to(model.device)
        run = {"prefill": _prefill, "decoding": self._decode, "training": _train}[item.content]
        run(model, ids)
        is_gpu = model.device.type == "cuda"
        if is_gpu:
            torch.cuda.reset_peak_memory_stats()
        tokens, seconds = run(model, ids)
        # On a CPU, the peak of the process would include the targets that ran before.
        peak = torch.cuda.max_memory_allocated() if is_gpu else None
        return {"phase": item.content, "tokens": tokens, "seconds": seconds, "peak_bytes": peak}

    @override
    def means(self, record: Record) -> dict[str, Mean]:
        speed = Mean(record["tokens"], record["seconds"], per_token=True)
        return {f"{record['phase']}, tokens/s": speed}

    @override
    def totals(self, records: Records) -> dict[str, float]:
        peaks: dict[str, int] = {}
        for record in records:
            if (peak := record["peak_bytes"]) is not None:
                phase = record["phase"]
                peaks[phase] = max(peak, peaks.get(phase, 0))
        return {f"{phase}, peak memory in GiB": peak / 2**30 for phase, peak in peaks.items()}

    @override
    def across(self, records: Mapping[str, Records]) -> dict[str, float]:
        first, *others = records
        found: dict[str, float] = {}
        for phase in _PHASES:
            speeds = {name: _speed(records[name], phase) for name in records}
            found |= {f"{phase}: {name} / {first}": speeds[name] / speeds[first] for name in others}
        return found

    @override
    def better(self, measure: str) -> Direction:
        return "lower" if "memory" in measure else "higher"

    @override
    def draw(self, figure: Figure, records: Mapping[str, Records]) -> bool:
        """Draw a panel for each phase, because speeds differ by orders of magnitude."""
        for axes, phase in zip(figure.subplots(1, len(_PHASES)), _PHASES, strict=True):
            plot_measures(axes, self, records, {phase: f"{phase}, tokens/s"}, "tokens/s")
        return True

    def _decode(self, model: Model, ids: Tensor) -> tuple[int, float]:
        with torch.no_grad():
            short = ids[:, : self.context - self.decoded]
            step = model.network(short, use_cache=True, logits_to_keep=1)

            def decode() -> None:
                nonlocal step
                for _ in range(self.decoded):
                    token = step.logits[:, -1:].argmax(-1)
                    step = model.network(
                        token, past_key_values=step.past_key_values, use_cache=True
                    )

            return self.batch * self.decoded, _timed(model, decode)


def _prefill(model: Model, ids: Tensor) -> tuple[int, float]:
    with torch.no_grad():
        return ids.numel(), _timed(model, lambda: model.network(ids, logits_to_keep=1))


def _train(model: Model, ids: Tensor) -> tuple[int, float]:
    def step() -> None:
        model.network(ids, labels=ids, use_cache=False).loss.backward()

    try:
        return ids.numel(), _timed(model, step)
    finally:
        model.network.zero_grad(set_to_none=True)


def _timed(model: Model, run: Callable[[], object]) -> float:
    _wait(model)
    started = time.perf_counter()
    run()
    _wait(model)
    return time.perf_counter() - started


def _wait(model: Model) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def _speed(records: Records, phase: str) -> float:
    of_phase = [record for record in records if record["phase"] == phase]
    return sum(r["tokens"] for r in of_phase) / sum(r["seconds"] for r in of_phase)

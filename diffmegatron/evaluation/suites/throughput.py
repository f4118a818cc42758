"""Speed of the networks as ``transformers`` computes them: prefill, decoding, a training step."""

import resource
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from diffmegatron.evaluation.figures import estimate_measures, plot_bars
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.suite import Item, Mean, Published, Record, Records, Suite
from diffmegatron.evaluation.targets import Target
from diffmegatron.section import Count, Size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PHASES = ("prefill", "decoding", "training")
_TABLE = "3B, 4K, H100, table 7"


class Throughput(Suite):
    """Tokens per second of a phase; before each repetition there is one that does not count.

    ``training`` is forward and backward without an optimizer. Of the paper's table 7 the ratios
    compare, not the speeds: those are of one GPU and one implementation.
    """

    name: ClassVar[str] = "throughput"
    title: ClassVar[str] = "Throughput in tokens per second"
    description: ClassVar[str] = (
        "The speed of the exported models in plain transformers: a whole prompt (prefill), "
        "token by token (decoding), and forward with backward (training)."
    )
    shared: ClassVar[bool] = False
    published: ClassVar[tuple[Published, ...]] = (
        Published("prefill, tokens/s", 44521, 48762, _TABLE),
        Published("training, tokens/s", 6718, 7491, _TABLE),
    )

    context: Size = Field(default=2048, description="tokens of prefill and of training")
    batch: Size = 1
    decoded: Size = Field(default=32, description="tokens that decoding goes on for")
    repetitions: Count = 5

    def items(self, target: Target) -> list[Item]:
        """A phase and a repetition."""
        return [
            Item(f"{phase}/{number}", self.context, phase)
            for phase in _PHASES
            for number in range(self.repetitions)
        ]

    def score(self, model: Model, item: Item) -> Record:
        """Tokens, seconds, and bytes at the peak: of the GPU, or of the process so far."""
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
        peak = (
            torch.cuda.max_memory_allocated()
            if is_gpu
            else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        )
        return {"phase": item.content, "tokens": tokens, "seconds": seconds, "peak_bytes": peak}

    def means(self, record: Record) -> dict[str, Mean]:
        """Tokens over seconds, by phase."""
        return {
            f"{record['phase']}, tokens/s": Mean(
                record["tokens"], record["seconds"], per_token=True
            )
        }

    def totals(self, records: Records) -> dict[str, float]:
        """The highest peak of each phase."""
        return {
            f"{phase}, peak memory in GiB": max(
                record["peak_bytes"] for record in records if record["phase"] == phase
            )
            / 2**30
            for phase in _PHASES
        }

    def across(self, records: Mapping[str, Records]) -> dict[str, float]:
        """Every target's speed over the first's."""
        first, *others = records
        found: dict[str, float] = {}
        for phase in _PHASES:
            speeds = {name: _speed(records[name], phase) for name in records}
            found |= {f"{phase}: {name} / {first}": speeds[name] / speeds[first] for name in others}
        return found

    def better(self, measure: str) -> Literal["higher", "lower"] | None:
        """Return which values are better."""
        return "lower" if "memory" in measure else "higher"

    def draw(self, figure: "Figure", records: Mapping[str, Records]) -> bool:
        """Draw bars, a panel for each phase: their speeds differ by orders of magnitude."""
        estimates = {name: estimate_measures(self, each) for name, each in records.items()}
        for axes, phase in zip(figure.subplots(1, len(_PHASES)), _PHASES, strict=True):
            bars = {name: [own[f"{phase}, tokens/s"]] for name, own in estimates.items()}
            plot_bars(axes, [phase], bars, "tokens/s")
        return True

    def _decode(self, model: Model, ids: Tensor) -> tuple[int, float]:
        with torch.no_grad():
            short = ids[:, : max(1, self.context - self.decoded)]
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

"""Mathematics in words: the model works a problem out, and its answer is compared as mathematics.

Answers are found and compared by math-verify (the extra ``evaluation``).
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from diffmegatron.errors import UserError
from diffmegatron.evaluation.figures import estimate_measures, plot_bars
from diffmegatron.evaluation.math_datasets import BENCHMARKS, TRAINING
from diffmegatron.evaluation.requests import Asking, Generation
from diffmegatron.evaluation.suite import Item, Mean, Record, Records, Suite
from diffmegatron.evaluation.suites.many_shot import DATA_DIR
from diffmegatron.evaluation.targets import Target
from diffmegatron.section import Count, Size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NEXT = "\n\nQuestion:"


class Mathematics(Suite):
    """Accuracy of answers that the model works out after ``shots`` of GSM8K's training problems.

    The likeliest token each time, to the end of a document, the next question, or
    ``answer_tokens``: 1,024 or 16,384 in the paper.
    """

    name: ClassVar[str] = "math"
    title: ClassVar[str] = "Mathematics, accuracy"
    description: ClassVar[str] = (
        "The model solves problems in words; an answer counts if it is mathematically equal to "
        "the right one."
    )

    data_dir: Path = DATA_DIR
    benchmarks: tuple[str, ...] = Field(default=tuple(BENCHMARKS), min_length=1)
    shots: int = Field(default=4, ge=0, description="0 for models that were tuned to answer")
    samples: Count = Field(default=250, description="the first of every benchmark")
    answer_tokens: Size = 1024

    @property
    def only_writes(self) -> bool:
        """Return whether models only write texts for it."""
        return True

    def check(self, target: Target) -> None:
        """The data and the library are there."""
        _library()
        if wrong := [name for name in self.benchmarks if name not in BENCHMARKS]:
            raise UserError(
                f"benchmark {wrong[0]!r} is unknown; give some of {', '.join(BENCHMARKS)}"
            )
        for name in self.benchmarks:
            BENCHMARKS[name].problems(self.data_dir)
        self._demonstrations()

    def items(self, target: Target) -> list[Item]:
        """A problem."""
        before = self._demonstrations()
        demonstrated = [target.start, *target.encode(before)] if before else []
        found = []
        for name in self.benchmarks:
            for number, each in enumerate(BENCHMARKS[name].problems(self.data_dir)[: self.samples]):
                asked = target.encode(f"{before}Question: {each.question}\nAnswer:")
                ids = [target.start, *asked]
                # The last token of the examples may be another where a question follows.
                pairs = zip(ids, demonstrated, strict=False)
                shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
                content = (name, ids, shared, each.answer, each.choices)
                found.append(Item(f"{name}/{number}", len(ids) + self.answer_tokens, content))
        return found

    def ask(self, target: Target, item: Item) -> Asking:
        """Return the text, the answer in it, and whether it is the right one."""
        name, ids, shared, answer, choices = item.content
        (tokens,) = yield [Generation(ids, self.answer_tokens, (_NEXT,), shared)]
        text = target.tokenizer.decode(tokens).split(_NEXT)[0]
        return {
            "benchmark": name,
            "answer": answer,
            "text": text,
            "cut": len(tokens) == self.answer_tokens,
            "right": is_right(text, answer, choices),
        }

    def means(self, record: Record) -> dict[str, Mean]:
        """Accuracy, and the share that reached the limit."""
        name = record["benchmark"]
        return {
            name: Mean(float(record["right"])),
            f"{name}, share cut at the limit": Mean(float(record["cut"])),
        }

    def better(self, measure: str) -> Literal["higher", "lower"] | None:
        """Return which values are better."""
        return "lower" if measure.endswith("limit") else "higher"

    def draw(self, figure: "Figure", records: Mapping[str, Records]) -> bool:
        """Draw bars by benchmark."""
        estimates = {name: estimate_measures(self, each) for name, each in records.items()}
        bars = {
            name: [own.get(benchmark) for benchmark in self.benchmarks]
            for name, own in estimates.items()
        }
        axes = figure.subplots()
        plot_bars(axes, self.benchmarks, bars, "accuracy")
        axes.set_ylim(0, 1)
        return True

    def _demonstrations(self) -> str:
        if not self.shots:
            return ""
        return "".join(
            f"Question: {each.question}\nAnswer: {each.solution}\nThe answer is {each.answer}.\n\n"
            for each in TRAINING.problems(self.data_dir)[: self.shots]
        )


def is_right(text: str, answer: str, choices: Sequence[str] = ()) -> bool:
    """Whether the answer that a text comes to is equal to the right one, as mathematics.

    Of choices it comes to the one that it names last.

    Raises:
        UserError: math-verify is not installed.
    """
    if choices:
        # Of two that end together the longer one is meant.
        return answer == max(choices, key=lambda choice: (_last(choice, text), len(choice))) and (
            _last(answer, text) >= 0
        )
    library = _library()
    return bool(library.verify(library.parse(answer), library.parse(text)))


def _last(choice: str, text: str) -> int:
    """Where a text last ends to name a choice, as words of their own; -1 where it does not."""
    places = re.finditer(rf"(?<!\w){re.escape(choice)}(?!\w)", text, re.IGNORECASE)
    return max((place.end() for place in places), default=-1)


def _library() -> Any:
    try:
        import math_verify
    except ImportError:
        raise UserError(
            "suite 'math' compares answers by math-verify, which is not installed; install the "
            "extra with pip install 'diffmegatron[evaluation]'"
        ) from None
    return math_verify

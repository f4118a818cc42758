"""Mathematical problems in words, with answers compared by math-verify (extra ``evaluation``)."""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import Field
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.evaluation.datasets import choose
from diffmegatron.evaluation.figures import Figure, plot_measures
from diffmegatron.evaluation.math_datasets import BENCHMARKS, TRAINING
from diffmegatron.evaluation.requests import Generation, ItemGenerator
from diffmegatron.evaluation.suite import Direction, Item, Mean, Record, Records, Suite
from diffmegatron.evaluation.suites.many_shot import DATA_DIR
from diffmegatron.evaluation.targets import Target
from diffmegatron.section import Count, Size

_NEXT = "\n\nQuestion:"


class Mathematics(Suite):
    """Accuracy on mathematical problems, after ``shots`` problems of GSM8K's training set.

    Decoding is greedy. Differential Transformer (Ye et al.) uses 1,024 or 16,384 ``answer_tokens``.
    """

    name = "math"
    title = "Mathematics, accuracy"
    description = (
        "The model solves problems in words. An answer counts if it is mathematically equal to "
        "the right one. The limit of an answer is the setting answer_tokens; a cut answer "
        "counts by its text so far."
    )

    data_dir: Path = DATA_DIR
    benchmarks: tuple[str, ...] = Field(default=tuple(BENCHMARKS), min_length=1)
    shots: int = Field(default=4, ge=0, description="0 for fine-tuned models")
    samples: Count = Field(default=250, description="number of problems per benchmark")
    answer_tokens: Size = 1024

    @property
    @override
    def requests_only_free_text(self) -> bool:
        return True

    @override
    def check(self, target: Target) -> None:
        _library()
        for benchmark in choose(self.benchmarks, BENCHMARKS, "benchmark"):
            benchmark.examples(self.data_dir)
        self._demonstrations()

    @override
    def items(self, target: Target) -> list[Item]:
        before = self._demonstrations()
        demonstrated = [target.start_token, *target.encode(before)] if before else []
        found = []
        for name in self.benchmarks:
            problems = BENCHMARKS[name].examples(self.data_dir, self.samples)
            for number, each in enumerate(problems):
                asked = target.encode(f"{before}Question: {each.question}\nAnswer:")
                ids = [target.start_token, *asked]
                # The tokenizer may join the last token of the examples with the question.
                pairs = zip(ids, demonstrated, strict=False)
                shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
                content = (name, ids, shared, each.answer, each.choices)
                found.append(Item(f"{name}/{number}", len(ids) + self.answer_tokens, content))
        return found

    @override
    def requests_of(self, target: Target, item: Item) -> ItemGenerator:
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

    @override
    def means(self, record: Record) -> dict[str, Mean]:
        name = record["benchmark"]
        return {
            name: Mean(float(record["right"])),
            f"{name}, share cut at the limit": Mean(float(record["cut"])),
        }

    @override
    def better(self, measure: str) -> Direction:
        return "lower" if measure.endswith("limit") else "higher"

    @override
    def draw(self, figure: Figure, records: Mapping[str, Records]) -> bool:
        measures = {benchmark: benchmark for benchmark in self.benchmarks}
        plot_measures(figure.subplots(), self, records, measures, "accuracy", is_share=True)
        return True

    def _demonstrations(self) -> str:
        if not self.shots:
            return ""
        return "".join(
            f"Question: {each.question}\nAnswer: {each.solution}\nThe answer is {each.answer}.\n\n"
            for each in TRAINING.examples(self.data_dir, self.shots)
        )


def is_right(text: str, answer: str, choices: Sequence[str] = ()) -> bool:
    """Return whether the answer in a text is mathematically equal to the correct answer.

    With ``choices``, the answer in the text is the choice that occurs last.
    """
    if choices:
        # If two choices end at the same position, the longer one contains the shorter one.
        return answer == max(choices, key=lambda choice: (_last(choice, text), len(choice))) and (
            _last(answer, text) >= 0
        )
    library = _library()
    return bool(library.verify(library.parse(answer), library.parse(text)))


def _last(choice: str, text: str) -> int:
    """Return the end of the last occurrence of a choice as whole words; -1 if there is none."""
    places = re.finditer(rf"(?<!\w){re.escape(choice)}(?!\w)", text, re.IGNORECASE)
    return max((place.end() for place in places), default=-1)


def _library() -> Any:
    try:
        import math_verify
    except ImportError:
        raise UserError(
            "suite 'math' needs math-verify, which is not installed; install the "
            "extra with pip install 'diffmegatron[evaluation]'"
        ) from None
    return math_verify

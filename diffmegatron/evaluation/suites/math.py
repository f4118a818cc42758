"""Mathematical word problems; the package math-verify (extra ``evaluation``) compares answers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AliasChoices, Field, FiniteFloat
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.evaluation.datasets import DATA_DIR, DataSet, Row, choose, json_file, json_lines
from diffmegatron.evaluation.figures import Figure, plot_measures
from diffmegatron.evaluation.requests import Generation, ItemGenerator
from diffmegatron.evaluation.suite import Direction, Item, Mean, Record, Records, Suite
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import shorten
from diffmegatron.section import Count, Size


class MathProblem(NamedTuple):
    """A mathematical problem in words; ``choices`` is empty if it is not multiple-choice."""

    question: str
    answer: str
    solution: str = ""
    choices: tuple[str, ...] = ()


# Call of a calculator in GSM8K's solutions, such as <<2+3=5>>.
_CALCULATION = re.compile(r"<<[^>]*>>")


class _Gsm8k(Row):
    question: str
    answer: str

    def examples(self, name: str) -> Iterator[MathProblem]:
        solution, mark, answer = self.answer.rpartition("####")
        if not mark:
            raise UserError(f"{name} has no '#### ' before its answer")
        yield MathProblem(self.question, answer.strip(), _CALCULATION.sub("", solution).strip())


class _Svamp(Row):
    Body: str
    Question: str
    Answer: FiniteFloat

    def examples(self, name: str) -> Iterator[MathProblem]:
        body = self.Body.strip()
        question = f"{body}{'' if body.endswith('.') else '.'} {self.Question}"
        yield MathProblem(question, _number(self.Answer))


class _Math(Row):
    problem: str
    solution: str

    def examples(self, name: str) -> Iterator[MathProblem]:
        answer = _boxed(self.solution)
        if answer is None:
            raise UserError(f"{name} has no answer in \\boxed{{}} in its solution")
        yield MathProblem(self.problem, _latex(answer), self.solution)


# Unit in ASDiv's answers, as in "9 (apples)".
_UNIT = re.compile(r"\([^()]*\)")


class _Asdiv(Row):
    body: str
    question: str
    answer: str

    def examples(self, name: str) -> Iterator[MathProblem]:
        answer = _UNIT.sub("", self.answer)
        yield MathProblem(f"{self.body.strip()} {self.question.strip()}", answer.strip())


class _Mawps(Row):
    question: str = Field(validation_alias=AliasChoices("input", "sQuestion"))
    answers: Annotated[list[FiniteFloat], Field(min_length=1)] | FiniteFloat = Field(
        validation_alias=AliasChoices("target", "lSolutions")
    )

    def examples(self, name: str) -> Iterator[MathProblem]:
        answers = self.answers if isinstance(self.answers, list) else [self.answers]
        yield MathProblem(self.question.strip(), ", ".join(map(_number, answers)))


class _Carp(Row):
    content: str
    answer: str

    def examples(self, name: str) -> Iterator[MathProblem]:
        yield MathProblem(self.content.strip(), _latex(self.answer.strip()))


class _TabMwp(Row):
    question: str
    choices: list[str] | None
    answer: str
    table_title: str | None
    table: str

    def examples(self, name: str) -> Iterator[MathProblem]:
        of = f" of {self.table_title}" if self.table_title else ""
        question = f"The table{of}:\n{self.table}\n{self.question}"
        if self.choices:
            question += f" Choose from: {', '.join(self.choices)}."
        choices = tuple(self.choices or ())
        if choices and self.answer not in choices:
            raise UserError(
                f"{name} has the answer {shorten(repr(self.answer))}; it must be one of its choices"
            )
        yield MathProblem(question, self.answer.strip(), choices=choices)


class _College(Row):
    question: str
    answer: str

    def examples(self, name: str) -> Iterator[MathProblem]:
        yield MathProblem(self.question.strip(), _latex(self.answer.strip()))


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else str(value)


def _latex(answer: str) -> str:
    """Put dollar signs, which mark LaTeX for math-verify, around an answer.

    An answer of digits and points, or with a dollar sign, is not changed.
    """
    return answer if "$" in answer or answer.replace(".", "").isdecimal() else f"${answer}$"


def _boxed(solution: str) -> str | None:
    r"""Return the content of the last ``\boxed{}``; None if there is none or it is not closed."""
    _, mark, rest = solution.rpartition("\\boxed{")
    depth = 1
    for place, letter in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return rest[:place].strip()
    return None


BENCHMARKS: dict[str, DataSet[MathProblem]] = {
    "gsm8k": DataSet(
        "gsm8k_test.jsonl",
        json_lines(_Gsm8k),
        "GSM8K's test set, lines of question and answer (Cobbe et al.)",
    ),
    "math": DataSet(
        "math_test.jsonl",
        json_lines(_Math),
        "MATH's test set, lines of problem and solution (Hendrycks et al.)",
    ),
    "svamp": DataSet(
        "svamp.json",
        json_file(list[_Svamp]),
        "SVAMP, a list with Body, Question and Answer (Patel et al.)",
    ),
    "asdiv": DataSet(
        "asdiv_test.jsonl",
        json_lines(_Asdiv),
        "ASDiv, lines of body, question and answer (Miao et al.)",
    ),
    "mawps": DataSet(
        "mawps_test.jsonl",
        json_lines(_Mawps),
        "MAWPS (Koncel-Kedziorski et al.), lines of sQuestion and lSolutions, or of input and "
        "target (PAL's files)",
    ),
    "carp": DataSet(
        "carp_test.jsonl",
        json_lines(_Carp),
        "CARP in English, lines of content and answer (Zhang et al.)",
    ),
    "tabmwp": DataSet(
        "tabmwp_test.json",
        json_file(dict[str, _TabMwp]),
        "TabMWP's problems_test.json, problems with their tables by number (Lu et al.)",
    ),
    "college-math": DataSet(
        "college_math_test.jsonl",
        json_lines(_College),
        "CollegeMath's test set, lines of question and answer (Tang et al.)",
    ),
}
TRAINING: DataSet[MathProblem] = DataSet(
    "gsm8k_train.jsonl",
    json_lines(_Gsm8k),
    "GSM8K's training set (not needed with math.shots=0)",
)
_NEXT = "\n\nQuestion:"


class Mathematics(Suite):
    """Accuracy on mathematical problems, after ``shots`` solved problems of GSM8K's training set.

    The form of a solved problem is

        Question: ...
        Answer: ...
        The answer is 18.

    The prompt has the first ``shots`` problems of GSM8K's training set in this form, then the
    question. Decoding is greedy, up to the next question, the end-of-document token, or
    ``answer_tokens`` tokens (the paper allows 1,024 or 16,384). math-verify, of the extra
    ``evaluation``, extracts and compares the answers. A problem of TabMWP begins with ``The table
    of TITLE:`` and the table, and ends with ``Choose from: ...``. Its answer is the choice that the
    text names last.
    """

    name = "math"
    title = "Mathematics, accuracy"
    description = (
        "The model solves problems in words. An answer counts if it is mathematically equal to "
        "the right one. The limit of an answer is the setting answer_tokens; a cut answer "
        "counts by its text so far."
    )

    data_dir: Path = DATA_DIR
    benchmarks: tuple[str, ...] = Field(
        default=tuple(BENCHMARKS), min_length=1, description="sets of problems"
    )
    shots: int = Field(default=4, ge=0, description="solved problems; 0 for fine-tuned models")
    samples: Count = Field(default=250, description="number of problems per benchmark")
    answer_tokens: Size = Field(default=1024, description="largest number of tokens to generate")

    @override
    def check(self, target: Target) -> None:
        _library()
        choose(self.benchmarks, BENCHMARKS, "benchmark")

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
                # The tokenizer may join the end of the examples and the beginning of the question
                # in one token, so count the equal first tokens.
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
    """Return whether the answer in a text is correct.

    If ``choices`` are given, the text's answer is the choice that it names last. Otherwise,
    math-verify finds the answer.
    """
    if choices:
        # If two choices end at the same position, take the longer one, which contains the shorter.
        return answer == max(choices, key=lambda choice: (_last(choice, text), len(choice))) and (
            _last(answer, text) >= 0
        )
    library = _library()
    return bool(library.verify(library.parse(answer), library.parse(text)))


def _last(choice: str, text: str) -> int:
    """Return the position after the last whole-word occurrence of a choice; -1 if there is none."""
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

"""Data sets of mathematical problems in words."""

import re
from collections.abc import Iterator
from typing import Annotated, NamedTuple

from pydantic import AliasChoices, Field, FiniteFloat
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.evaluation.datasets import DataSet, Row, json_lines, json_list, json_table
from diffmegatron.files import shorten


class Problem(NamedTuple):
    """A mathematical problem in words.

    Attributes:
        solution: steps to the answer; empty if the data set has none.
        choices: answers to choose from; empty if the problem is not multiple-choice.
    """

    question: str
    answer: str
    solution: str = ""
    choices: tuple[str, ...] = ()


# Call of a calculator in GSM8K's solutions, such as <<2+3=5>>.
_CALCULATION = re.compile(r"<<[^>]*>>")


class _Gsm8k(Row):
    question: str
    answer: str

    @override
    def examples(self, name: str) -> Iterator[Problem]:
        solution, mark, answer = self.answer.rpartition("####")
        if not mark:
            raise UserError(f"{name} has no '#### ' before its answer")
        yield Problem(self.question, answer.strip(), _CALCULATION.sub("", solution).strip())


class _Svamp(Row):
    Body: str
    Question: str
    Answer: FiniteFloat

    @override
    def examples(self, name: str) -> Iterator[Problem]:
        body = self.Body.strip()
        question = f"{body}{'' if body.endswith('.') else '.'} {self.Question}"
        yield Problem(question, _number(self.Answer))


class _Math(Row):
    problem: str
    solution: str

    @override
    def examples(self, name: str) -> Iterator[Problem]:
        answer = _boxed(self.solution)
        if answer is None:
            raise UserError(f"{name} has no answer in \\boxed{{}} in its solution")
        yield Problem(self.problem, _latex(answer), self.solution)


# Unit in ASDiv's answers, as in "9 (apples)".
_UNIT = re.compile(r"\([^()]*\)")


class _Asdiv(Row):
    body: str
    question: str
    answer: str

    @override
    def examples(self, name: str) -> Iterator[Problem]:
        answer = _UNIT.sub("", self.answer)
        yield Problem(f"{self.body.strip()} {self.question.strip()}", answer.strip())


class _Mawps(Row):
    question: str = Field(validation_alias=AliasChoices("input", "sQuestion"))
    answers: Annotated[list[FiniteFloat], Field(min_length=1)] | FiniteFloat = Field(
        validation_alias=AliasChoices("target", "lSolutions")
    )

    @override
    def examples(self, name: str) -> Iterator[Problem]:
        answers = self.answers if isinstance(self.answers, list) else [self.answers]
        yield Problem(self.question.strip(), ", ".join(map(_number, answers)))


class _Carp(Row):
    content: str
    answer: str

    @override
    def examples(self, name: str) -> Iterator[Problem]:
        yield Problem(self.content.strip(), _latex(self.answer.strip()))


class _TabMwp(Row):
    question: str
    choices: list[str] | None
    answer: str
    table_title: str | None
    table: str

    @override
    def examples(self, name: str) -> Iterator[Problem]:
        of = f" of {self.table_title}" if self.table_title else ""
        question = f"The table{of}:\n{self.table}\n{self.question}"
        if self.choices:
            question += f" Choose from: {', '.join(self.choices)}."
        choices = tuple(self.choices or ())
        if choices and self.answer not in choices:
            raise UserError(
                f"{name} has the answer {shorten(repr(self.answer))}; it must be one of its choices"
            )
        yield Problem(question, self.answer.strip(), choices=choices)


class _College(Row):
    question: str
    answer: str

    @override
    def examples(self, name: str) -> Iterator[Problem]:
        yield Problem(self.question.strip(), _latex(self.answer.strip()))


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else str(value)


def _latex(answer: str) -> str:
    """Put dollar signs, which mark LaTeX for math-verify, around an answer that is not a number."""
    return answer if "$" in answer or answer.replace(".", "").isdecimal() else f"${answer}$"


def _boxed(solution: str) -> str | None:
    r"""Return the content of the last ``\boxed{}`` with balanced braces; None if there is none."""
    _, mark, rest = solution.rpartition("\\boxed{")
    depth = 1
    for place, letter in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return rest[:place].strip()
    return None


BENCHMARKS: dict[str, DataSet[Problem]] = {
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
        json_list(_Svamp),
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
        json_table(_TabMwp),
        "TabMWP's problems_test.json, problems with their tables by number (Lu et al.)",
    ),
    "college-math": DataSet(
        "college_math_test.jsonl",
        json_lines(_College),
        "CollegeMath's test set, lines of question and answer (Tang et al.)",
    ),
}
TRAINING: DataSet[Problem] = DataSet(
    "gsm8k_train.jsonl",
    json_lines(_Gsm8k),
    "GSM8K's training set (not needed with math.shots=0)",
)

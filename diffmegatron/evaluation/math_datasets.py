"""Problems of mathematics in words, in files of the published data sets."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AliasChoices, BaseModel, Field, FiniteFloat

from diffmegatron.errors import UserError
from diffmegatron.files import clipped, parse_json, read_bytes, shown

_MAX_BYTES = 1 << 30


class Problem(NamedTuple):
    """A question, and its answer with or without the way to it.

    Attributes:
        choices: that the answer is one of; none where any number may be.
    """

    question: str
    answer: str
    solution: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Benchmark:
    """A data set in a file of its published format.

    Attributes:
        file: its name under ``--data-dir``.
        read: the problems of its content.
        origin: where it comes from, for whoever has none.
    """

    file: str
    read: Callable[[bytes, str], Iterator[Problem]]
    origin: str

    def problems(self, data_dir: Path) -> list[Problem]:
        """All of them.

        Raises:
            UserError: the file is missing or of another format.
        """
        path = data_dir / self.file
        if not path.exists():
            raise UserError(f"{shown(path)} does not exist; it is {self.origin}")
        return list(self.read(read_bytes(path, max_bytes=_MAX_BYTES), shown(path)))


class _Row(BaseModel, ABC):
    """A record of a published file, which is a problem."""

    @abstractmethod
    def read(self, name: str) -> Problem:
        """Raises UserError, which says ``name``, where it has no answer."""


# What a calculator of GSM8K's authors would have written.
_CALCULATION = re.compile(r"<<[^>]*>>")


class _Gsm8k(_Row):
    question: str
    answer: str

    def read(self, name: str) -> Problem:
        solution, mark, answer = self.answer.rpartition("####")
        if not mark:
            raise UserError(f"{name} has no '#### ' before its answer")
        return Problem(self.question, answer.strip(), _CALCULATION.sub("", solution).strip())


class _Svamp(_Row):
    Body: str
    Question: str
    Answer: FiniteFloat

    def read(self, name: str) -> Problem:
        body = self.Body.strip()
        question = f"{body}{'' if body.endswith('.') else '.'} {self.Question}"
        return Problem(question, _number(self.Answer))


class _Math(_Row):
    problem: str
    solution: str

    def read(self, name: str) -> Problem:
        answer = _boxed(self.solution)
        if answer is None:
            raise UserError(f"{name} has no answer in \\boxed{{}} in its solution")
        return Problem(self.problem, _latex(answer), self.solution)


# A unit follows the answer: "9 (apples)".
_UNIT = re.compile(r"\([^()]*\)")


class _Asdiv(_Row):
    body: str
    question: str
    answer: str

    def read(self, name: str) -> Problem:
        answer = _UNIT.sub("", self.answer)
        return Problem(f"{self.body.strip()} {self.question.strip()}", answer.strip())


class _Mawps(_Row):
    question: str = Field(validation_alias=AliasChoices("input", "sQuestion"))
    answers: Annotated[list[FiniteFloat], Field(min_length=1)] | FiniteFloat = Field(
        validation_alias=AliasChoices("target", "lSolutions")
    )

    def read(self, name: str) -> Problem:
        answers = self.answers if isinstance(self.answers, list) else [self.answers]
        return Problem(self.question.strip(), ", ".join(map(_number, answers)))


class _Carp(_Row):
    content: str
    answer: str

    def read(self, name: str) -> Problem:
        return Problem(self.content.strip(), _latex(self.answer.strip()))


class _TabMwp(_Row):
    question: str
    choices: list[str] | None
    answer: str
    table_title: str | None
    table: str

    def read(self, name: str) -> Problem:
        of = f" of {self.table_title}" if self.table_title else ""
        question = f"The table{of}:\n{self.table}\n{self.question}"
        if self.choices:
            question += f" Choose from: {', '.join(self.choices)}."
        choices = tuple(self.choices or ())
        if choices and self.answer not in choices:
            raise UserError(f"{name} has the answer {clipped(repr(self.answer))}, no choice of its")
        return Problem(question, self.answer.strip(), choices=choices)


class _College(_Row):
    question: str
    answer: str

    def read(self, name: str) -> Problem:
        return Problem(self.question.strip(), _latex(self.answer.strip()))


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else str(value)


def _latex(answer: str) -> str:
    """An answer that may be LaTeX, marked as such: math-verify reads the bare one as text."""
    return answer if "$" in answer or answer.replace(".", "").isdecimal() else f"${answer}$"


def _boxed(solution: str) -> str | None:
    r"""Return the content of the last ``\boxed{}``, which may contain balanced braces."""
    _, mark, rest = solution.rpartition("\\boxed{")
    depth = 1
    for place, letter in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if not depth:
            return rest[:place].strip()
    return None


def _lines(row: type[_Row]) -> Callable[[bytes, str], Iterator[Problem]]:
    def read(content: bytes, name: str) -> Iterator[Problem]:
        for number, line in enumerate(content.splitlines(), start=1):
            place = f"{name} at line {number}"
            found: _Row = parse_json(line, row, place)
            yield found.read(place)

    return read


def _list(row: type[_Row]) -> Callable[[bytes, str], Iterator[Problem]]:
    def read(content: bytes, name: str) -> Iterator[Problem]:
        rows: list[_Row] = parse_json(content, list[row], name)  # type: ignore[valid-type]
        for number, found in enumerate(rows, start=1):
            yield found.read(f"{name} at problem {number}")

    return read


def _by_number(row: type[_Row]) -> Callable[[bytes, str], Iterator[Problem]]:
    def read(content: bytes, name: str) -> Iterator[Problem]:
        rows: dict[str, Any] = parse_json(content, dict[str, row], name)  # type: ignore[valid-type]
        for number, found in rows.items():
            yield found.read(f"{name} at problem {number}")

    return read


BENCHMARKS = {
    "gsm8k": Benchmark(
        "gsm8k_test.jsonl",
        _lines(_Gsm8k),
        "GSM8K's test set, lines of question and answer (Cobbe et al.)",
    ),
    "math": Benchmark(
        "math_test.jsonl",
        _lines(_Math),
        "MATH's test set, lines of problem and solution (Hendrycks et al.)",
    ),
    "svamp": Benchmark(
        "svamp.json", _list(_Svamp), "SVAMP, a list with Body, Question and Answer (Patel et al.)"
    ),
    "asdiv": Benchmark(
        "asdiv_test.jsonl",
        _lines(_Asdiv),
        "ASDiv, lines of body, question and answer (Miao et al.)",
    ),
    "mawps": Benchmark(
        "mawps_test.jsonl",
        _lines(_Mawps),
        "MAWPS (Koncel-Kedziorski et al.), lines of sQuestion and lSolutions, or of input and "
        "target (PAL's files)",
    ),
    "carp": Benchmark(
        "carp_test.jsonl",
        _lines(_Carp),
        "CARP in English, lines of content and answer (Zhang et al.)",
    ),
    "tabmwp": Benchmark(
        "tabmwp_test.json",
        _by_number(_TabMwp),
        "TabMWP's problems_test.json, problems with their tables by number (Lu et al.)",
    ),
    "college-math": Benchmark(
        "college_math_test.jsonl",
        _lines(_College),
        "CollegeMath's test set, lines of question and answer (Tang et al.)",
    ),
}
TRAINING = Benchmark(
    "gsm8k_train.jsonl", _lines(_Gsm8k), "GSM8K's training set; without it give math.shots 0"
)

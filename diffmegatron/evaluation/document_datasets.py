"""Documents to summarise or to answer from: data sets in files of their published formats."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from diffmegatron.data.prepare.corpus_readers import find_files, read_records
from diffmegatron.errors import UserError
from diffmegatron.files import parse_json, shown

_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_MAX_BYTES = 1 << 28


class Passage(NamedTuple):
    """A document and what is to be made of it.

    Attributes:
        document: its text.
        question: to answer from it; empty where it is to be summarised.
        references: right answers, or a summary.
    """

    document: str
    question: str
    references: tuple[str, ...]


class _Row(BaseModel, ABC):
    """A row of a published file, and the passages in it."""

    @abstractmethod
    def passages(self) -> Iterator[Passage]: ...


class _XSum(_Row):
    document: str
    summary: str

    def passages(self) -> Iterator[Passage]:
        yield Passage(self.document, "", (self.summary,))


class _MultiNews(_XSum):
    def passages(self) -> Iterator[Passage]:
        # What stands between the articles.
        document = self.document.replace("NEWLINE_CHAR", "\n").replace("|||||", "\n\n")
        yield Passage(document, "", (self.summary,))


class _CnnDailyMail(_Row):
    article: str
    highlights: str

    def passages(self) -> Iterator[Passage]:
        yield Passage(self.article, "", (self.highlights,))


class _LongBench(_Row):
    input: str
    context: str
    answers: list[str] = Field(min_length=1)

    def passages(self) -> Iterator[Passage]:
        yield Passage(self.context, self.input, tuple(self.answers))


class _LEval(_Row):
    input: str
    instructions: list[str]
    outputs: list[str]

    def passages(self) -> Iterator[Passage]:
        for question, answer in zip(self.instructions, self.outputs, strict=False):
            yield Passage(self.input, question, (answer,))


class _LEvalSummaries(_LEval):
    def passages(self) -> Iterator[Passage]:
        # Its instruction asks for a summary in other words.
        return (each._replace(question="") for each in super().passages())


@dataclass(frozen=True)
class Task:
    """A data set.

    Attributes:
        file: under ``--data-dir``, without its ending.
        row: of the file.
        origin: what it is, for whoever has none.
    """

    file: str
    row: type[_Row]
    origin: str

    def passages(self, data_dir: Path, count: int) -> list[Passage]:
        """The first of them.

        Raises:
            UserError: the file is missing, empty or of another format.
        """
        rows = self._rows(self._found(data_dir))
        found = list(islice((each for row in rows for each in row.passages()), count))
        if not found:
            raise UserError(f"{shown(data_dir / self.file)} has nothing in it; it is {self.origin}")
        return found

    def _found(self, data_dir: Path) -> Path:
        for ending in _ENDINGS:
            if (path := data_dir / f"{self.file}{ending}").exists():
                return path
        raise UserError(
            f"{shown(data_dir / self.file)}{_ENDINGS[0]} does not exist (nor with "
            f"{', '.join(_ENDINGS[1:])}); it is {self.origin}"
        )

    def _rows(self, path: Path) -> Iterator[_Row]:
        (file,) = find_files([path], "*")
        for record in read_records(file, tuple(self.row.model_fields), _MAX_BYTES):
            name = f"{shown(path)} at line {record.line}"
            if record.problem:
                raise UserError(f"{name} cannot be read: {record.problem}")
            yield _parsed(record.payload, self.row, name)


def _parsed(payload: bytes | dict[str, Any], row: type[_Row], name: str) -> _Row:
    if isinstance(payload, bytes):
        found: _Row = parse_json(payload, row, name)
        return found
    try:
        return TypeAdapter(row).validate_python(payload)
    except ValidationError as error:
        (key, *_), said = error.errors()[0]["loc"], error.errors()[0]["msg"]
        raise UserError(f"{name} has no usable column {key}: {said.lower()}") from None


def _summaries(fields: str, of: str) -> str:
    return f"rows of {fields}: {of}"


def _long_bench(of: str) -> str:
    return f"lines of input, context and answers: {of}, as LongBench has it (THUDM/LongBench)"


def _l_eval(of: str) -> str:
    return f"lines of input, instructions and outputs: {of} of L-Eval (L4NLP/LEval)"


TASKS = {
    "xsum": Task(
        "xsum_test",
        _XSum,
        _summaries("document and summary", "XSum's test set (EdinburghNLP/xsum)"),
    ),
    "cnn_dailymail": Task(
        "cnn_dailymail_test",
        _CnnDailyMail,
        _summaries("article and highlights", "CNN/DailyMail 3.0.0's test set (cnn_dailymail)"),
    ),
    "multi_news": Task(
        "multi_news_test",
        _MultiNews,
        _summaries("document and summary", "Multi-News's test set (alexfabbri/multi_news)"),
    ),
    "qasper": Task("qasper", _LongBench, _long_bench("Qasper")),
    "hotpotqa": Task("hotpotqa", _LongBench, _long_bench("HotpotQA")),
    "2wikimqa": Task("2wikimqa", _LongBench, _long_bench("2WikiMultihopQA")),
    "leval_news_summ": Task("leval_news_summ", _LEvalSummaries, _l_eval("news_summ")),
    "leval_scientific_qa": Task("leval_scientific_qa", _LEval, _l_eval("scientific_qa")),
}


def read_passages(name: str, data_dir: Path, count: int) -> list[Passage]:
    """The first passages of a data set.

    Raises:
        UserError: it is unknown, or as :meth:`Task.passages`.
    """
    if name not in TASKS:
        raise UserError(f"task {name!r} is unknown; give some of {', '.join(TASKS)}")
    return TASKS[name].passages(data_dir, count)

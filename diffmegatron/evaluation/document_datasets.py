"""Data sets of documents that a model summarises, or from which it answers questions."""

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import Field
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.evaluation.datasets import DataSet, Row, json_lines


class Passage(NamedTuple):
    """A document to summarise, or to answer a question from.

    Attributes:
        question: question about the document; empty if the task is a summary.
        references: correct answers to the question, or one reference summary.
    """

    document: str
    question: str
    references: tuple[str, ...]


class _XSum(Row):
    document: str
    summary: str

    @override
    def examples(self, name: str) -> Iterator[Passage]:
        yield Passage(self.document, "", (self.summary,))


class _MultiNews(_XSum):
    @override
    def examples(self, name: str) -> Iterator[Passage]:
        # The file marks ends of lines by NEWLINE_CHAR, and ends of articles by |||||.
        document = self.document.replace("NEWLINE_CHAR", "\n").replace("|||||", "\n\n")
        yield Passage(document, "", (self.summary,))


class _CnnDailyMail(Row):
    article: str
    highlights: str

    @override
    def examples(self, name: str) -> Iterator[Passage]:
        yield Passage(self.article, "", (self.highlights,))


class _LongBench(Row):
    input: str
    context: str
    answers: list[str] = Field(min_length=1)

    @override
    def examples(self, name: str) -> Iterator[Passage]:
        yield Passage(self.context, self.input, tuple(self.answers))


class _LEval(Row):
    input: str
    instructions: list[str]
    outputs: list[str]

    @override
    def examples(self, name: str) -> Iterator[Passage]:
        if len(self.instructions) != len(self.outputs):
            raise UserError(
                f"{name}: {len(self.instructions)} instructions and {len(self.outputs)} outputs; "
                "give an output for each instruction"
            )
        for question, answer in zip(self.instructions, self.outputs, strict=True):
            yield Passage(self.input, question, (answer,))


class _LEvalSummaries(_LEval):
    @override
    def examples(self, name: str) -> Iterator[Passage]:
        # The suite has its own prompt for summaries.
        return (each._replace(question="") for each in super().examples(name))


def _long_bench(file: str, title: str) -> DataSet[Passage]:
    origin = f"lines of input, context and answers: {title} in LongBench's form (THUDM/LongBench)"
    return DataSet(file, json_lines(_LongBench), origin)


DATASETS: dict[str, DataSet[Passage]] = {
    "xsum": DataSet(
        "xsum_test.jsonl",
        json_lines(_XSum),
        "rows of document and summary: XSum's test set (EdinburghNLP/xsum)",
    ),
    "cnn_dailymail": DataSet(
        "cnn_dailymail_test.jsonl",
        json_lines(_CnnDailyMail),
        "rows of article and highlights: CNN/DailyMail 3.0.0's test set (cnn_dailymail)",
    ),
    "multi_news": DataSet(
        "multi_news_test.jsonl",
        json_lines(_MultiNews),
        "rows of document and summary: Multi-News's test set (alexfabbri/multi_news)",
    ),
    "qasper": _long_bench("qasper.jsonl", "Qasper"),
    "hotpotqa": _long_bench("hotpotqa.jsonl", "HotpotQA"),
    "2wikimqa": _long_bench("2wikimqa.jsonl", "2WikiMultihopQA"),
    "leval_news_summ": DataSet(
        "leval_news_summ.jsonl",
        json_lines(_LEvalSummaries),
        "lines of input, instructions and outputs: news_summ of L-Eval (L4NLP/LEval)",
    ),
    "leval_scientific_qa": DataSet(
        "leval_scientific_qa.jsonl",
        json_lines(_LEval),
        "lines of input, instructions and outputs: scientific_qa of L-Eval (L4NLP/LEval)",
    ),
}

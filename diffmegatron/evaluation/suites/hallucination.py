"""Contextual hallucination: a judge (another model) compares a model's texts with documents.

The method is from Differential Transformer (Ye et al., tables 4 and 5) and Chuang et al. (2024).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.evaluation.datasets import DATA_DIR, DataSet, Row, choose, json_lines
from diffmegatron.evaluation.figures import Figure, plot_measures
from diffmegatron.evaluation.judge import Judge, open_judge, parse_verdict
from diffmegatron.evaluation.requests import Generation, ItemGenerator
from diffmegatron.evaluation.suite import Direction, Item, Mean, Published, Record, Records, Suite
from diffmegatron.evaluation.targets import Target
from diffmegatron.section import Count, Size


class Passage(NamedTuple):
    """A document to summarise, or to answer a question from.

    ``question`` is empty if the task is a summary. ``references`` has correct answers to the
    question, or one reference summary.
    """

    document: str
    question: str
    references: tuple[str, ...]


class _XSum(Row):
    document: str
    summary: str

    def examples(self, name: str) -> Iterator[Passage]:
        yield Passage(self.document, "", (self.summary,))


class _MultiNews(_XSum):
    def examples(self, name: str) -> Iterator[Passage]:
        # The file marks ends of lines by NEWLINE_CHAR, and ends of articles by |||||.
        document = self.document.replace("NEWLINE_CHAR", "\n").replace("|||||", "\n\n")
        yield Passage(document, "", (self.summary,))


class _CnnDailyMail(Row):
    article: str
    highlights: str

    def examples(self, name: str) -> Iterator[Passage]:
        yield Passage(self.article, "", (self.highlights,))


class _LongBench(Row):
    input: str
    context: str
    answers: list[str] = Field(min_length=1)

    def examples(self, name: str) -> Iterator[Passage]:
        yield Passage(self.context, self.input, tuple(self.answers))


class _LEval(Row):
    input: str
    instructions: list[str]
    outputs: list[str]

    def examples(self, name: str) -> Iterator[Passage]:
        if len(self.instructions) != len(self.outputs):
            raise UserError(
                f"{name}: {len(self.instructions)} instructions and {len(self.outputs)} outputs; "
                "give an output for each instruction"
            )
        for question, answer in zip(self.instructions, self.outputs, strict=True):
            yield Passage(self.input, question, (answer,))


class _LEvalSummaries(_LEval):
    def examples(self, name: str) -> Iterator[Passage]:
        # The suite asks for summaries with its own prompt, so leave out the file's instruction.
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
_PAPER = {
    "xsum": (0.53, 0.44),
    "cnn_dailymail": (0.41, 0.32),
    "multi_news": (0.61, 0.42),
    "qasper": (0.39, 0.28),
    "hotpotqa": (0.46, 0.36),
    "2wikimqa": (0.36, 0.29),
}
_SUMMARY = "\n\nWrite a short summary of the document, with nothing that it does not say.\nSummary:"
_QUESTION = "\n\nAnswer the question from the document alone.\nQuestion: {question}\nAnswer:"
_END = "\n\n"
_CUT = "\n[...]\n"

JUDGE_PROMPT = """\
You are given a document and a {kind} that somebody wrote from it. Decide whether everything that \
the {kind} says follows from the document. One statement that the document does not support, or \
that contradicts it, makes the {kind} false. A {kind} that differs from the reference can still be \
true, as long as the document supports it. Use nothing but the document.

Document:
{document}

{question}Reference {kind}: {reference}

{kind} to judge: {text}

First explain your decision. Then end with the line
Conclusion: True
if the whole {kind} follows from the document, or with the line
Conclusion: False
if any part of it does not. After a false one, add a line with a Python list of the phrases of the \
{kind} that are wrong or unsupported, word for word:
Problematic Spans: ["...", "..."]
"""


class Hallucination(Suite):
    """Share of generated summaries and answers that a judge finds supported by the document.

    First every target generates texts, with greedy decoding up to an empty line or
    ``answer_tokens`` tokens. The prompt is

        Document: ...

        Write a short summary of the document, with nothing that it does not say.
        Summary:

    If the data set has questions, it is

        Document: ...

        Answer the question from the document alone.
        Question: ...
        Answer:

    If a document does not fit into ``context``, its middle is replaced by ``[...]``, as in
    LongBench. Then a judge, which is another model, receives the document in the form below. A
    question precedes the reference. A text is true if the judge's answer has a line ``Conclusion:
    True`` and no other conclusion. An answer without exactly one conclusion cannot be read. It
    counts as false, as in the paper, and the report has the number of such answers.
    ``hallucination/TARGET.jsonl`` has all texts and answers.

    ``judge`` is a Hugging Face folder, or the URL of an OpenAI-compatible interface:

    - A folder is loaded into memory beside the target. If it has a chat template, the template is
      used.
    - At a URL, requests go to ``/chat/completions``, at temperature 0. The key is sent to this URL
      only and never written to a file. A request is repeated up to two times if the judge cannot be
      reached, needs more than ``judge_seconds``, or returns the status 429 or 5xx. Then the command
      ends with an error, and the same command resumes with the remaining verdicts.
    - Without ``judge``, the suite generates the texts but has no verdicts.
    - Settings of the judge may change between runs. Verdicts are stored under the judge's name
      (``judge_model``, or the name of the folder with a hash of its files), and another name gets
      new verdicts.

    *Deviations*: the papers judge with GPT-4o, and use samples that are not published. The prompts
    are our wording of their protocol (a verdict after an explanation, with spans). The two L-Eval
    sets are used only if ``tasks`` names them.
    """

    name = "hallucination"
    title = "Contextual hallucination, share of texts without it"
    description = (
        "The model summarises documents or answers questions about them; another model decides "
        "whether the text follows from the document."
    )
    passes = ("writing", "judging")
    published = tuple(
        Published(f"{name}, true", *numbers, "3B, tables 4 and 5")
        for name, numbers in _PAPER.items()
    )
    follow_up_settings = frozenset(
        ("judge", "judge_model", "judge_key", "judge_tokens", "judge_seconds")
    )

    data_dir: Path = DATA_DIR
    tasks: tuple[str, ...] = Field(default=tuple(_PAPER), min_length=1, description="data sets")
    samples: Count = Field(default=100, description="number of documents per task")
    context: Size = Field(default=2048, description="tokens of prompt and answer")
    answer_tokens: Size = Field(default=128, description="largest number of tokens to generate")
    judge: str | None = Field(default=None, description="a Hugging Face folder, or a URL")
    judge_model: str = Field(default="", description="name of the model at the URL")
    judge_key: str = Field(
        default="OPENAI_API_KEY",
        description="environment variable of the key, if the URL needs one",
    )
    judge_tokens: Size = Field(default=512, description="largest number of tokens of its answer")
    judge_seconds: Annotated[float, Field(gt=0, le=86_400)] = Field(
        default=120.0, description="time limit of an answer from a URL"
    )

    @override
    def check(self, target: Target) -> None:
        choose(self.tasks, DATASETS, "task")
        self._judge()

    @override
    def items(self, target: Target) -> list[Item]:
        return [
            Item(f"{name}/{number}", self.context, (name, tuple(passage)))
            for name in self.tasks
            for number, passage in enumerate(DATASETS[name].examples(self.data_dir, self.samples))
        ]

    @override
    def follow_ups(self, target: Target, records: Records) -> list[Item]:
        """Return an item for the verdict on each text; without a judge, return [].

        The key of an item contains the name of the judge.
        """
        judge = self._judge()
        if judge is None:
            return []
        return [Item(f"judged by {judge.name}/{record['item']}", 0, record) for record in records]

    @override
    def requests_of(self, target: Target, item: Item) -> ItemGenerator:
        """Generate a text; for a follow-up, judge the text whose record is ``item.content``."""
        if isinstance(item.content, dict):
            judge = self._judge()
            assert judge is not None
            answer = judge.ask(judge_question(item.content))
            true, spans = parse_verdict(answer)
            return {"task": item.content["task"], "verdict": true, "spans": spans, "said": answer}
        name, parts = item.content
        passage = Passage(*parts)
        ids, document = self._prompt(target, passage)
        (tokens,) = yield [Generation(ids, self.answer_tokens, (_END,))]
        text = target.tokenizer.decode(tokens).split(_END)[0].strip()
        return {"task": name, **passage._replace(document=document)._asdict(), "text": text}

    @override
    def means(self, record: Record) -> dict[str, Mean]:
        if "verdict" not in record:
            return {}
        name, verdict = record["task"], record["verdict"]
        return {
            f"{name}, true": Mean(float(verdict is True)),
            f"{name}, verdicts that cannot be read": Mean(float(verdict is None)),
        }

    @override
    def remarks(self, records: Mapping[str, Records]) -> list[str]:
        found = []
        for name, of_target in records.items():
            judged = [record for record in of_target if "verdict" in record]
            unread = [record["item"] for record in judged if record["verdict"] is None]
            if not judged:
                found.append(
                    f"{name}: {len(of_target)} texts are written and none is judged; give "
                    "hallucination.judge, a folder or a URL, and run the same command again"
                )
            if unread:
                found.append(
                    f"{name}: {len(unread)} of {len(judged)} verdicts cannot be read and count as "
                    f"not true; the first is {unread[0]}"
                )
        return found

    @override
    def better(self, measure: str) -> Direction:
        return "higher" if measure.endswith(", true") else "lower"

    @override
    def draw(self, figure: Figure, records: Mapping[str, Records]) -> bool:
        if not any("verdict" in record for each in records.values() for record in each):
            return False
        measures = {task: f"{task}, true" for task in self.tasks}
        ylabel = "share of texts that are true"
        plot_measures(figure.subplots(), self, records, measures, ylabel, is_share=True)
        return True

    def _judge(self) -> Judge | None:
        if self.judge is None:
            return None
        return open_judge(
            self.judge, self.judge_model, self.judge_key, self.judge_tokens, self.judge_seconds
        )

    def _prompt(self, target: Target, passage: Passage) -> tuple[list[int], str]:
        """Return the ids of a prompt, and the document as the prompt contains it.

        If the document is too long, its middle is left out.
        """
        task = _QUESTION.format(question=passage.question) if passage.question else _SUMMARY
        before, after = target.encode("Document: "), target.encode(task)
        document = target.encode(passage.document)
        available = self.context - self.answer_tokens - 1 - len(before) - len(after)
        text = passage.document
        if len(document) > available:
            cut = target.encode(_CUT)
            half = max(0, available - len(cut)) // 2
            ends = (document[:half], document[len(document) - half :])
            text = _CUT.join(map(target.tokenizer.decode, ends))
            document = [*ends[0], *cut, *ends[1]]
        return [target.start_token, *before, *document, *after], text


def judge_question(written: Record) -> str:
    """Return the judge's prompt for the record of a generated text."""
    question = written["question"]
    return JUDGE_PROMPT.format(
        kind="answer" if question else "summary",
        document=written["document"],
        question=f"Question: {question}\n\n" if question else "",
        reference=" / ".join(written["references"]),
        text=written["text"],
    )

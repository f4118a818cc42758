"""Sets of multiple-choice questions in files: those of Hugging Face's repositories, or prompts.

A row has the columns that lm-eval's tasks read, whichever of the two it comes from.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from diffmegatron.data.prepare.corpus_readers import find_files, read_records
from diffmegatron.errors import UserError
from diffmegatron.files import clipped, parse_json, read_bytes, shown

Row = dict[str, Any]

_MAX_BYTES = 1 << 24
_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")
_INSTRUCTIONS = "lists of instruction and answer (LLM-Adapters, Hu et al., 2023)"


class Choices(BaseModel):
    """Texts and their labels."""

    text: list[str]
    label: list[str]


class _Labelled(BaseModel):
    choices: Choices
    answerKey: str  # noqa: N815 (the column's name)

    @model_validator(mode="after")
    def _names_a_choice(self) -> Self:
        labels = self.choices.label
        if len(labels) != len(self.choices.text) or self.answerKey.strip() not in labels:
            raise ValueError(f"answerKey {self.answerKey!r} is not one of the labels {labels}")
        return self


class _Arc(_Labelled):
    question: str


class _OpenBookQA(_Labelled):
    question_stem: str


class _BoolQ(BaseModel):
    question: str
    passage: str
    label: Literal[0, 1]


class _HellaSwag(BaseModel):
    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: list[str] = Field(min_length=4, max_length=4)
    label: Literal["0", "1", "2", "3"]


class _Piqa(BaseModel):
    goal: str
    sol1: str
    sol2: str
    label: Literal[0, 1]


class _WinoGrande(BaseModel):
    sentence: Annotated[str, Field(pattern="_")]
    option1: str
    option2: str
    answer: Literal["1", "2"]


class _Prompt(BaseModel):
    instruction: str
    answer: str


@dataclass(frozen=True)
class Questions:
    """A set of questions in files of its published format.

    Attributes:
        repository: of Hugging Face's hub.
        folder: under ``--data-dir``: the repository's files, or those of the configuration.
        split: that is asked.
        row: the columns.
        pattern: reads an instruction of ``TASK_test.json``; its groups are columns, ``options``
            all choices. None: there are no such files.
    """

    repository: str
    folder: str
    split: str
    row: type[BaseModel]
    pattern: str | None

    def read(self, data_dir: Path, task: str, *, train: bool = False) -> list[Row]:
        """The rows that are asked, or those of the training set, in order.

        Raises:
            UserError: there are none, or a file is of another format.
        """
        split = "train" if train else self.split
        if self.is_repository(data_dir, split):
            rows = list(self._rows(data_dir / self.folder, split))
            if not rows:
                raise UserError(f"{shown(data_dir / self.folder)} has no rows in its {split} files")
            return rows
        prompts = data_dir / f"{task}_test.json"
        if not train and self.pattern is not None and prompts.exists():
            return _instructions(prompts, self.pattern)
        or_else = ""
        if train:
            or_else = "; examples are drawn from them: without them give shots of [0]"
        elif self.pattern is not None:
            or_else = f", nor is there {prompts.name}, {_INSTRUCTIONS}"
        raise UserError(
            f"{shown(data_dir / self.folder)} has no {split}*.parquet or {split}*.jsonl, the "
            f"{split} files of {self.repository} on Hugging Face's hub{or_else}"
        )

    def is_repository(self, data_dir: Path, split: str) -> bool:
        """Whether the repository's files of a split are there."""
        return bool(self._files(data_dir / self.folder, split))

    @staticmethod
    def _files(folder: Path, split: str) -> list[Path]:
        return sorted(path for path in folder.rglob(f"{split}*") if path.name.endswith(_SUFFIXES))

    def _rows(self, folder: Path, split: str) -> Iterator[Row]:
        columns = tuple(self.row.model_fields)
        for file in find_files(self._files(folder, split), "*"):
            for record in read_records(file, columns, _MAX_BYTES):
                name = f"{shown(file.path)} at line {record.line}"
                if record.problem:
                    raise UserError(f"{name} is no question: {record.problem}")
                if isinstance(record.payload, bytes):
                    yield parse_json(record.payload, self.row, name).model_dump()
                else:
                    yield _checked(record.payload, self.row, name).model_dump()


def _checked(values: Row, row: type[BaseModel], name: str) -> BaseModel:
    try:
        return row.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{name} is no question: {clipped(first['msg'])} at {place}") from None


# Instructions begin with what is to be done and end with the form of the answer.
_CHOICES = re.compile(r"\s*Answer(\d+): ")
_GOLD = re.compile(r"(?:answer|solution|option)([1-9])|(true)|(false)")


def _instructions(path: Path, pattern: str) -> list[Row]:
    prompts: list[_Prompt] = parse_json(read_bytes(path), list[_Prompt], shown(path))
    found = []
    for number, prompt in enumerate(prompts, start=1):
        match = re.fullmatch(pattern, prompt.instruction, re.DOTALL)
        gold = _GOLD.fullmatch(prompt.answer)
        row = _row(match.groupdict(), gold) if match and gold else None
        if row is None:
            raise UserError(
                f"{shown(path)} has no question in prompt {number}, or no answer: it must be of "
                f"{_INSTRUCTIONS}"
            )
        found.append(row)
    if not found:
        raise UserError(f"{shown(path)} has no prompts")
    return found


def _row(parts: Row, gold: re.Match[str]) -> Row | None:
    """The columns; None where the answer is not one of the choices."""
    number = int(gold[1]) if gold[1] else None
    if "options" in parts:
        texts = _CHOICES.split(parts.pop("options"))[::2]
        labels = [str(place) for place, _ in enumerate(texts, start=1)]
        choices = {"text": texts, "label": labels}
        key = str(number)
        return parts | {"choices": choices, "answerKey": key} if key in labels else None
    if "passage" in parts:
        return parts | {"label": int(bool(gold[2]))} if number is None else None
    if number not in (1, 2):
        return None
    return parts | ({"answer": str(number)} if "option1" in parts else {"label": number - 1})


_ASK = r"Please choose the correct answer to the question: "
_FORM = r"\s*Answer format: .*"
_ARC_PATTERN = rf"{_ASK}(?P<question>.*?)\n\nAnswer1: (?P<options>.*?){_FORM}"
_ARC = "allenai/ai2_arc"
QUESTIONS = {
    "arc_challenge": Questions(_ARC, "ai2_arc/ARC-Challenge", "test", _Arc, _ARC_PATTERN),
    "arc_easy": Questions(_ARC, "ai2_arc/ARC-Easy", "test", _Arc, _ARC_PATTERN),
    "boolq": Questions(
        "aps/super_glue",
        "super_glue/boolq",
        "validation",
        _BoolQ,
        r"Please answer the following question with true or false, question: "
        rf"(?P<question>.*?)\?(?P<passage>){_FORM}",
    ),
    "hellaswag": Questions("Rowan/hellaswag", "hellaswag", "validation", _HellaSwag, None),
    "openbookqa": Questions(
        "allenai/openbookqa",
        "openbookqa/main",
        "test",
        _OpenBookQA,
        _ARC_PATTERN.replace("<question>", "<question_stem>"),
    ),
    "piqa": Questions(
        "baber/piqa",
        "piqa",
        "validation",
        _Piqa,
        r"Please choose the correct solution to the question: (?P<goal>.*?)\n\n"
        r"Solution1: (?P<sol1>.*?)\n\nSolution2: (?P<sol2>.*?)\n\nAnswer format: .*",
    ),
    "winogrande": Questions(
        "allenai/winogrande",
        "winogrande/winogrande_xl",
        "validation",
        _WinoGrande,
        r"Please choose the correct answer to fill in the blank to complete the given sentence: "
        rf"(?P<sentence>.*?_.*?)\n\nOption1: (?P<option1>.*?) Option2: (?P<option2>.*?){_FORM}",
    ),
}

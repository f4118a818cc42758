"""Tests of reading data sets in every accepted format, and of options that become suite fields."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from diffmegatron.errors import UserError
from diffmegatron.evaluation.datasets import choose
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings
from diffmegatron.evaluation.suites.math import BENCHMARKS

ROWS = [
    {"question": "2 and 3?", "answer": "It is 5.\n#### 5"},
    {"question": "4 and 3?", "answer": "It is 7.\n#### 7"},
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def write_lines(folder: Path) -> None:
    (folder / "gsm8k_test.jsonl").write_bytes(LINES)


def write_compressed(folder: Path) -> None:
    (folder / "gsm8k_test.jsonl.gz").write_bytes(gzip.compress(LINES))


def write_parquet(folder: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "gsm8k_test.parquet")


@pytest.mark.parametrize("write", [write_lines, write_compressed, write_parquet])
def test_lines_are_read_in_every_format(write, tmp_path):
    write(tmp_path)
    found = BENCHMARKS["gsm8k"].examples(tmp_path)
    assert [(each.question, each.answer) for each in found] == [
        ("2 and 3?", "5"),
        ("4 and 3?", "7"),
    ]
    assert BENCHMARKS["gsm8k"].examples(tmp_path, 1) == found[:1]


def test_parquet_columns_may_have_alternative_names_of_a_key(tmp_path):
    table = pyarrow.Table.from_pylist([{"sQuestion": " 2 and 3? ", "lSolutions": [5.0]}])
    pyarrow.parquet.write_table(table, tmp_path / "mawps_test.parquet")
    (found,) = BENCHMARKS["mawps"].examples(tmp_path)
    assert (found.question, found.answer) == ("2 and 3?", "5")


def test_unknown_and_empty_data_sets_are_errors(tmp_path):
    with pytest.raises(UserError, match="task 'gsm9k' is unknown; choose from gsm8k, math"):
        choose(["gsm9k"], BENCHMARKS, "task")
    (tmp_path / "svamp.json").write_text("[]")
    with pytest.raises(UserError, match=r"svamp\.json is empty; it must be SVAMP"):
        BENCHMARKS["svamp"].examples(tmp_path)


def test_options_become_fields_of_suites():
    settings = EvaluateSettings(data=["a.jsonl", "b=c.txt"], haystack="books", dtype="bfloat16")
    assert settings.suite_fields() == {"data": ("a.jsonl", "b=c.txt"), "haystack": Path("books")}
    assert EvaluateSettings().suite_fields() == {}
    assert EvaluateSettings(batch_tokens=7).tokens(is_generation=True) == 7

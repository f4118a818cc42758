"""The page of all evaluation suites, from their classes."""

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from diffmegatron.config.keys import default_as_yaml, type_in_words
from diffmegatron.evaluation.suite import Published, Suite
from diffmegatron.evaluation.suites import SUITES, classification, hallucination, math
from diffmegatron.evaluation.suites.needle import question
from tools.reference.markdown import code, docstring, head, joined, table

_OPTIONS = ("data", "haystack", "data_dir")
# Files under --data-dir, and prompts, by suite.
_CLASSIFICATION = {
    each.file: each.origin
    for task in classification.TASKS.values()
    for each in (task.train, task.test)
}
_FILES: dict[str, dict[str, str]] = {
    "many-shot": _CLASSIFICATION,
    "order": _CLASSIFICATION,
    "math": {each.file: each.origin for each in (*math.BENCHMARKS.values(), math.TRAINING)},
    "hallucination": {each.file: each.origin for each in hallucination.DATASETS.values()},
}
_PROMPTS = {
    "needle": question(("Oslo", "Lima")),
    "hallucination": hallucination.JUDGE_PROMPT,
}
_INTRODUCTION = """\
A suite is a benchmark of [`diffmegatron evaluate`](../evaluation.md). `--set SUITE.KEY=VALUE`
changes a setting. Settings without a default must be given.

- The *paper* is Differential Transformer (Ye et al.), and *deviation* marks a difference from it.
- The *start token* is the model's `bos_token_id`, or else its end-of-document token.
- In *greedy* decoding, every new token is the most likely one. A *map* is the attention matrix of
  a head.
- `context` is by default the shortest context of the targets, and at most 2,048 tokens; within
  training it is by default `training.seq_length`."""


def page() -> str:
    """Return the page docs/reference/suites.md."""
    overview = table(
        ("suite", "title", "needs", "better", "in training", "vLLM"),
        [_overview_row(name, suite) for name, suite in SUITES.items()],
    )
    parts = [head("Suites", "suites", _INTRODUCTION), overview]
    for name, suite in SUITES.items():
        parts += _section(name, suite)
    return joined(parts)


def _overview_row(name: str, suite: type[Suite]) -> tuple[str, ...]:
    given = [f"--{key.replace('_', '-')}" for key in _OPTIONS if key in suite.model_fields]
    needs = "runs" if suite.reads_runs else ", ".join(map(code, given)) or "a network"
    engines = not (suite.reads_attention or suite.needs_network or suite.reads_runs)
    direction = suite.direction or "by measure"
    return (
        f"[`{name}`](#{name})",
        suite.title,
        needs,
        direction,
        "yes" if suite.within_training else "",
        "yes" if engines else "",
    )


def _section(name: str, suite: type[Suite]) -> Iterator[str]:
    yield f"## {name}"
    yield docstring(suite)
    yield f"In the report: {suite.description}"
    schema = suite.model_json_schema()
    rows = [
        (
            code(f"--{key.replace('_', '-')}" if key in _OPTIONS else key),
            type_in_words(schema["properties"][key], schema),
            _default(field),
            field.description or "",
        )
        for key, field in suite.model_fields.items()
    ]
    yield table(("setting", "value", "default", "meaning"), rows)
    if name in _PROMPTS:
        yield f"```text\n{_PROMPTS[name].strip()}\n```"
    if name in _FILES:
        yield "A `.jsonl` file may also end in `.jsonl.gz`, `.jsonl.zst` or `.parquet`."
        yield table(("file under `--data-dir`", "content"), _FILES[name].items())
    if suite.published:
        yield "Numbers of the paper:"
        columns = ("measure", "differential", "Transformer", "source")
        yield table(columns, map(_published_row, suite.published))


def _default(field: FieldInfo) -> str:
    return code(default_as_yaml(field) or "")


def _published_row(number: Published) -> tuple[str, ...]:
    other = "" if number.transformer is None else f"{number.transformer:g}"
    return number.measure, f"{number.differential:g}", other, number.source

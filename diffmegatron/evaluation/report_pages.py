"""``report.md`` and ``report.html`` of the results, with the pictures."""

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any

# Header and rows of text.
Table = tuple[Sequence[str], Sequence[Sequence[str]]]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border: 1px solid #ccc; padding: .25rem .6rem; text-align: left; }
td + td, th + th { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; }
"""
_NOTE = (
    "Intervals are 95%, of a bootstrap over the items; differences are to the first target, on the "
    "items that both have, drawn alike for both."
)

# Of fewer items an interval is too narrow to be called 95%: of n normal ones the bootstrap's ends
# lie at 1.96 sqrt((n - 1) / n) standard errors, and Student's t has less than 90% between them.
_FEW_ITEMS = 10


def to_markdown(outcome: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The report; pictures lie beside it as ``SUITE.png``."""
    parts = ["# Evaluation", _NOTE, markdown_table(_targets(outcome))]
    for name, suite in outcome["suites"].items():
        parts.append(f"## {suite['title']} (`{name}`)")
        parts += [markdown_table(table) for table in _tables(suite, list(outcome["targets"]))]
        parts += _of_few_items(suite)
        if name in pictures:
            parts.append(f"![{suite['title']}]({name}.png)")
        parts.append(f"Settings: `{_settings(suite)}`")
        parts += [_list_of("Not run", suite["not_run"])] if suite["not_run"] else []
    return "\n\n".join(parts) + "\n"


def to_html(outcome: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The report as one file that needs no other."""
    parts = ["<h1>Evaluation</h1>", f"<p>{_NOTE}</p>", _html_table(_targets(outcome))]
    for name, suite in outcome["suites"].items():
        title = html.escape(suite["title"])
        parts.append(f"<h2>{title} (<code>{name}</code>)</h2>")
        parts += [_html_table(table) for table in _tables(suite, list(outcome["targets"]))]
        parts += [f"<p>{html.escape(line)}</p>" for line in _of_few_items(suite)]
        if name in pictures:
            data = base64.b64encode(pictures[name]).decode()
            parts.append(f'<img alt="{title}" src="data:image/png;base64,{data}">')
        parts.append(f"<p>Settings: <code>{html.escape(_settings(suite))}</code></p>")
        if suite["not_run"]:
            lines = "".join(f"<li>{html.escape(line)}</li>" for line in suite["not_run"])
            parts.append(f"<p>Not run:</p><ul>{lines}</ul>")
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Evaluation</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _targets(outcome: Mapping[str, Any]) -> Table:
    keys = ("path", "model_type", "context")
    rows = [
        (name, *("" if each.get(key) is None else str(each[key]) for key in keys))
        for name, each in outcome["targets"].items()
    ]
    return ("target", *keys), rows


def _tables(suite: Mapping[str, Any], targets: Sequence[str]) -> list[Table]:
    return [
        table
        for table in (_measures(suite, targets), _totals(suite, targets), _across(suite))
        if table[1]
    ]


def _measures(suite: Mapping[str, Any], targets: Sequence[str]) -> Table:
    first, *others = targets
    published = {each["measure"]: each for each in suite["published"]}
    header = ["measure", *targets, *(f"{name} - {first}" for name in others)]
    if published:
        header.append("paper: differential / Transformer")
    rows = []
    for measure, found in suite["measures"].items():
        row = [measure, *(_estimate(found["targets"][name]) for name in targets)]
        row += [_estimate(found["differences"][name], "+") for name in others]
        if published:
            row.append(_published(published.get(measure)))
        rows.append(row)
    return header, rows


def _of_few_items(suite: Mapping[str, Any]) -> list[str]:
    """A sentence where intervals are of so few items that they say little; else none."""
    counts = {
        measure: min(each["items"] for each in found["targets"].values() if each is not None)
        for measure, found in suite["measures"].items()
        if any(found["targets"].values())
    }
    few = {measure: items for measure, items in counts.items() if items < _FEW_ITEMS}
    if not few:
        return []
    which = "All measures" if len(few) == len(counts) else ", ".join(few)
    fewest = min(few.values())
    return [
        f"{which}: of fewer than {_FEW_ITEMS} items ({fewest} at the fewest), whose intervals "
        "are too narrow and say little; measure more items."
    ]


def _totals(suite: Mapping[str, Any], targets: Sequence[str]) -> Table:
    names = list(dict.fromkeys(name for each in suite["totals"].values() for name in each))
    published = {each["measure"]: each for each in suite["published"]}
    shown = published.keys() & set(names)
    header = ["measure", *targets, *(["paper: differential / Transformer"] if shown else [])]
    rows = []
    for name in names:
        values = (suite["totals"].get(target, {}).get(name) for target in targets)
        row = [name, *map(_estimate, values)]
        rows.append([*row, _published(published.get(name))] if shown else row)
    return header, rows


def _across(suite: Mapping[str, Any]) -> Table:
    return ("all targets", "value"), [(n, f"{v:.4g}") for n, v in suite["across"].items()]


def _estimate(found: Mapping[str, Any] | None, sign: str = "") -> str:
    if found is None:
        return ""
    value = f"{found['value']:{sign}.4g}"
    if found["low"] is None:
        return value
    return f"{value} [{found['low']:{sign}.4g}, {found['high']:{sign}.4g}]"


def _published(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    transformer = "not given" if found["transformer"] is None else f"{found['transformer']:g}"
    return f"{found['differential']:g} / {transformer} ({found['of']})"


def _settings(suite: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in suite["settings"].items())


def _list_of(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{title}:", "", *(f"- {line}" for line in lines)])


def markdown_table(table: Table) -> str:
    """A table as Markdown has it."""
    header, rows = table
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _html_table(table: Table) -> str:
    header, rows = table
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"

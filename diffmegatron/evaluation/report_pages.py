"""The report of an evaluation as Markdown and HTML.

``outcome`` is the content of ``results.json``, and ``suite`` is the entry of one suite (benchmark)
in it. ``pictures`` maps the name of a suite to the bytes of a PNG file.
"""

import base64
import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from diffmegatron.evaluation.conclusions import ARROWS, FEW_ITEMS, conclusions

# Header and rows of a table.
Table = tuple[Sequence[str], Sequence[Sequence[str]]]

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { border: 1px solid #8888; padding: .25rem .6rem; text-align: left; font-weight: normal; }
thead th { font-weight: bold; }
td, thead th + th { text-align: right; font-variant-numeric: tabular-nums; }
img { max-width: 100%; }
p, li, h2 { overflow-wrap: anywhere; }
"""
_NOTE = (
    "Intervals are 95% intervals of a bootstrap over the items. Differences are to the first "
    "target, on the items that both targets have and with the same resamples. ↑ marks measures "
    "whose higher values are better, and ↓ measures whose lower values are better. If all items "
    "have the same score, the interval has no width, although the true value can differ. The "
    "paper's numbers are of other models, texts and lengths."
)
_NOTE_ON_FEW = (
    f"A measure with * has fewer than {FEW_ITEMS} items of a target, so its interval is too "
    "narrow; measure more items."
)
_NOTE_ON_CONCLUSIONS = (
    "Better and worse: the 95% interval of the paired difference lies on one side of 0, and is of "
    f"at least {FEW_ITEMS} items. Each target is one trained model, and the interval covers only "
    "the choice of items. So the conclusion is about these models. A statement about kinds of "
    "attention needs several seeds."
)
_MOST_DECIMALS = 6
# Number of rows of an HTML table that are not folded.
_MOST_ROWS = 6
# Name of the picture of the conclusions in `pictures`, and of its file without suffix.
CONCLUSION = "conclusion"


def to_markdown(outcome: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """Return the report as Markdown with links to the pictures ``SUITE.png``."""
    parts = ["# Evaluation", *_introduction(outcome), markdown_table(_targets(outcome))]
    if (compared := _conclusions(outcome))[1]:
        conclusion = ["## Conclusion", markdown_table(compared), _NOTE_ON_CONCLUSIONS]
        if CONCLUSION in pictures:
            conclusion.append(f"![paired differences by suite]({CONCLUSION}.png)")
        parts[1:1] = conclusion
    for name, suite in outcome["suites"].items():
        parts += [f"## {suite['title']} (`{name}`)", suite["description"]]
        parts += [markdown_table(table) for table in _tables(suite, list(outcome["targets"]))]
        if name in pictures:
            parts.append(f"![{_finding(suite)}]({name}.png)")
        parts += _items(suite)
        parts.append(f"Settings: `{_settings(suite)}`")
        if suite["not_run"]:
            parts.append("\n".join(["Not run:", "", *(f"- {line}" for line in suite["not_run"])]))
    return "\n\n".join(parts) + "\n"


def to_html(outcome: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """Return the report as one HTML file that contains the pictures."""
    parts = ["<h1>Evaluation</h1>"]
    if (compared := _conclusions(outcome))[1]:
        parts += ["<h2>Conclusion</h2>", _html_table(compared)]
        parts.append(f"<p>{html.escape(_NOTE_ON_CONCLUSIONS)}</p>")
        if CONCLUSION in pictures:
            parts.append(_html_picture("paired differences by suite", pictures[CONCLUSION]))
    parts += [f"<p>{html.escape(line)}</p>" for line in _introduction(outcome)]
    parts.append(_html_table(_targets(outcome)))
    for name, suite in outcome["suites"].items():
        parts.append(f"<h2>{html.escape(suite['title'])} (<code>{name}</code>)</h2>")
        parts.append(f"<p>{html.escape(suite['description'])}</p>")
        for table in _tables(suite, list(outcome["targets"])):
            parts += _folded_html_tables(table)
        if name in pictures:
            parts.append(_html_picture(_finding(suite), pictures[name]))
        parts += [f"<p>{line}</p>" for line in _items(suite)]
        parts.append(f"<p>Settings: <code>{html.escape(_settings(suite))}</code></p>")
        if suite["not_run"]:
            lines = "".join(f"<li>{html.escape(line)}</li>" for line in suite["not_run"])
            parts.append(f"<p>Not run:</p><ul>{lines}</ul>")
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Evaluation</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _items(suite: Mapping[str, Any]) -> list[str]:
    """Return a line with the smallest and largest number of items over all measures and targets.

    Items that the bootstrap draws together (``Suite.unit``) count as one. Return [] without values.
    """
    counts = {
        found["items"]
        for measure in suite["measures"].values()
        for found in measure["targets"].values()
        if found is not None
    }
    if not counts:
        return []
    more = f" to {max(counts):,}, by row and target" if len(counts) > 1 else ""
    return [f"Independent items: {min(counts):,}{more}."]


def _introduction(outcome: Mapping[str, Any]) -> list[str]:
    made = outcome["made"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    lines = [f"Last measured {made['time']} on {made['device']} with {versions}.", _NOTE]
    if any(
        _is_of_few(found) for s in outcome["suites"].values() for found in s["measures"].values()
    ):
        lines.append(_NOTE_ON_FEW)
    return lines


def _targets(outcome: Mapping[str, Any]) -> Table:
    rows = []
    for name, each in outcome["targets"].items():
        *cells, weights = (_cell(each.get(key)) for key in _TARGET_COLUMNS)
        # The first 12 digits of a hash suffice to distinguish models.
        rows.append((name, *cells, weights[:12]))
    return ("target", *_TARGET_COLUMNS.values()), rows


_TARGET_COLUMNS = {
    "path": "path",
    "model_type": "model_type",
    "parameters": "parameters",
    "tokens": "trained tokens",
    "seed": "seed",
    "context": "context",
    "dtype": "dtype",
    "weights": "hash of weights",
}


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)


def _conclusions(outcome: Mapping[str, Any]) -> Table:
    first = next(iter(outcome["targets"]))
    rows = []
    for each in conclusions(outcome):
        shown = _estimate(each.difference, _decimals([each.difference]), "+")
        name = f"{each.measure} {ARROWS[each.direction]}"
        finding: str = each.finding
        items = each.difference["items"]
        if each.difference["low"] is not None and items < FEW_ITEMS:
            finding = f"{finding} ({items} items, fewer than {FEW_ITEMS})"
        rows.append((each.suite, each.target, finding, shown, name))
    return ("suite", "target", "conclusion", f"difference to {first}", "measure"), rows


def conclusion_lines(outcome: Mapping[str, Any]) -> list[str]:
    """Return a line for each row of the report's conclusion."""
    first = next(iter(outcome["targets"]))
    return [
        f"{suite}: {target} is {finding} beside {first}: {shown} {measure}"
        for suite, target, finding, shown, measure in _conclusions(outcome)[1]
    ]


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
        values = [found["targets"][name] for name in targets]
        differences = [found["differences"][name] for name in others]
        decimals = _decimals([*values, *differences])
        row = [_name(suite, measure) + "*" * _is_of_few(found)]
        row += [_estimate(each, decimals) for each in values]
        row += [_estimate(each, decimals, "+") for each in differences]
        if published:
            row.append(_published(published.get(measure)))
        rows.append(row)
    return header, rows


def _name(suite: Mapping[str, Any], measure: str) -> str:
    better = suite["better"].get(measure)
    return f"{measure} {ARROWS[better]}" if better else measure


def _is_of_few(measure: Mapping[str, Any]) -> bool:
    return any(
        each is not None and each["items"] < FEW_ITEMS for each in measure["targets"].values()
    )


def _totals(suite: Mapping[str, Any], targets: Sequence[str]) -> Table:
    names = list(dict.fromkeys(name for each in suite["totals"].values() for name in each))
    published = {each["measure"]: each for each in suite["published"]}
    shown = published.keys() & set(names)
    header = ["measure", *targets, *(["paper: differential / Transformer"] if shown else [])]
    rows = []
    for name in names:
        values = [suite["totals"].get(target, {}).get(name) for target in targets]
        decimals = _decimals(values)
        row = [_name(suite, name), *(_estimate(each, decimals) for each in values)]
        rows.append([*row, _published(published.get(name))] if shown else row)
    return header, rows


def _across(suite: Mapping[str, Any]) -> Table:
    rows = []
    for name, value in suite["across"].items():
        found = {"value": value, "low": None, "high": None}
        rows.append((name, _estimate(found, _decimals([found]))))
    return ("all targets", "value"), rows


def _decimals(row: Sequence[Mapping[str, Any] | None]) -> int:
    """Return the number of decimals, 0 to 6, for all numbers of a table row.

    It suffices for two significant digits of the narrowest interval's width. Without intervals, it
    suffices for four significant digits of the largest number.
    """
    known = [each for each in row if each is not None]
    widths = [each["high"] - each["low"] for each in known if each["low"] is not None]
    widths = [width for width in widths if width > 0]
    largest = max((abs(each["value"]) for each in known), default=0)
    if widths:
        wanted = 1 - math.floor(math.log10(min(widths)))
    elif largest:
        wanted = 3 - math.floor(math.log10(largest))
    else:
        wanted = 0
    return min(max(wanted, 0), _MOST_DECIMALS)


def _estimate(found: Mapping[str, Any] | None, decimals: int, sign: str = "") -> str:
    if found is None:
        return ""
    numbers = [found[key] for key in ("value", "low", "high") if found[key] is not None]
    value, *ends = (f"{number:{sign},.{decimals}f}" for number in numbers)
    return f"{value} [{', '.join(ends)}]" if ends else value


def _finding(suite: Mapping[str, Any]) -> str:
    """Return a picture's alternative text: the first measure of the suite for each target."""
    if suite["measures"]:
        measure, found = next(iter(suite["measures"].items()))
        values = found["targets"]
    else:
        measure = next((name for each in suite["totals"].values() for name in each), "")
        values = {name: each.get(measure) for name, each in suite["totals"].items()}
    decimals = _decimals(list(values.values()))
    numbers = [f"{name} {_estimate(each, decimals)}" for name, each in values.items() if each]
    return f"{suite['title']}. {measure}: {', '.join(numbers)}." if numbers else str(suite["title"])


def _published(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    transformer = "not given" if found["transformer"] is None else f"{found['transformer']:g}"
    return f"{found['differential']:g} / {transformer} ({found['of']})"


def _settings(suite: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in suite["settings"].items())


def _html_picture(alt: str, content: bytes) -> str:
    data = base64.b64encode(content).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'


def _folded_html_tables(table: Table) -> list[str]:
    """Return a table; of a long one, only rows with an arrow (or the first rows) are unfolded."""
    header, rows = table
    if len(rows) <= _MOST_ROWS:
        return [_html_table(table)]
    directed = [row for row in rows if row[0].rstrip("*").endswith(tuple(ARROWS.values()))]
    shown = directed[:_MOST_ROWS] or rows[:_MOST_ROWS]
    others = [row for row in rows if row not in shown]
    summary = f"<summary>{len(others)} more rows</summary>"
    return [
        _html_table((header, shown)),
        f"<details>{summary}{_html_table((header, others))}</details>",
    ]


def markdown_table(table: Table) -> str:
    """Return a table as Markdown."""
    header, rows = table
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _html_table(table: Table) -> str:
    header, rows = table
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{html.escape(row[0])}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

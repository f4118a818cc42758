"""Sums of the records of a run of pytest, and their tables."""

import ast
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

Summary = dict[str, Any]
# Rows of a table of files or fixtures.
ROWS = 25


def summarize(records: Path) -> Summary:
    """Add up the records of a run.

    Returns:
        A dict. ``tests`` is their number, ``cpu_seconds`` the sum of their user and system seconds
        and of the collection. ``files`` and ``fixtures`` have the CPU seconds of each. ``wall`` has
        the wall-clock seconds of each file, from which the schedule of the next run is made.
        ``causes`` counts what the processes have done; ``import_seconds`` are CPU seconds.
    """
    seconds: dict[str, Counter[str]] = defaultdict(Counter)
    causes: Counter[str] = Counter()
    recipes: Counter[tuple[str, str]] = Counter()
    for line in records.read_text().splitlines():
        record = ast.literal_eval(line)
        kind, name = record["kind"], record.get("id", "")
        if kind in ("test", "forked"):
            file = name.partition("::")[0] or "between tests"
            seconds["files"][file] += record["cpu"]
            seconds["wall"][file] += record.get("wall", 0)
            causes["tests"] += kind == "test"
        elif kind in ("fixture", "collection"):
            seconds[kind][name] += record["cpu"]
        elif kind == "exit":
            causes["interpreters that imported torch"] += "torch" in record["libraries"]
            causes["import_seconds"] += record["imports"]
        elif kind == "sleep":
            causes["slept_seconds"] += record["seconds"]
        elif kind == "training":
            recipes[record["path"], record["recipe"]] += 1
        else:
            causes[{"fork": "forks", "compile": "compilations"}.get(kind, f"{kind}s")] += 1
    causes["training runs"] = len(recipes)
    causes["different recipes"] = len({recipe for _, recipe in recipes})
    total = seconds["files"].total() + seconds["collection"].total()
    return {
        "tests": causes.pop("tests"),
        "cpu_seconds": round(total),
        "causes": {name: round(value) for name, value in sorted(causes.items())},
        **{name: _rounded(seconds[name]) for name in ("files", "wall")},
        "fixtures": _rounded(Counter(dict(seconds["fixture"].most_common(ROWS)))),
    }


def _rounded(seconds: Counter[str]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in seconds.most_common()}


def tables(before: Summary, after: Summary) -> str:
    """Return Markdown tables that compare two runs by folder, cause and file."""
    return "\n\n".join(
        (
            _table("CPU seconds", _by_folder(before), _by_folder(after)),
            _table("cause", before["causes"], after["causes"]),
            _table("CPU seconds of a file", before["files"], after["files"], ROWS),
        )
    )


def _by_folder(summary: Summary) -> dict[str, float]:
    folders: Counter[str] = Counter()
    for file, seconds in summary["files"].items():
        folders["/".join(file.split("/")[:2])] += seconds
    return {"all, with the collection": summary["cpu_seconds"], **dict(folders.most_common())}


def _table(
    title: str, before: dict[str, float], after: dict[str, float], rows: int | None = None
) -> str:
    names = [*before, *(name for name in after if name not in before)][:rows]
    lines = [f"| {title} | before | after |", "|---|---|---|"]
    for name in names:
        values = (f"{side[name]:,.0f}" if name in side else "" for side in (before, after))
        lines.append(f"| {name} | {' | '.join(values)} |")
    return "\n".join(lines)

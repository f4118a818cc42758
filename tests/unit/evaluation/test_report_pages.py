"""Tests of the report's pages: digits, arrows, notes, and text alternatives of pictures."""

import re

import pytest

from diffmegatron.evaluation.report_pages import to_html, to_markdown
from diffmegatron.evaluation.suite import Suite
from diffmegatron.evaluation.suites import SUITES


def estimate(value: float, width: float | None = None, items: int = 64) -> dict:
    ends = {"low": None, "high": None}
    if width is not None:
        ends = {"low": value - width / 2, "high": value + width / 2}
    return {"value": value, **ends, "items": items}


def outcome(measures: dict, totals: dict | None = None, better: dict | None = None) -> dict:
    """Return results of one suite on the targets ``a`` and ``b``; ``b`` has no measures."""
    suite = {
        "title": "Loss",
        "description": "How badly text is predicted.",
        "measures": {
            name: {"targets": {"a": found, "b": None}, "differences": {"b": None}}
            for name, found in measures.items()
        },
        "better": better or {},
        "published": [],
        "totals": totals or {},
        "across": {},
        "settings": {},
        "not_run": [],
    }
    made = {"time": "2026-01-02 03:04 UTC", "device": "a CPU", "versions": {"torch": "2.13.0"}}
    target = {"path": "x/a", "dtype": "float32", "weights": "0123456789abcdef"}
    return {"made": made, "targets": {"a": target, "b": {}}, "suites": {"loss": suite}}


@pytest.mark.parametrize("write", [to_markdown, to_html])
def test_measures_of_few_items_are_marked_and_explained_once(write):
    few = write(outcome({"first": estimate(1, 0.2, 9), "second": estimate(1, 0.2, 2)}), {})
    assert "first*" in few
    assert "second*" in few
    assert few.count("fewer than 10 items") == 1
    enough = write(outcome({"first": estimate(1, 0.2, 10)}), {})
    assert "first*" not in enough
    assert "fewer than 10 items" not in enough


def cells(report: str, measure: str) -> list[str]:
    (line,) = (line for line in report.splitlines() if line.startswith(f"| {measure} "))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_a_row_has_the_digits_that_its_narrowest_interval_supports():
    found = outcome({"m": estimate(2.345678, 0.0213)})
    found["suites"]["loss"]["measures"]["m"]["targets"]["b"] = estimate(12.3, 4.0)
    found["suites"]["loss"]["measures"]["m"]["differences"]["b"] = estimate(9.95, 4.0)
    report = to_markdown(found, {})
    assert cells(report, "m") == [
        "2.346 [2.335, 2.356]",
        "12.300 [10.300, 14.300]",
        "+9.950 [+7.950, +11.950]",
    ]


def test_large_numbers_are_written_out_alike():
    totals = {"a": {"top-1": estimate(24930.4)}, "b": {"top-1": estimate(1688.2)}}
    assert cells(to_markdown(outcome({}, totals), {}), "top-1") == ["24,930", "1,688"]
    totals = {"a": {"top-1": estimate(0.01236)}, "b": {"top-1": None}}
    assert cells(to_markdown(outcome({}, totals), {}), "top-1") == ["0.01236", ""]


def test_arrows_point_to_better_values():
    measures = {"loss": estimate(1.0, 0.1), "accuracy": estimate(0.5, 0.1), "share": estimate(1)}
    report = to_markdown(outcome(measures, better={"loss": "lower", "accuracy": "higher"}), {})
    assert "| loss ↓ |" in report
    assert "| accuracy ↑ |" in report
    assert "| share |" in report


def test_origin_and_weights_are_there():
    for report in (to_markdown(outcome({}), {}), to_html(outcome({}), {})):
        assert "Last measured 2026-01-02 03:04 UTC on a CPU with torch 2.13.0." in report
        assert "0123456789ab" in report
        assert "float32" in report
        assert "How badly text is predicted." in report


def test_pictures_have_a_text_with_the_finding_and_tables_have_scopes():
    page = to_html(outcome({"nats": estimate(2.345, 0.02)}), {"loss": b"png"})
    assert '<img alt="Loss. nats: a 2.345 [2.335, 2.355]."' in page
    assert page.count('<th scope="col">measure</th>') == 1
    assert '<th scope="row">nats</th>' in page
    assert not re.search(r"<th>", page)


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_every_suite_has_a_description(suite: type[Suite]):
    assert len(suite.description.split()) > 10
    assert suite.description.endswith(".")

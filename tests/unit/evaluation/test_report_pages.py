"""Tests of the report's pages: digits, arrows, notes, and text alternatives of pictures."""

import re

import pytest
from matplotlib.figure import Figure

from diffmegatron.evaluation.conclusions import conclusions, draw_conclusions
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


def test_the_html_page_has_the_width_of_a_narrow_screen():
    page = to_html(outcome({"m": estimate(1, 0.2)}), {})
    assert '<meta name="viewport" content="width=device-width">' in page


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


def compared(low: float, high: float, *, items: int = 64) -> dict:
    """Return a measure of the targets ``a`` and ``b`` whose difference has these ends."""
    difference = {"value": (low + high) / 2, "low": low, "high": high, "items": items}
    targets = {"a": estimate(2.0, 0.2, items), "b": estimate(2.0 + (low + high) / 2, 0.2, items)}
    return {"targets": targets, "differences": {"b": difference}}


@pytest.mark.parametrize(
    ("better", "ends", "items", "finding"),
    [
        ("lower", (-0.3, -0.1), 64, "better"),
        ("higher", (-0.3, -0.1), 64, "worse"),
        ("lower", (0.1, 0.3), 64, "worse"),
        ("higher", (0.1, 0.3), 64, "better"),
        ("lower", (-0.1, 0.3), 64, "undecided"),
        ("lower", (-0.3, 0.0), 64, "undecided"),
        ("lower", (-0.3, -0.1), 9, "undecided (9 items, fewer than 10)"),
    ],
)
def test_the_conclusion_is_that_of_the_paired_interval(better, ends, items, finding):
    found = outcome({}, better={"loss": better})
    measures = found["suites"]["loss"]["measures"]
    measures["a share without direction"] = compared(0.1, 0.2)
    measures["loss"] = compared(*ends, items=items)
    report = to_markdown(found, {})
    conclusion = report[: report.index("Last measured")]
    arrow = {"lower": "↓", "higher": "↑"}[better]
    assert f"| Loss | b | {finding} |" in conclusion
    assert f"| loss {arrow} |" in conclusion
    assert "several seeds" in conclusion
    page = to_html(found, {})
    assert page.index(f"<td>{finding}</td>") < page.index("Last measured")


@pytest.mark.parametrize(("better", "arrow", "place"), [("lower", "↓", 10), ("higher", "↑", -10)])
def test_the_picture_has_better_values_to_the_right_and_differences_as_the_table(
    better, arrow, place
):
    found = outcome({"loss": {}}, better={"loss": better})
    found["suites"]["loss"]["measures"]["loss"] = compared(-0.3, -0.1)
    figure = Figure()
    assert draw_conclusions(figure, conclusions(found), "a")
    (axes,) = figure.axes
    (label,) = axes.get_yticklabels()
    assert label.get_text() == f"Loss: b\nloss {arrow} -0.2"
    assert axes.lines[1].get_xdata()[0] == pytest.approx(place)  # -0.2 is 10% of 2.0


def test_without_a_comparison_there_is_no_conclusion():
    for write in (to_markdown, to_html):
        assert "Conclusion" not in write(
            outcome({"m": estimate(1, 0.1)}, better={"m": "lower"}), {}
        )


def test_a_long_table_shows_the_rows_with_a_direction_and_folds_the_others():
    measures = {f"m{number}": estimate(number, 0.1) for number in range(9)}
    page = to_html(outcome(measures, better={"m4": "lower", "m7": "higher"}), {})
    shown, folded = page.split("<summary>7 more rows</summary>")
    assert re.findall(r'scope="row">(m\d)', shown) == ["m4", "m7"]
    assert re.findall(r'scope="row">(m\d)', folded) == ["m0", "m1", "m2", "m3", "m5", "m6", "m8"]


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

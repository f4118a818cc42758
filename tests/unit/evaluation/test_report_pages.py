"""The report's words on what its numbers can say."""

from diffmegatron.evaluation.report_pages import to_html, to_markdown


def outcome(**items: int) -> dict:
    """Of two measures on so many items each."""
    measures = {
        name: {
            "targets": {"a": {"value": 1.0, "low": 0.9, "high": 1.1, "items": count}, "b": None},
            "differences": {"b": None},
        }
        for name, count in items.items()
    }
    suite = {
        "title": "Loss",
        "measures": measures,
        "published": [],
        "totals": {},
        "across": {},
        "settings": {},
        "not_run": [],
    }
    return {"targets": {"a": {}, "b": {}}, "suites": {"loss": suite}}


def test_intervals_of_few_items_are_said_to_be_too_narrow() -> None:
    for write in (to_markdown, to_html):
        assert "fewer than" not in write(outcome(first=10, second=64), {})
        some = write(outcome(first=9, second=64), {})
        assert "first: of fewer than 10 items (9 at the fewest)" in some
        assert "All measures: of fewer than 10 items (2 at" in write(outcome(first=9, second=2), {})

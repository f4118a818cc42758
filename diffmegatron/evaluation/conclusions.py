"""The conclusion of an evaluation: by which suites a target is better than the first target.

``outcome`` is the content of ``results.json``. A suite is compared by its first measure for which
lower or higher values are better.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from diffmegatron.evaluation.suite import Direction

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    # Importing matplotlib takes half a second, so only the function that draws receives a figure.
    Figure = Any

# For n normally distributed items, the ends of a 95% bootstrap interval are
# 1.96 * sqrt((n - 1) / n) standard errors from the mean. If n < 10, the interval contains the true
# mean with a probability below 90% (Student's t distribution).
FEW_ITEMS = 10
Finding = Literal["better", "worse", "undecided"]
ARROWS: dict[Direction, str] = {"higher": "↑", "lower": "↓"}
_COLORS: dict[Finding, str] = {
    "better": "tab:green",
    "worse": "tab:red",
    "undecided": "tab:gray",
}


class Conclusion(NamedTuple):
    """The comparison of one target with the first target by one suite.

    Attributes:
        suite: title of the suite.
        measure: name of the measure by which the suite compares.
        direction: whether higher or lower values of the measure are better.
        target: name of the target.
        difference: ``value``, ``low`` and ``high`` of the paired difference to the first target.
        first: value of the first target, or None.
        finding: ``undecided`` if the interval contains 0, or if it is of fewer than 10 items.
    """

    suite: str
    measure: str
    direction: Direction
    target: str
    difference: Mapping[str, Any]
    first: float | None
    finding: Finding


def conclusions(outcome: Mapping[str, Any]) -> list[Conclusion]:
    """Return a conclusion for each suite and each comparable target after the first."""
    first, *others = outcome["targets"]
    found = []
    for suite in outcome["suites"].values():
        for measure, values in suite["measures"].items():
            differences = values["differences"]
            direction = suite["better"].get(measure)
            if direction is not None and any(differences[name] for name in others):
                found += [
                    _conclusion(suite, measure, direction, name, values, first)
                    for name in others
                    if differences[name]
                ]
                break
    return found


def _conclusion(
    suite: Mapping[str, Any],
    measure: str,
    direction: Direction,
    target: str,
    values: Mapping[str, Any],
    first: str,
) -> Conclusion:
    difference = values["differences"][target]
    own = values["targets"][first]
    value = None if own is None else own["value"]
    finding = _finding(difference, direction)
    return Conclusion(suite["title"], measure, direction, target, difference, value, finding)


def _finding(difference: Mapping[str, Any], direction: Direction) -> Finding:
    low, high = difference["low"], difference["high"]
    if low is None or difference["items"] < FEW_ITEMS or low <= 0 <= high:
        return "undecided"
    return "better" if (low > 0) == (direction == "higher") else "worse"


def draw_conclusions(figure: Figure, found: list[Conclusion], first: str) -> bool:
    """Draw each paired difference in percent of the first target's value; better is to the right.

    The label of a row has the difference with its own sign, as the table of the report has it.
    Return False, and draw nothing, if no difference has an interval and a first value other than 0.
    """
    shown = [each for each in found if each.first and each.difference["low"] is not None]
    if not shown:
        return False
    axes = figure.subplots()
    for row, each in enumerate(reversed(shown)):
        assert each.first is not None
        sign = 1 if each.direction == "higher" else -1
        scale = 100 * sign / abs(each.first)
        value, *ends = (each.difference[key] * scale for key in ("value", "low", "high"))
        color = _COLORS[each.finding]
        axes.plot(ends, [row, row], color=color, linewidth=2)
        axes.plot(value, row, "o", color=color)
    axes.axvline(0, color="black", linewidth=1)
    names = [
        f"{each.suite}: {each.target}\n{each.measure} {ARROWS[each.direction]} "
        f"{each.difference['value']:+.3g}"
        for each in reversed(shown)
    ]
    axes.set_yticks(range(len(shown)), names)
    axes.set_ylim(-0.7, len(shown) - 0.3)
    axes.set_xlabel(f"worse ←   % of {first}'s value   → better")
    axes.grid(axis="x", alpha=0.3)
    return True

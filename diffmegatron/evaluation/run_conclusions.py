"""The conclusion of ``compare``: which kind of attention has the lower held-out loss."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from diffmegatron.evaluation.conclusions import Finding

# The 0.975 quantile of Student's t distribution with 1 to 10 degrees of freedom. For more, the last
# makes the interval slightly too wide.
_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_LOSSES = ("test/loss", "valid/loss")


class RunResult(NamedTuple):
    """Properties of a run that its comparison with others needs.

    Attributes:
        attention: title of the kind of attention.
        parameters: number of parameters.
        tokens: number of tokens seen.
        seed: seed of the initial weights and of the order of the data.
        figures: last values of the metrics, by name.
        data: values of the keys of the recipe that determine the data, for each stage.
    """

    attention: str
    parameters: int
    tokens: int
    seed: int
    figures: Mapping[str, float]
    data: Mapping[str, Sequence[object]]


class Difference(NamedTuple):
    """Mean difference of paired losses and its 95% interval; None without an interval."""

    value: float
    interval: tuple[float, float] | None

    @property
    def finding(self) -> Finding:
        """Whether the first of the pairs has the lower loss."""
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return "undecided"
        return "better" if self.interval[1] < 0 else "worse"


def paired_difference(pairs: Sequence[tuple[float, float]]) -> Difference:
    """Return the mean of first minus second, with an interval over the pairs if there are two."""
    values = [first - second for first, second in pairs]
    mean = statistics.mean(values)
    if len(values) < 2:
        return Difference(mean, None)
    quantile = _QUANTILES[min(len(values) - 1, len(_QUANTILES)) - 1]
    margin = quantile * statistics.stdev(values) / len(values) ** 0.5
    return Difference(mean, (mean - margin, mean + margin))


def conclude(runs: Sequence[RunResult]) -> list[str]:
    """Return a sentence for each network after the first, or why there is nothing to conclude.

    Runs of the same kind of attention and number of parameters are one network. Two networks are
    compared by the held-out loss of runs with equal seeds.
    """
    loss = next((name for name in _LOSSES if all(name in run.figures for run in runs)), None)
    if loss is None:
        return ["Nothing is concluded, because no held-out loss is recorded in all runs."]
    if len({run.tokens for run in runs}) > 1:
        seen = sorted(run.tokens for run in runs)
        return [
            f"Nothing is concluded, because the runs have seen {seen[0]:,} to {seen[-1]:,} tokens; "
            "compare their losses at equal tokens in the picture."
        ]
    differing = [
        name for name, values in runs[0].data.items() if any(r.data[name] != values for r in runs)
    ]
    if differing:
        return [
            f"Nothing is concluded, because the runs have different data ({', '.join(differing)})."
        ]
    networks: dict[tuple[str, int], list[RunResult]] = defaultdict(list)
    for run in runs:
        networks[run.attention, run.parameters].append(run)
    first, *others = networks.values()
    if not others:
        return [f"All runs have the network {_described(first)}, so no kinds are compared."]
    return [_compared(other, first, loss) for other in others]


def _compared(other: list[RunResult], first: list[RunResult], loss: str) -> str:
    ours, theirs = ({run.seed: run.figures[loss] for run in each} for each in (other, first))
    names = f"{_described(other)} is {{}} beside {_described(first)}"
    if len(ours) < len(other) or len(theirs) < len(first):
        return f"{names.format('undecided')}: several runs of a network have the same seed."
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return f"{names.format('undecided')}: no seed is common to both."
    found = paired_difference([(ours[seed], theirs[seed]) for seed in common])
    text = f"{names.format(found.finding)}: {loss} {found.value:+.4f}"
    if found.interval is None:
        return f"{text} nats per token (↓), and one seed each does not compare the kinds."
    low, high = found.interval
    text += f" [{low:+.4f}, {high:+.4f}] nats per token (↓) over {len(common)} seeds"
    return (
        f"{text}; more seeds narrow the interval." if found.finding == "undecided" else f"{text}."
    )


def _described(runs: Iterable[RunResult]) -> str:
    first, *others = runs
    seeds = ", ".join(str(run.seed) for run in (first, *others))
    of_seeds = f"seed{'s' if others else ''} {seeds}"
    return (
        f"{first.attention} ({first.parameters:,} parameters, {first.tokens:,} tokens, {of_seeds})"
    )

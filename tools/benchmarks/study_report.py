"""The report of a study: NAME.md, NAME.png and NAME_along.png.

A study trains several arms (choices of recipe keys), possibly at several sizes of the model, with
several seeds each. An arm at one size is a cell. The report is written from the result lines, of
which each finished run has one.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from scipy import stats

from diffmegatron.attention.kinds import KINDS
from diffmegatron.evaluation.bootstrap import Estimate
from diffmegatron.evaluation.report_pages import Table, markdown_table
from diffmegatron.evaluation.suites.scaling import Point, PowerLaw, fit_power_law
from diffmegatron.files import write_durably
from diffmegatron.training.monitoring.evaluators import HELD_OUT
from tools.benchmarks.study_file import Against, Cell, Derived, DuringTraining, Study
from tools.benchmarks.study_runs import Line

_NOTE = (
    "Brackets are 95% intervals over seeds, by Student's t: mean ± t s / √n. Arms are compared "
    "seed by seed, as runs of one seed read the same batches; a ratio is the geometric mean of "
    "the seeds' ratios. Runs that choose a value are of another seed and are in no mean."
)
_SCALING_NOTES = {
    "parameters": (
        "For each seed and arm, a power law a N^-b is fitted to the last held-out losses of all "
        "sizes, where N is the number of parameters without embeddings. The share is N of the row "
        "over the N at which the baseline's law has the loss of the arm's law."
    ),
    "tokens": (
        "For each seed and arm, a power law a T^-b is fitted to the held-out losses during "
        "training, where T is the number of trained tokens. The share is T at the end over the T "
        "at which the baseline's law has the loss of the arm's law. The learning rate decays "
        "during training, so shorter complete runs could have lower losses."
    ),
}
_SIGNS = {"difference": "+", "ratio": ""}
# Result of a comparison between equal arms.
_EQUAL = {"difference": 0, "ratio": 1}
Dashes = str | tuple[int, tuple[int, ...]]
# Equal in number to the markers. The last two are an offset and the lengths of strokes and gaps.
_DASHES: Sequence[Dashes] = ("-", "--", ":", "-.", (0, (3, 1, 1, 1, 1, 1)), (0, (8, 2, 2, 2)))
_MARKERS = "osD^vP"
_COLUMNS = 3
# Key of a result line with the x of a power law.
_COUNT_OF = {"parameters": "parameters without embeddings", "tokens": "tokens"}

Lines = Sequence[Line]
BySeed = Mapping[int, float]
# Values of a measure by trained tokens, and then by seed.
Points = dict[float, dict[int, float]]
# Color, dashes and marker of each arm in plots, by the arm's name.
Styles = Mapping[str, tuple[tuple[float, ...], Dashes, str]]


def write_report(study: Study, by_run: Mapping[str, Line], path: Path) -> None:
    """Write ``PATH.md``, ``PATH.png`` and ``PATH_along.png`` from the lines of finished runs.

    ``PATH.png`` is written only if a reported run has finished. ``PATH_along.png`` shows the
    measures during training, and is written only if there are any.

    Args:
        study: the study.
        by_run: result lines by the name of the run; unfinished runs may be missing.
        path: path without suffix.
    """
    reported: dict[Cell, Lines] = {
        cell: [
            with_derived(line, study.derived)
            for line in of_cell(by_run, cell)
            if line["is_reported"]
        ]
        for cell in study.cells
    }
    parts = [f"# {study.title}", _NOTE, markdown_table(runs_table(reported))]
    for measure in study.compared:
        is_measured = any(values_by_seed(lines, measure) for lines in reported.values())
        table = markdown_table(measure_table(study, reported, measure))
        parts += [f"## {measure}", table if is_measured else "No finished run has this measure."]
    by_tokens = markdown_table(by_tokens_table(study, held_out_points(reported), "difference"))
    parts += ["## Held-out loss by tokens", by_tokens]
    for against in study.scaling:
        parts += [
            f"## Share of {study.baseline}'s {against} at equal loss",
            _SCALING_NOTES[against],
            markdown_table(share_table(study, reported, against)),
        ]
    if study.along is not None:
        parts += along_parts(study, study.along, reported, path)
    if study.choice is not None:
        parts += [f"## Choice of {study.choice.key}", markdown_table(choice_table(study, by_run))]
    environments = {tuple(line["environment"].items()) for line in by_run.values()}
    parts += [", ".join(f"{name} {value}" for name, value in each) for each in environments]
    if any(reported.values()):
        draw(study, reported, path.with_name(f"{path.name}.png"))
        parts.insert(2, f"![losses by tokens, and arms beside {study.baseline}]({path.name}.png)")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path.with_name(f"{path.name}.md"), ("\n\n".join(parts) + "\n").encode())


def of_cell(by_run: Mapping[str, Line], cell: Cell) -> list[Line]:
    """Return the result lines of a cell (an arm at a size), sorted by seed."""
    lines = [
        each for each in by_run.values() if (each["size"], each["arm"]) == (cell.size, cell.arm)
    ]
    return sorted(lines, key=lambda line: line["seed"])


def with_derived(line: Line, derived: Mapping[str, Derived]) -> Line:
    """Return a result line with the derived measures; those that lack a measure are left out.

    Args:
        line: result line of a run.
        derived: derived measures by name.
    """
    measures = dict(line["measures"])
    for name, each in derived.items():
        if not {*each.mean, *each.over} - line["measures"].keys():
            measures[name] = statistics.fmean(measures[part] for part in each.mean)
            if each.over:
                measures[name] /= statistics.fmean(measures[part] for part in each.over)
    return {**line, "measures": measures}


def seeds_interval(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per seed, with its 95% interval by Student's t.

    ``diffmegatron evaluate`` uses bootstrap intervals over items. With only a few seeds, such an
    interval would be far too narrow, so it is not used here. For a single value, the ends of the
    interval are None.
    """
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Estimate(mean, None, None, count)
    half = stats.t.ppf(0.975, count - 1) * statistics.stdev(values) / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half, count)


def compare(values: BySeed, baseline: BySeed, how: str) -> Estimate | None:
    """Compare an arm with the baseline on their common seeds; return None without such a seed.

    Args:
        values: a measure of the arm by seed.
        baseline: the same measure of the baseline by seed.
        how: "difference" for the mean of the differences; "ratio" for the geometric mean of the
            ratios, whose interval is computed from the logarithms.
    """
    pairs = [(values[seed], baseline[seed]) for seed in values if seed in baseline]
    if not pairs:
        return None
    if how == "difference":
        return seeds_interval([value - other for value, other in pairs])
    value, low, high, count = seeds_interval([math.log(v / other) for v, other in pairs])
    low, high = (None if end is None else math.exp(end) for end in (low, high))
    return Estimate(math.exp(value), low, high, count)


def values_by_seed(lines: Lines, measure: str) -> dict[int, float]:
    """Return the values of a measure by seed, from the runs that have the measure."""
    return {
        line["seed"]: line["measures"][measure] for line in lines if measure in line["measures"]
    }


def runs_table(reported: Mapping[Cell, Lines]) -> Table:
    """Return a table with a row for each cell.

    Its columns are the kind of attention, the finished seeds, the numbers of parameters and of
    trained tokens, and the chosen value.
    """
    rows = []
    for cell, lines in reported.items():
        first = lines[0] if lines else {}
        rows.append(
            (
                _label(cell),
                first.get("kind", ""),
                ", ".join(str(line["seed"]) for line in lines),
                *(f"{first[key]:,}" if lines else "" for key in _COUNTS),
                first.get("chosen", ""),
            )
        )
    return ("arm", "kind", "finished seeds", *_COUNTS, "chosen"), rows


_COUNTS = ("parameters", "parameters without embeddings", "tokens")


def measure_table(study: Study, reported: Mapping[Cell, Lines], measure: str) -> Table:
    """Return a table of each cell's mean of a measure, and its comparison with the baseline."""
    how = study.compared[measure]
    rows = []
    for cell, lines in reported.items():
        values = list(values_by_seed(lines, measure).values())
        mean = shown_estimate(seeds_interval(values)) if values else ""
        found = to_baseline(study, reported, cell, measure)
        compared = "" if found is None else shown_estimate(found, _SIGNS[how])
        rows.append((_label(cell), str(len(values)), mean, compared))
    return ("arm", "seeds", "mean", f"{how} to {study.baseline}"), rows


def baseline_of(study: Study, cell: Cell) -> Cell:
    """Return the cell of the baseline arm at the same size."""
    (found,) = (
        each for each in study.cells if (each.size, each.arm) == (cell.size, study.baseline)
    )
    return found


def to_baseline(
    study: Study, reported: Mapping[Cell, Lines], cell: Cell, measure: str
) -> Estimate | None:
    """Compare a cell with the baseline of its size.

    Returns:
        The comparison; None for the baseline itself, or if they have no finished seed in common.
    """
    if cell.arm == study.baseline:
        return None
    baseline = reported[baseline_of(study, cell)]
    values, others = (values_by_seed(lines, measure) for lines in (reported[cell], baseline))
    return compare(values, others, study.compared[measure])


def share_table(study: Study, reported: Mapping[Cell, Lines], against: Against) -> Table:
    """Return a table of each cell's share of the baseline's parameters or tokens at equal loss."""
    rows = []
    for cell in reported:
        if cell.arm != study.baseline:
            shares = shares_by_seed(reported, cell, baseline_of(study, cell), against)
            found = compare(shares, dict.fromkeys(shares, 1.0), "ratio")
            rows.append((_label(cell), str(len(shares)), shown_estimate(found) if found else ""))
    return ("arm", "seeds", f"share of {study.baseline}'s {against}"), rows


def shares_by_seed(
    reported: Mapping[Cell, Lines], cell: Cell, baseline: Cell, against: Against
) -> dict[int, float]:
    """Return the share of the baseline's parameters or tokens at equal loss, by seed.

    A share below 1 means that the cell needs less than the baseline. A seed is left out if one of
    the two laws cannot be fitted.
    """
    laws, base_laws = (laws_by_seed(reported, each, against) for each in (cell, baseline))
    found = {}
    for line in reported[cell]:
        law, base = laws[line["seed"]], base_laws.get(line["seed"])
        if law is not None and base is not None:
            x = line[_COUNT_OF[against]]
            found[line["seed"]] = x / base.size(law.loss(x))
    return found


def laws_by_seed(
    reported: Mapping[Cell, Lines], cell: Cell, against: Against
) -> dict[int, PowerLaw | None]:
    """Return the power law of a cell's held-out losses by seed; None where no law can be fitted.

    With ``against`` "parameters", a law is fitted to the last losses of the cell's arm at all
    sizes. With "tokens", it is fitted to all losses of the cell after the first step.
    """
    points: dict[int, list[Point]] = defaultdict(list)
    for other, lines in reported.items():
        for line in lines:
            if against == "parameters" and other.arm == cell.arm:
                points[line["seed"]].append((line[_COUNT_OF[against]], line["held out"][-1][1]))
            elif against == "tokens" and other == cell:
                points[line["seed"]] += [
                    (tokens, loss) for tokens, loss in line["held out"] if tokens
                ]
    return {seed: fit_power_law(each) for seed, each in points.items()}


def along_parts(
    study: Study, along: DuringTraining, reported: Mapping[Cell, Lines], path: Path
) -> Iterator[str]:
    """Yield the report's sections on measures during training, and write their picture.

    Nothing is yielded or written if no finished run has such measures.
    """
    with_points = {
        cell: [line for line in lines if "along" in line] for cell, lines in reported.items()
    }
    if not any(with_points.values()):
        return
    picture = path.with_name(f"{path.name}_along.png")
    draw_along(study, along, with_points, picture)
    yield "## During training"
    yield f"![measures by tokens]({picture.name})"
    for measure in along.compared:
        points = {cell: points_along(lines, measure) for cell, lines in with_points.items()}
        yield f"### {measure}"
        yield markdown_table(by_tokens_table(study, points, along.compared[measure]))


def by_tokens_table(study: Study, points: Mapping[Cell, Points], how: str) -> Table:
    """Return a table of a measure during training, with a column for each number of tokens.

    First come rows with the mean of each cell, then rows with its comparison with the baseline.

    Args:
        study: the study.
        points: for each cell, a dict from trained tokens to a dict from seed to value.
        how: "difference" or "ratio", as in :func:`compare`.
    """
    tokens = sorted({each for of_arm in points.values() for each in of_arm})
    rows = []
    for cell, of_arm in points.items():
        means = {each: seeds_interval([*values.values()]) for each, values in of_arm.items()}
        rows.append((_label(cell), *(_shown_at(means, each) for each in tokens)))
    for cell, compared in compared_by_tokens(study, points, how).items():
        label = f"{_label(cell)}, {how} to {study.baseline}"
        rows.append((label, *(_shown_at(compared, each, _SIGNS[how]) for each in tokens)))
    return ("arm", *(f"{each:,} tokens" for each in tokens)), rows


def compared_by_tokens(
    study: Study, points: Mapping[Cell, Points], how: str
) -> dict[Cell, dict[float, Estimate]]:
    """Compare every cell with the baseline of its size at each number of tokens that both have."""
    found: dict[Cell, dict[float, Estimate]] = {}
    for cell, of_arm in points.items():
        if cell.arm != study.baseline:
            baseline = points[baseline_of(study, cell)]
            found[cell] = {
                tokens: estimate
                for tokens in sorted(of_arm)
                if (estimate := compare(of_arm[tokens], baseline.get(tokens, {}), how))
            }
    return found


def held_out_points(reported: Mapping[Cell, Lines]) -> dict[Cell, Points]:
    """Return each cell's held-out losses by tokens and seed, without those before the first step.

    A cell without finished runs has no points.
    """
    points: dict[Cell, Points] = {}
    for cell, lines in reported.items():
        points[cell] = defaultdict(dict)
        for line in lines:
            for tokens, loss in line["held out"]:
                if tokens:
                    points[cell][tokens][line["seed"]] = loss
    return points


def points_along(lines: Lines, measure: str) -> Points:
    """Return a measure during training as a dict from trained tokens to a dict from seed to value.

    Args:
        lines: result lines of the runs of one cell.
        measure: name of the measure.
    """
    found: Points = defaultdict(dict)
    for line in lines:
        for tokens, measures in line["along"]["points"]:
            if measure in measures:
                found[tokens][line["seed"]] = measures[measure]
    return found


def _shown_at(estimates: Mapping[float, Estimate], tokens: float, sign: str = "") -> str:
    return shown_estimate(estimates[tokens], sign) if tokens in estimates else ""


def shown_estimate(found: Estimate, sign: str = "") -> str:
    """Return an estimate as text, with its interval if it has one.

    Args:
        found: the estimate.
        sign: "+" to show the sign of positive numbers too.
    """
    value = f"{found.value:{sign}.4g}"
    if found.low is None:
        return value
    return f"{value} [{found.low:{sign}.4g}, {found.high:{sign}.4g}]"


def choice_table(study: Study, by_run: Mapping[str, Line]) -> Table:
    """Return a table of ``valid/loss`` by cell and tried value; the lowest of each cell is bold."""
    assert study.choice is not None
    losses = {
        cell: {
            float(line["chosen"].partition("=")[2]): line["measures"][HELD_OUT]
            for line in of_cell(by_run, cell)
            if not line["is_reported"]
        }
        for cell in study.cells
    }
    values = sorted({value for each in losses.values() for value in each})
    rows = []
    for cell, each in losses.items():
        best = min(each, key=each.__getitem__, default=None)
        texts = (f"{each[value]:.4f}" if value in each else "" for value in values)
        rows.append(
            (
                _label(cell),
                *(
                    f"**{text}**" if v == best else text
                    for v, text in zip(values, texts, strict=True)
                ),
            )
        )
    return ("arm", *(f"{value:g}" for value in values)), rows


def draw(study: Study, reported: Mapping[Cell, Lines], path: Path) -> None:
    """Plot held-out losses, their differences by tokens, and the comparisons of each measure.

    The losses and their differences from the baseline have a panel for each size, and the
    comparisons a panel for each measure.
    """
    sizes = list(study.sizes) or [""]
    figure, axes = make_panels(2 * len(sizes) + len(study.compared))
    styles = styles_of(reported)
    panels = iter(axes)
    points = held_out_points(reported)
    for size in sizes:
        curves = {
            cell: estimates_at_common_points(points[cell], lines)
            for cell, lines in reported.items()
            if cell.size == size and lines
        }
        panel = next(panels)
        draw_curves(panel, curves, styles)
        of_size = f", {size}" if size else ""
        title = f"Held-out loss{of_size} (mean, 95% interval over seeds)"
        panel.set(title=title, ylabel="nats per token")
        if curves:
            panel.legend()
    for size in sizes:
        differences = compared_by_tokens(study, points, "difference")
        of_this = {cell: found for cell, found in differences.items() if cell.size == size}
        panel = next(panels)
        draw_curves(panel, {cell: found for cell, found in of_this.items() if found}, styles)
        panel.axhline(0, color="black", linewidth=1)
        of_size = f", {size}" if size else ""
        panel.set(title=f"Held-out loss less {study.baseline}'s{of_size}", ylabel="nats per token")
    for panel, measure in zip(panels, study.compared, strict=True):
        draw_comparison(panel, study, reported, measure, styles)
    figure.savefig(path, dpi=130)


def draw_along(
    study: Study, along: DuringTraining, reported: Mapping[Cell, Lines], path: Path
) -> None:
    """Plot each measure during training by tokens, with its interval over seeds as a band.

    There is one panel for each size and measure.
    """
    figure, axes = make_panels(len(along.compared) * len(study.sizes or [""]))
    styles = styles_of(reported)
    panels = iter(axes)
    for size in study.sizes or [""]:
        for measure in along.compared:
            curves = {
                cell: {
                    tokens: seeds_interval([*values.values()])
                    for tokens, values in points_along(lines, measure).items()
                }
                for cell, lines in reported.items()
                if cell.size == size and lines
            }
            panel = next(panels)
            draw_curves(panel, curves, styles)
            panel.set_title(f"{measure}{', ' + size if size else ''}")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=_COLUMNS)
    figure.savefig(path, dpi=130)


def make_panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure and its ``count`` panels, which are in rows of three."""
    columns = min(count, _COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(6.2 * columns, 3.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for empty in axes[count:]:
        empty.set_axis_off()
    return figure, axes[:count]


def styles_of(reported: Mapping[Cell, Lines]) -> Styles:
    """Return color, dashes and marker of every arm with finished runs.

    The color depends on the arm's kind of attention, and is the same in every study. Arms of one
    kind differ in dashes and markers.
    """
    colors = {kind: colormaps["tab10"](number) for number, kind in enumerate(KINDS)}
    arms_of_kind: dict[str, list[str]] = defaultdict(list)
    for cell, lines in reported.items():
        if lines and cell.arm not in arms_of_kind[lines[0]["kind"]]:
            arms_of_kind[lines[0]["kind"]].append(cell.arm)
    return {
        arm: (colors[kind], _DASHES[number % len(_DASHES)], _MARKERS[number % len(_MARKERS)])
        for kind, arms in arms_of_kind.items()
        for number, arm in enumerate(arms)
    }


def draw_curves(
    axes: Axes, curves: Mapping[Cell, Mapping[float, Estimate]], styles: Styles
) -> None:
    """Plot one curve for each cell: an estimate by tokens, with its interval as a band.

    Args:
        axes: panel to draw in.
        curves: for each cell, a dict from trained tokens to an estimate over seeds.
        styles: color, dashes and marker of each arm; the marker is not used.
    """
    for cell, points in curves.items():
        color, dashes, _ = styles[cell.arm]
        tokens = sorted(points)
        found = [points[each] for each in tokens]
        seeds = max((estimate.units or 0 for estimate in found), default=0)
        means = [estimate.value for estimate in found]
        label = f"{cell.arm}, {seeds} {'seed' if seeds == 1 else 'seeds'}"
        axes.plot(tokens, means, linestyle=dashes, color=color, label=label)
        bands = [
            (each, estimate.low, estimate.high)
            for each, estimate in zip(tokens, found, strict=True)
            if estimate.low is not None
        ]
        if bands:
            axes.fill_between(*zip(*bands, strict=True), color=color, alpha=0.15, linewidth=0)
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)


def estimates_at_common_points(points: Points, lines: Lines) -> dict[float, Estimate]:
    """Return the mean over seeds at each number of tokens where every run has a value."""
    return {
        tokens: seeds_interval([*values.values()])
        for tokens, values in points.items()
        if len(values) == len(lines)
    }


def draw_comparison(
    axes: Axes, study: Study, reported: Mapping[Cell, Lines], measure: str, styles: Styles
) -> None:
    """Plot each cell's comparison with the baseline of its size, with its interval over seeds."""
    how = study.compared[measure]
    found = {cell: to_baseline(study, reported, cell, measure) for cell in reversed([*reported])}
    compared = {cell: estimate for cell, estimate in found.items() if estimate is not None}
    for height, (cell, estimate) in enumerate(compared.items()):
        color, _, marker = styles[cell.arm]
        axes.plot(estimate.value, height, marker, color=color, markersize=8)
        if estimate.low is not None and estimate.high is not None:
            axes.plot([estimate.low, estimate.high], [height] * 2, color=color, linewidth=2)
    axes.axvline(_EQUAL[how], color="black", linewidth=1)
    axes.set_yticks(range(len(compared)), [_label(cell) for cell in compared])
    axes.set_ylim(-0.5, max(len(compared), 1) - 0.5)
    unit = ", nats per token" if how == "difference" and measure.endswith("/loss") else ""
    axes.set(title=measure, xlabel=f"{how} to {study.baseline}{unit} (95% over seeds)")
    # Small numbers have long tick labels, and more than five of them would overlap.
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="x", alpha=0.3)


def _label(cell: Cell) -> str:
    return ", ".join(part for part in (cell.size, cell.arm) if part)

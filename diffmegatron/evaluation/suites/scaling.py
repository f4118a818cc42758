"""Scaling curves of runs: power laws of the held-out loss, and ratios of sizes at equal loss.

Differential Transformer (Ye et al., figure 3) fits the power law L(x) = a x^-b of Kaplan et al.,
where x is the number of parameters or of training tokens.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field
from typing_extensions import override

from diffmegatron.config.load import load_resolved
from diffmegatron.errors import UserError
from diffmegatron.evaluation.figures import Figure, place_legend
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.suite import Direction, Item, Record, Records, Suite
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import format_path
from diffmegatron.model.accounting.parameters import count_parameters
from diffmegatron.training.monitoring.metrics import METRICS, read_metrics

_RECIPE = "recipe.yaml"
Point = tuple[float, float]


class PowerLaw(NamedTuple):
    """The power law L(x) = a x^-b, where L is the loss in nats per token."""

    a: float
    b: float

    def loss(self, x: float) -> float:
        """Return L(x)."""
        return self.a * x**-self.b

    def size(self, loss: float) -> float:
        """Return the x for which L(x) is ``loss``."""
        return (self.a / loss) ** (1 / self.b)


class Scaling(Suite):
    """Power laws of the held-out loss for each kind of attention, compared with the Transformer.

    The power law L = a x^-b is fitted to the losses L of each kind, by least squares on logarithms.

    - With ``against=parameters``, x is the number of parameters without embeddings, and L is the
      last held-out loss of each run. Give runs of several sizes.
    - With ``against=tokens``, x is the number of tokens, and L is every held-out loss of the runs.
      Give runs of one size.

    For each x of a kind except the Transformer, the report has the share x / y. Here y is the
    number of parameters or tokens with which the Transformer's law reaches the loss of the kind's
    law at x.
    """

    name = "scaling"
    title = "Scaling curves (paper: 62.2% of the parameters at 6.8B, 63.7% of the tokens at 160B)"
    description = (
        "Power laws L = a x^-b fitted to the held-out losses of runs, and the share of the "
        "Transformer's size or tokens that another kind needs for the same loss."
    )
    reads_runs = True

    against: Literal["parameters", "tokens"] = Field(
        default="parameters", description="what the loss is a function of"
    )

    @override
    def check(self, target: Target) -> None:
        if target.run_dir is None or not (target.run_dir / METRICS).exists():
            raise UserError(
                f"suite 'scaling' reads {METRICS} of runs, and {format_path(target.path)} is not a "
                f"run_dir with this file; give run_dirs"
            )

    @override
    def items(self, target: Target) -> list[Item]:
        assert target.run_dir is not None
        losses = [
            (int(entry["step"]), entry["valid/loss"])
            for entry in read_metrics(target.run_dir)
            if "valid/loss" in entry and entry["step"]
        ]
        if not losses:
            raise UserError(
                f"{format_path(target.run_dir / METRICS)} has no valid/loss after step 0; train "
                "with data.validation_fraction and training.eval_interval"
            )
        return [Item("run", 0, (str(target.run_dir), losses))]

    @override
    def score(self, model: Model, item: Item) -> Record:
        """Return the kind of attention, the number of parameters, and pairs [tokens seen, loss].

        Parameters of the embedding and the output layer do not count.
        """
        run_dir, losses = item.content
        recipe = load_resolved(Path(run_dir) / _RECIPE)
        attention = recipe.model.attention
        return {
            "kind": attention.title,
            "is_baseline": attention.baseline() == attention,
            "parameters": count_parameters(recipe.model).without_embeddings,
            "losses": [[step * recipe.training.tokens_per_step, loss] for step, loss in losses],
        }

    @override
    def totals(self, records: Records) -> dict[str, float]:
        (record,) = records
        tokens, loss = record["losses"][-1]
        return {"parameters": record["parameters"], "tokens": tokens, "last held-out loss": loss}

    @override
    def across(self, records: Mapping[str, Records]) -> dict[str, float]:
        """Return a and b of each kind's law, and shares x / y of kinds other than the Transformer.

        x is a number of parameters or tokens of the kind's runs. y is the number that the
        Transformer needs for the same loss, according to the laws.
        """
        found: dict[str, float] = {}
        kinds = self._kinds(records)
        for kind, (points, is_baseline, law) in kinds.items():
            if law is None:
                continue
            found |= {f"{kind}: a of a x^-b": law.a, f"{kind}: b of a x^-b": law.b}
            for other, (_, is_base, base) in kinds.items():
                if is_base and base is not None and not is_baseline:
                    found |= {
                        f"{kind} at {x:.3g} {self.against}: share of {other}'s at equal loss": x
                        / base.size(law.loss(x))
                        for x in sorted({x for x, _ in points})
                    }
        return found

    @override
    def remarks(self, records: Mapping[str, Records]) -> list[str]:
        return [
            f"{kind}: no fit; the runs need at least two different numbers of {self.against}, and "
            "a loss that falls with them"
            for kind, (*_, law) in self._kinds(records).items()
            if law is None
        ]

    @override
    def better(self, measure: str) -> Direction | None:
        return "lower" if measure == "last held-out loss" else None

    @override
    def draw(self, figure: Figure, records: Mapping[str, Records]) -> bool:
        axes = figure.subplots()
        for kind, (points, _, law) in self._kinds(records).items():
            xs, losses = zip(*points, strict=True)
            (line,) = axes.plot(xs, losses, "o", label=kind)
            if law is not None:
                grid = np.geomspace(min(xs), max(xs), 50)
                axes.plot(grid, [law.loss(x) for x in grid], color=line.get_color())
        xlabel = "tokens seen" if self.against == "tokens" else "parameters without embeddings"
        axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel="held-out loss, nats per token")
        axes.grid(alpha=0.3, which="both")
        place_legend(axes)
        return True

    def _kinds(
        self, records: Mapping[str, Records]
    ) -> dict[str, tuple[list[Point], bool, PowerLaw | None]]:
        """Return kind -> (sorted points (x, loss), whether the kind is the Transformer, law)."""
        found: dict[str, tuple[list[Point], bool]] = {}
        for (record,) in records.values():
            points, _ = found.setdefault(record["kind"], ([], record["is_baseline"]))
            losses = record["losses"]
            if self.against == "tokens":
                points += [(tokens, loss) for tokens, loss in losses]
            else:
                points.append((record["parameters"], losses[-1][1]))
        return {
            kind: (sorted(points), is_baseline, fit_power_law(sorted(points)))
            for kind, (points, is_baseline) in found.items()
        }


def fit_power_law(points: Sequence[Point]) -> PowerLaw | None:
    """Fit a power law by least squares to (log x, log L) of points (x, L) with x, L > 0.

    The result is None if all x are equal, or if the fitted loss does not fall with x.
    """
    if len({x for x, _ in points}) < 2:
        return None
    x, loss = np.log(np.array(points, dtype=np.float64)).T
    slope, intercept = np.polynomial.Polynomial.fit(x, loss, 1).convert().coef[::-1]
    return PowerLaw(math.exp(intercept), -slope) if slope < 0 else None

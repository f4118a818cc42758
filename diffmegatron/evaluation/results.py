"""Results of an evaluation: ``results.json``, and the pictures and reports."""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from diffmegatron.checkpoint.checkpoint_format import read_recipe
from diffmegatron.checkpoint.checkpoint_manifest import read_checkpoint_manifest
from diffmegatron.checkpoint.checkpoint_store import RECIPE
from diffmegatron.checkpoint.stage_folders import earlier_stages
from diffmegatron.config.load import load_resolved
from diffmegatron.config.schema import Recipe
from diffmegatron.evaluation.bootstrap import difference, estimate
from diffmegatron.evaluation.conclusions import conclusions, draw_conclusions
from diffmegatron.evaluation.evaluate_settings import Computing
from diffmegatron.evaluation.report_pages import CONCLUSION, to_html, to_markdown
from diffmegatron.evaluation.result_file import Measured
from diffmegatron.evaluation.suite import Estimate, Mean, Record, Suite
from diffmegatron.evaluation.targets import Target, have_one_tokenizer
from diffmegatron.files import explain_os_errors, format_path, write_durably, write_picture
from diffmegatron.hf.pretrained_files import PretrainedTensors
from diffmegatron.model.accounting.parameters import count_parameters

REPORT = "report.html"


def write_results(
    out: Path,
    suites: Sequence[Suite],
    targets: Sequence[Target],
    measured: Mapping[str, Mapping[str, Measured]],
    computing: Computing,
) -> None:
    """Write pictures, ``results.json``, ``report.md`` and ``report.html`` into ``out``.

    ``measured[suite name][target name]`` is the result of a suite on a target.
    """
    uses_networks = not all(suite.reads_runs for suite in suites)
    is_comparable = not uses_networks or have_one_tokenizer(targets)
    outcome = {
        "made": _provenance(computing),
        "targets": {
            target.name: _described(target, computing if uses_networks else None)
            for target in targets
        },
        "suites": {
            suite.name: _outcome_of(suite, measured[suite.name], is_comparable) for suite in suites
        },
    }
    pictures: dict[str, bytes] = {}
    with explain_os_errors(f"cannot write into {format_path(out)}"):
        for suite in suites:
            path, figure = (
                out / f"{suite.name}.png",
                Figure(figsize=(7.5, 4.5), layout="constrained"),
            )
            FigureCanvasAgg(figure)
            records = _nonempty_records(measured[suite.name])
            if records and suite.draw(figure, records):
                write_picture(path, figure)
                pictures[suite.name] = path.read_bytes()
        compared = conclusions(outcome)
        figure = Figure(figsize=(7.5, 1.2 + 0.5 * len(compared)), layout="constrained")
        FigureCanvasAgg(figure)
        if draw_conclusions(figure, compared, targets[0].name):
            write_picture(out / f"{CONCLUSION}.png", figure)
            pictures[CONCLUSION] = (out / f"{CONCLUSION}.png").read_bytes()
        text = json.dumps(outcome, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        # The largest file comes first, so that a full disk leaves all earlier files as they are.
        write_durably(out / REPORT, to_html(outcome, pictures).encode())
        write_durably(out / "results.json", text.encode())
        write_durably(out / "report.md", to_markdown(outcome, pictures).encode())


def _provenance(computing: Computing) -> dict[str, Any]:
    libraries = ["diffmegatron", "torch", "transformers"]
    if computing.engine != "transformers":
        libraries.append(computing.engine)
    cpu = f"a CPU ({platform.machine()})"
    return {
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name() if computing.is_gpu else cpu,
        "versions": {"Python": platform.python_version()}
        | {name: import_module(name).__version__ for name in libraries},
    }


def _described(target: Target, computing: Computing | None) -> dict[str, Any]:
    """Describe a target for the report; ``computing`` is None if no suite used the network."""
    described: dict[str, Any] = {"path": str(target.path), "weights": target.fingerprint}
    if target.checkpoint is not None:
        recipe, step = (
            read_recipe(target.checkpoint),
            read_checkpoint_manifest(target.checkpoint).step,
        )
        described |= {
            "parameters": count_parameters(recipe.model).total,
            "tokens": _trained_tokens(target.checkpoint, recipe, step),
            "seed": recipe.training.seed,
        }
    else:
        tensors = PretrainedTensors(target.folder).tensors.values()
        described["parameters"] = sum(math.prod(tensor.shape) for tensor in tensors)
    if computing is None:
        return described
    return described | {
        "model_type": target.config.model_type,
        "context": None if math.isinf(target.context) else target.context,
        "dtype": computing.dtype_of(target),
    }


def _trained_tokens(checkpoint: Path, recipe: Recipe, step: int) -> int | None:
    """Return the tokens of all stages up to a checkpoint; None if an earlier stage is removed."""
    tokens = step * recipe.training.tokens_per_step
    # The checkpoint is RUN_DIR/checkpoints/step_...
    for stage in earlier_stages(checkpoint.resolve().parent.parent):
        if not (steps := stage.store.steps()):
            return None
        earlier = load_resolved(stage.run_dir / RECIPE)
        tokens += steps[-1] * earlier.training.tokens_per_step
    return tokens


def _nonempty_records(measured: Mapping[str, Measured]) -> dict[str, list[Record]]:
    return {name: list(each.records.values()) for name, each in measured.items() if each.records}


def _outcome_of(
    suite: Suite, measured: Mapping[str, Measured], is_comparable: bool
) -> dict[str, Any]:
    """Return a suite's entry in ``results.json``.

    If ``is_comparable`` is false, the targets have different tokenizers, and the differences of
    measures with ``Mean.per_token`` are None.
    """
    shares = {name: _shares(suite, each.records) for name, each in measured.items()}
    records = _nonempty_records(measured)
    measures = suite.ordered(list(dict.fromkeys(chain.from_iterable(shares.values()))))
    per_token = {
        measure
        for of_target in shares.values()
        for measure, by_unit in of_target.items()
        if any(share.per_token for share in by_unit.values())
    }
    remarks = [f"{name}: {why}" for name, each in measured.items() for why in each.remarks]
    if per_token and not is_comparable:
        remarks.append(
            f"no differences of {', '.join(m for m in measures if m in per_token)}, because the "
            "targets have different tokenizers"
        )
    remarks += suite.remarks(records)
    first, *others = measured
    totals = {
        name: {measure: _as_json(value) for measure, value in suite.totals(each).items()}
        for name, each in records.items()
    }
    names = dict.fromkeys([*measures, *chain.from_iterable(totals.values())])
    better = {name: suite.better(name) for name in names}
    return {
        "title": suite.title,
        "description": suite.description,
        "settings": suite.model_dump(mode="json"),
        "measures": {
            measure: {
                "targets": {
                    name: _as_json(estimate(each.get(measure, {}))) for name, each in shares.items()
                },
                "differences": {
                    name: _as_json(
                        difference(shares[name].get(measure, {}), shares[first].get(measure, {}))
                        if is_comparable or measure not in per_token
                        else None
                    )
                    for name in others
                },
            }
            for measure in measures
        },
        "better": {name: each for name, each in better.items() if each is not None},
        "totals": totals,
        "across": dict(suite.across(records)) if records else {},
        "details": dict(suite.details(records)),
        "published": [
            {
                "measure": each.measure,
                "differential": each.differential,
                "transformer": each.transformer,
                "of": each.source,
            }
            for each in suite.published
        ],
        "not_run": remarks,
    }


def _shares(suite: Suite, records: Mapping[str, Record]) -> dict[str, dict[str, Mean]]:
    """Return {measure: {unit: sum of the contributions of the unit's items}}; see `Suite.unit`."""
    found: dict[str, dict[str, Mean]] = {}
    for key, record in records.items():
        unit = suite.unit(key, record)
        for measure, share in suite.means(record).items():
            of_measure = found.setdefault(measure, {})
            if (before := of_measure.get(unit)) is not None:
                total, weight = before.total + share.total, before.weight + share.weight
                share = share._replace(total=total, weight=weight)
            of_measure[unit] = share
    return found


def _as_json(found: float | Estimate | None) -> dict[str, Any] | None:
    if found is None:
        return None
    if not isinstance(found, Estimate):
        found = Estimate(found, None, None, None)
    return {"value": found.value, "low": found.low, "high": found.high, "items": found.units}

"""Results of an evaluation: ``results.json``, and the pictures and reports."""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from diffmegatron.errors import UserError
from diffmegatron.evaluation.bootstrap import difference, estimate
from diffmegatron.evaluation.model import Computing
from diffmegatron.evaluation.report_pages import to_html, to_markdown
from diffmegatron.evaluation.result_file import Measured
from diffmegatron.evaluation.suite import Estimate, Mean, Published, Record, Suite
from diffmegatron.evaluation.targets import Target, have_one_tokenizer
from diffmegatron.files import format_path, os_error_text, write_durably, write_picture

REPORT = "report.html"

# Content of ``results.json``.
Outcome = dict[str, Any]
# ``shares[measure][unit]`` is the contribution of a unit (:meth:`Suite.unit`) to a measure.
Shares = dict[str, dict[str, Mean]]


def make_outcome(
    suites: Sequence[Suite],
    targets: Sequence[Target],
    measured: Mapping[str, Mapping[str, Measured]],
    computing: Computing,
) -> Outcome:
    """Return the content of ``results.json``, in types of JSON.

    ``measured[suite name][target name]`` is the result of a suite on a target.
    """
    networks = not all(suite.reads_runs for suite in suites)
    same = not networks or have_one_tokenizer(targets)
    return {
        "made": _provenance(computing),
        "targets": {
            target.name: _described(target, computing if networks else None) for target in targets
        },
        "suites": {suite.name: _outcome_of(suite, measured[suite.name], same) for suite in suites},
    }


def write_outcome(
    out: Path,
    outcome: Outcome,
    suites: Sequence[Suite],
    measured: Mapping[str, Mapping[str, Measured]],
) -> None:
    """Write pictures, ``results.json``, ``report.md`` and ``report.html`` into ``out``."""
    pictures: dict[str, bytes] = {}
    try:
        for suite in suites:
            by_target = {n: list(m.records.values()) for n, m in measured[suite.name].items()}
            path = out / f"{suite.name}.png"
            if _draw(suite, path, {name: each for name, each in by_target.items() if each}):
                pictures[suite.name] = path.read_bytes()
        text = json.dumps(outcome, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        write_durably(out / "results.json", text.encode())
        write_durably(out / "report.md", to_markdown(outcome, pictures).encode())
        write_durably(out / REPORT, to_html(outcome, pictures).encode())
    except OSError as error:
        raise UserError(f"cannot write into {format_path(out)}: {os_error_text(error)}") from None


def _draw(suite: Suite, path: Path, records: Mapping[str, list[Record]]) -> bool:
    if not records:
        return False
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    drawn = suite.draw(figure, records)
    if drawn:
        write_picture(path, figure)
    return drawn


def _provenance(computing: Computing) -> dict[str, Any]:
    is_gpu = computing.is_gpu
    libraries = ["diffmegatron", "torch", "transformers"]
    if computing.engine != "transformers":
        libraries.append(computing.engine)
    return {
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name() if is_gpu else f"a CPU ({platform.machine()})",
        "versions": {"Python": platform.python_version()}
        | {name: version(name) for name in libraries},
    }


def _described(target: Target, computing: Computing | None) -> dict[str, Any]:
    """Describe a target for the report; ``computing`` is None if no suite used the network."""
    described = {"path": str(target.path), "weights": target.fingerprint}
    if computing is None:
        return described
    context = None if math.isinf(target.context) else target.context
    return described | {
        "model_type": target.config.model_type,
        "context": context,
        "dtype": computing.dtype_of(target),
    }


def _outcome_of(suite: Suite, measured: Mapping[str, Measured], same: bool) -> dict[str, Any]:
    shares = {name: _shares(suite, each.records) for name, each in measured.items()}
    records = {name: list(each.records.values()) for name, each in measured.items()}
    records = {name: each for name, each in records.items() if each}
    measures = suite.ordered(list(dict.fromkeys(chain.from_iterable(shares.values()))))
    tokens = {m for of_target in shares.values() for m, s in of_target.items() if _counts_tokens(s)}
    remarks = [f"{name}: {why}" for name, each in measured.items() for why in each.remarks]
    if tokens and not same:
        remarks.append(
            f"no differences of {', '.join(m for m in measures if m in tokens)}, because the "
            "targets have different tokenizers"
        )
    remarks += suite.remarks(records)
    first, *others = measured
    totals = {
        name: {measure: _total(value) for measure, value in suite.totals(each).items()}
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
                    name: _as_json_or_none(estimate(each.get(measure, {})))
                    for name, each in shares.items()
                },
                "differences": {
                    name: _as_json_or_none(
                        difference(shares[name].get(measure, {}), shares[first].get(measure, {}))
                        if same or measure not in tokens
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
        "published": [_published_as_json(each) for each in suite.published],
        "not_run": remarks,
    }


def _shares(suite: Suite, records: Mapping[str, Record]) -> Shares:
    """Add up the items' contributions to each measure by unit (:meth:`Suite.unit`)."""
    found: Shares = {}
    for key, record in records.items():
        unit = suite.unit(key, record)
        for measure, share in suite.means(record).items():
            of_measure = found.setdefault(measure, {})
            before = of_measure.get(unit)
            if before is not None:
                share = share._replace(
                    total=before.total + share.total, weight=before.weight + share.weight
                )
            of_measure[unit] = share
    return found


def _counts_tokens(shares: Mapping[str, Mean]) -> bool:
    return any(share.per_token for share in shares.values())


def _total(value: float | Estimate) -> dict[str, Any]:
    found = value if isinstance(value, Estimate) else Estimate(value, None, None, None)
    return _as_json(found)


def _as_json(found: Estimate) -> dict[str, Any]:
    return {"value": found.value, "low": found.low, "high": found.high, "items": found.units}


def _as_json_or_none(found: Estimate | None) -> dict[str, Any] | None:
    return None if found is None else _as_json(found)


def _published_as_json(published: Published) -> dict[str, Any]:
    return {
        "measure": published.measure,
        "differential": published.differential,
        "transformer": published.transformer,
        "of": published.source,
    }

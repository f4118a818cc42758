"""All suites (benchmarks) by name, and their construction from a command line."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diffmegatron.errors import UserError
from diffmegatron.evaluation.suite import Suite
from diffmegatron.evaluation.suites.attention_analysis import AttentionAnalysis
from diffmegatron.evaluation.suites.classification import ManyShot, Order
from diffmegatron.evaluation.suites.hallucination import Hallucination
from diffmegatron.evaluation.suites.lm_eval import LmEval
from diffmegatron.evaluation.suites.loss import Loss, Perplexity
from diffmegatron.evaluation.suites.math import Mathematics
from diffmegatron.evaluation.suites.needle import NeedleAttention, Retrieval
from diffmegatron.evaluation.suites.outliers import Outliers, QuantizedAttention
from diffmegatron.evaluation.suites.recall import AssociativeRecall, Recall
from diffmegatron.evaluation.suites.scaling import Scaling
from diffmegatron.evaluation.suites.throughput import Throughput
from diffmegatron.files import shorten
from diffmegatron.validation import validated
from diffmegatron.yaml_documents import parse_value

# Largest default of a suite's setting ``context``, in tokens.
MAX_DEFAULT_CONTEXT = 2048
SUITES: dict[str, type[Suite]] = {
    each.name: each
    for each in (
        LmEval,
        Loss,
        Perplexity,
        Recall,
        AssociativeRecall,
        Retrieval,
        NeedleAttention,
        ManyShot,
        Order,
        Hallucination,
        Mathematics,
        Outliers,
        QuantizedAttention,
        AttentionAnalysis,
        Scaling,
        Throughput,
    )
}


def make_suites(
    names: Sequence[str],
    options: Mapping[str, Any],
    settings: Sequence[str],
    context: Callable[[], int],
) -> list[Suite]:
    """Return the suites of a command line with their settings.

    Args:
        options: values of the fields ``data``, ``haystack`` and ``data_dir``. A suite uses the
            values of the fields that it has.
        settings: settings as ``SUITE.KEY=VALUE``, which override ``options``. :func:`parse_value`
            reads the value.
        context: function that returns the default of the field ``context`` in tokens. It is called
            only if a suite needs the default.
    """
    if len(set(names)) < len(names):
        raise UserError(f"--suite {','.join(names)} names a suite twice; give each once")
    values: dict[str, dict[str, Any]] = {}
    for name in names:
        if name not in SUITES:
            near = difflib.get_close_matches(name, SUITES, n=1)
            hint = f"did you mean {near[0]!r}? There are" if near else "choose from"
            raise UserError(f"--suite {shorten(repr(name))} is unknown; {hint} {', '.join(SUITES)}")
        fields = SUITES[name].model_fields
        values[name] = {key: value for key, value in options.items() if key in fields}
    for setting in settings:
        key, equals, value = setting.partition("=")
        name, dot, field = key.partition(".")
        if not equals or not dot or name not in values:
            raise UserError(
                f"--set {shorten(repr(setting))} does not have the form SUITE.KEY=VALUE with a "
                f"suite of {', '.join(names)}"
            )
        values[name][field] = parse_value(value, f"--set {key}")
    for name in names:
        if "context" in SUITES[name].model_fields and "context" not in values[name]:
            values[name]["context"] = context()
    return [_build_suite(name, values[name]) for name in names]


def _build_suite(name: str, values: Mapping[str, Any]) -> Suite:
    for key, field in SUITES[name].model_fields.items():
        if field.is_required() and key not in values:
            option = f"--{key.replace('_', '-')}" if key in _OPTIONS else f"--set {name}.{key}="
            raise UserError(f"suite {name!r} needs {option}: {field.description}")
    return validated(SUITES[name], values, f"suite {name!r}")


_OPTIONS = ("data", "haystack", "data_dir")

"""Ranks that evaluate the loss of models, started through :mod:`tests.ranks`.

The arguments are ``DATA OUT TARGET ...``, where a target is a model. Each rank writes the keys of
the items that it scores to ``OUT.asked_RANK``.
"""

import os
import sys
from pathlib import Path
from unittest import mock

from diffmegatron.evaluation.evaluate import evaluate
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings
from diffmegatron.evaluation.suites.loss import Loss


def main() -> None:
    """Measure the loss of every target."""
    data, out, *targets = sys.argv[1:]
    score = Loss.score

    def note_and_score(*given):
        with Path(f"{out}.asked_{os.environ['RANK']}").open("a") as stream:
            stream.write(f"{given[2].key}\n")
        return score(*given)

    settings = EvaluateSettings(data=(data,))
    with mock.patch.object(Loss, "score", note_and_score):
        evaluate([Path(each) for each in targets], ["loss"], Path(out), settings, [])

"""Recipes that quickstart refuses before it removes or prepares anything."""

import pytest

from diffmegatron.errors import UserError
from diffmegatron.operations import quickstart


@pytest.mark.parametrize(
    ("choices", "given", "said"),
    [
        ([], ["training.steps=-1"], "training.steps is -1"),
        (["grouped,signal_per_noise=3"], [], "signal_per_noise 3 does not divide"),
        ([], ["data.validation_fraction=0"], "quickstart reports the held-out loss"),
        ([], ["training.eval_batches=0"], "quickstart reports the held-out loss"),
        ([], ["parallel.pipeline=2", "parallel.tensor=2"], "2 ranks do not fill"),
        (["diff_v9"], [], "is not of the form KIND"),
    ],
)
def test_an_invalid_recipe_is_refused_before_runs_are_removed(
    choices, given, said, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/quickstart").mkdir(parents=True)
    with pytest.raises(UserError, match=said):
        quickstart.quickstart(choices, given)
    assert (tmp_path / "runs/quickstart").exists()

"""Tests of ``plan --rehearse``, which tries a layout with a small network on CPU ranks."""

import pytest

from diffmegatron.config.load import load_recipe
from diffmegatron.errors import UserError
from diffmegatron.plan.rehearse import MAX_RANKS, _reason, rehearse, run_ranks, small_recipe
from tests.paths import CONFIGS


def test_a_working_layout_prints_the_losses_of_two_steps(capsys):
    recipe = load_recipe(
        CONFIGS / "scaling" / "diff_13.1b.yaml",
        ["parallel.tensor=2", "recompute.granularity=full", "training.loss_chunk=512"],
    )
    rehearse([recipe])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("starting 2 CPU ranks: tensor 2, ")
    assert len([line for line in said if line.startswith("  loss 5.")]) == 2
    assert said[-1] == "the layout works"


def test_a_failed_rehearsal_is_an_error_with_the_reason(tmp_path):
    rehearsal = small_recipe(load_recipe(CONFIGS / "diff_3b_1t.yaml"), None, tmp_path)
    (tmp_path / "run").write_text("a file where a folder belongs")
    with pytest.raises(UserError, match=r"^the layout does not work: run_dir .* is a file"):
        run_ranks(rehearsal, tmp_path)


def test_a_layout_with_too_many_ranks_is_reduced_and_reported(tmp_path):
    recipe = load_recipe(
        CONFIGS / "diff_3b_64k.yaml",
        ["parallel.context=8", "parallel.tensor=4", "parallel.sequence_parallel=true"],
    )
    rehearsal = small_recipe(recipe, 64, tmp_path)
    assert rehearsal.world_size == MAX_RANKS
    assert rehearsal.recipe.parallel.context == 2
    (sentence,) = rehearsal.reductions
    assert sentence.startswith("context parallel is rehearsed with 2 ranks instead of 8")


def test_the_first_exception_of_a_rank_is_the_reason():
    said = "[rank1]: Traceback (most recent call last):\n[rank1]:   File\n[rank1]: KeyError: 'x'\n"
    said += "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    assert _reason(said) == "KeyError: 'x'"
    assert _reason("noise\nerror (rank 3): the data is gone\n" + said) == "the data is gone"

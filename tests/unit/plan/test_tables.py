"""Times in the tables of ``plan`` and ``plan --search``."""

import io

import pytest
from rich.console import Console

from diffmegatron.config.load import load_recipe
from diffmegatron.plan.search import print_search, search
from diffmegatron.plan.summary import plan_recipe
from diffmegatron.plan.tables import duration, print_plan
from tests.paths import ROOT


def printed(plan) -> str:
    stream = io.StringIO()
    print_plan(plan, Console(file=stream, width=200))
    return stream.getvalue()


def test_a_run_that_is_sized_for_a_cpu_has_no_time_on_a_gpu(tiny_recipe):
    text = printed(plan_recipe(tiny_recipe()))
    assert "Time on" not in text and "Times are an estimate" not in text
    assert "less than a minute on H100" in text


def test_a_large_run_has_a_table_of_times():
    text = printed(plan_recipe(load_recipe(ROOT / "configs/diff_3b_350b.yaml"), 64))
    assert "Time on H100 (estimate)" in text and " days" in text and "less than" not in text


@pytest.mark.parametrize(
    ("days", "text"), [(3.0, "3.0 days"), (1.5, "36.0 hours"), (0.05, "1.2 hours")]
)
def test_a_time_has_the_unit_that_fits_it(days, text):
    assert duration(days) == text


def test_a_search_prints_the_time_of_a_short_run_in_hours():
    overrides = ["training.steps=1200", "training.tokens=null"]
    recipe = load_recipe(ROOT / "configs/diff_3b_350b.yaml", overrides)
    stream = io.StringIO()
    print_search(recipe, search(recipe, 64, "H100"), 64, "H100", Console(file=stream, width=200))
    assert "the run" in stream.getvalue() and " hours" in stream.getvalue()

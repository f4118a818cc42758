"""Tests of ``plan --search``: listed layouts are valid and fit the memory; errors if none fits."""

import io
import json
import time

import pytest
from rich.console import Console

from diffmegatron.config.load import load_recipe, load_stages
from diffmegatron.errors import UserError
from diffmegatron.model.accounting.memory import memory_by_stage
from diffmegatron.plan import run_search
from diffmegatron.plan.rank_layout import RankLayout
from diffmegatron.plan.search import print_search, search
from tests.paths import CONFIGS

FILE = CONFIGS / "diff_3b_1t.yaml"
LARGE = CONFIGS / "scaling" / "diff_13.1b.yaml"


def test_candidates_load_fit_the_memory_and_are_sorted():
    candidates = search(load_recipe(LARGE), 64, "H100")
    assert len(candidates) > 5
    for candidate in candidates:
        recipe = load_recipe(LARGE, candidate.overrides)
        peak = max(stage.total for stage in memory_by_stage(recipe, 64))
        assert peak == candidate.peak <= 0.9 * 80 * 2**30
        assert recipe.parallel.tensor <= 8
        assert recipe.parallel.sequence_parallel == (recipe.parallel.tensor > 1)
        layout = candidate.layout
        assert layout.tensor * layout.context * layout.pipeline * layout.data == 64
    steps = [candidate.time.step for candidate in candidates]
    assert steps == sorted(steps)
    sizes = [(c.layout.tensor, c.layout.context, c.layout.pipeline) for c in candidates]
    assert len(set(sizes)) == len(sizes)


def test_a_search_with_overlap_keeps_layouts_that_cannot_overlap():
    asked = search(load_recipe(LARGE, ["parallel.overlap_gradients=true"]), 64, "H100")
    assert [c.layout for c in asked] == [c.layout for c in search(load_recipe(LARGE), 64, "H100")]
    assert any(c.layout.pipeline > 1 for c in asked)
    for candidate in asked:
        load_recipe(LARGE, ["parallel.overlap_gradients=true", *candidate.overrides])


def test_a_search_is_quick():
    # Measure CPU seconds, because other work on the machine changes them little.
    started = time.process_time()
    search(load_recipe(FILE), 256, "H100")
    assert time.process_time() - started < 5


def test_zero_3_of_too_many_layers_is_refused():
    overrides = ["model.num_layers=10001", "parallel.zero_stage=3"]
    with pytest.raises(UserError, match=r"model\.num_layers is 10,001; the memory of ZeRO 3"):
        memory_by_stage(load_recipe(CONFIGS / "quickstart.yaml", overrides), 2)


def test_too_few_gpus_are_an_error_that_names_a_number_that_fits():
    with pytest.raises(UserError) as error:
        search(load_recipe(LARGE), 1, "H100")
    assert "no layout of 1 rank fits 90% of H100's 80 GiB" in str(error.value)
    assert "lacks 150." in str(error.value)
    assert str(error.value).endswith("; 4 GPUs fit")
    assert search(load_recipe(LARGE), 4, "H100")
    with pytest.raises(UserError):
        search(load_recipe(LARGE), 2, "H100")


def test_ranks_that_no_layout_fills_are_an_error():
    with pytest.raises(UserError, match=r"no layout fills 11 ranks .* 1024 is not a multiple"):
        search(load_recipe(FILE), 11, "H100")


def test_the_table_fits_80_columns_and_the_overrides_can_be_pasted():
    recipe = load_recipe(FILE, ["training.micro_batch_size=2"])
    candidates = search(recipe, 64, "H100")
    out = io.StringIO()
    print_search(recipe, candidates, 64, "H100", Console(file=out, width=80))
    text = out.getvalue()
    assert "…" not in text
    for number, candidate in enumerate(candidates[:10], 1):
        assert f"{number:3d}  {' '.join(candidate.overrides) or '(the recipe as it is)'}" in text
    assert "(the recipe as it is)" in text
    fastest = candidates[0].time
    ties = [each for each in candidates[:10] if each.time.step <= 1.1 * fastest.step]
    assert 1 < len(ties) < 10
    first = next(line.split() for line in text.splitlines() if line.strip().startswith("1="))
    assert first[-4:-2] == [f"{fastest.utilization:.0%}", f"{fastest.tokens_per_second / 64:,.0f}"]
    assert text.count("=  ") == len(ties)
    assert "Times are an estimate" in text


def test_json_holds_every_candidate(capsys):
    run_search([load_recipe(FILE)], 64, as_json=True)
    values = json.loads(capsys.readouterr().out)
    assert len(values) == len(search(load_recipe(FILE), 64, "H100"))
    assert values[0]["time"]["step"] <= values[1]["time"]["step"]


def test_pasted_overrides_change_only_the_stage_of_their_table(capsys):
    """Paste the overrides of every row, and compare the layouts of all stages."""
    file, size = CONFIGS / "diff_3b_math.yaml", 8
    before = load_stages(file)
    found = [search(recipe, size, "H100") for recipe in before]
    run_search(before, size)
    lines = [
        line.split()[1:] for line in capsys.readouterr().out.splitlines() if "parallel." in line
    ]
    assert all(each.startswith("stages.") for line in lines for each in line)
    run_search(before, size, as_json=True)
    as_json = json.loads(capsys.readouterr().out)
    assert lines == [row["overrides"] for rows in as_json for row in rows[:10] if row["overrides"]]
    for number, rows in enumerate(as_json):
        for row, candidate in zip(rows, found[number], strict=True):
            after = load_stages(file, row["overrides"])
            assert RankLayout.of(after[number], size) == candidate.layout
            assert after[:number] + after[number + 1 :] == before[:number] + before[number + 1 :]

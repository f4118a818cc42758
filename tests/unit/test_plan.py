"""The plan of a recipe: its numbers, its warnings, its two renderings."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from diffmegatron.config.load import load_recipe, load_stages
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.model.accounting import memory_by_stage
from diffmegatron.plan import Plan, plan_recipe, print_plan, run

CONFIGS = Path(__file__).parents[2] / "configs"
LARGE = CONFIGS / "scaling" / "diff_13.1b.yaml"


def load(*overrides: str, path: Path = CONFIGS / "diff_3b_1t.yaml") -> Recipe:
    return load_recipe(path, overrides)


def printed(plan: Plan, width: int = 400) -> str:
    out = io.StringIO()
    print_plan(plan, Console(file=out, width=width))
    return out.getvalue()


def test_the_3b_run_by_hand():
    plan = plan_recipe(load(), world_size=64)
    assert plan.parameters.total == 2 * 100_288 * 3072 + 28 * (
        4 * 3072**2 + 3 * 3072 * 8192 + 4 * 128 + 256 + 2 * 3072
    ) + (3072)
    assert plan.tokens_per_step == 4096 * 1024
    assert plan.steps == 238_419  # 1e12 / 4,194,304, rounded up
    assert plan.tokens == 238_419 * 4096 * 1024
    assert plan.total_flops == plan.tokens * plan.flops_per_token.training
    assert (plan.layout.data, plan.layout.microbatches) == (64, 16)


def test_the_fewest_ranks_that_fill_the_layout_are_the_default():
    assert plan_recipe(load()).layout.world_size == 1
    recipe = load("parallel.tensor=4", "parallel.pipeline=2")
    assert plan_recipe(recipe).layout.world_size == 8


def test_ranks_that_do_not_fill_the_layout_are_refused():
    with pytest.raises(UserError, match="6 ranks do not fill"):
        plan_recipe(load("parallel.tensor=4"), world_size=6)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="micro_batch_size 1 x data parallel 3"):
        plan_recipe(load(), world_size=3)


def test_the_shipped_recipes_fit_their_gpus_without_a_warning():
    """On as many ranks as their comments ask for: two for the 3B model, the fewest elsewhere."""
    assert plan_recipe(load(), world_size=2).warnings == ()
    assert plan_recipe(load(path=LARGE)).warnings == ()


@pytest.mark.parametrize(
    ("overrides", "ranks", "said"),
    [
        # Heads halved twice, with and without the head dimension given.
        (["model.num_heads=6"], 2, "num_heads 6 is fewer"),
        (["model.num_heads=6"], 2, "head_dim 256 is above the paper's 128"),
        (["model.num_heads=6", "model.head_dim=128"], 2, "is 1536, narrower than hidden_size 3072"),
        (["model.headwise_norm=false"], 2, "3.122 instead of 3.062"),
        (["parallel.tensor=16", "model.num_heads=16"], 16, "reaches beyond a node of 8 GPUs"),
        (["parallel.tensor=2"], 2, "sequence_parallel is off with parallel.tensor 2"),
        (["parallel.pipeline=4"], 2048, "2 microbatches do not fill parallel.pipeline 4"),
        (["model.num_layers=56", "training.micro_batch_size=1"], 2, "an estimated"),
    ],
)
def test_warnings_name_the_number_and_what_would_be_better(overrides, ranks, said):
    warnings = plan_recipe(load(*overrides), ranks).warnings
    assert [warning for warning in warnings if said in warning], warnings


def test_the_learning_rate_of_a_large_differential_model_is_warned_about():
    high = load("optimizer.lr=1e-4", path=LARGE)
    assert any("loss spikes" in warning for warning in plan_recipe(high).warnings)
    twin = load("optimizer.lr=1e-4", "model.attention=softmax", path=LARGE)
    assert plan_recipe(twin).warnings == ()


def test_heads_of_the_transformer_are_not_warned_about():
    twin = load("model.num_heads=6", "model.attention=softmax")
    assert plan_recipe(twin, 2).warnings == ()


def test_too_little_memory_names_gpus_and_ranks_that_fit():
    (warning,) = plan_recipe(load()).warnings
    assert "on 1 rank each needs" in warning
    assert "it fits H100 NVL, H200, B200, and 2 ranks fit into 80 GiB" in warning
    assert max(stage.total for stage in memory_by_stage(load(), 2)) < 0.9 * 80 * 2**30


def test_memory_that_no_gpu_has_is_said_to_be_so():
    (warning,) = plan_recipe(load("training.seq_length=65536")).warnings
    assert warning.endswith("it fits no known GPU")


def test_the_table_shows_every_number():
    plan = plan_recipe(load("parallel.pipeline=2"), 8)
    text = printed(plan)
    for number in ("1,056,964,608", "3.17B", "3.79B", "238,419", "4,194,304", "8 ranks", "ZeRO"):
        assert number in text
    assert "differential, 12 heads; its Transformer twin has 24" in text
    assert "stage 1 of 2" in text
    assert f"{plan.heaviest.total / 2**30:.2f}" in text


def test_the_twins_table_counts_its_own_heads():
    text = printed(plan_recipe(load("model.attention=softmax"), 2))
    assert "softmax, 24 heads; its differential twin has 12" in text


def test_json_counts_the_twins_own_heads(capsys):
    for attention, own, twin in (("differential", 12, 24), ("softmax", 24, 12)):
        run([load(f"model.attention={attention}")], 2, as_json=True)
        values = json.loads(capsys.readouterr().out)
        assert (values["num_heads"], values["twin_num_heads"]) == (own, twin)


def test_the_stages_of_a_recipe_are_told_apart(capsys):
    run(load_stages(CONFIGS / "diff_3b_math.yaml"), as_json=True)
    named = [values["run_dir"] for values in json.loads(capsys.readouterr().out)]
    assert named == ["runs/diff_3b_math/continuation", "runs/diff_3b_math/reasoning"]


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused():
    with pytest.raises(UserError, match=r"vocab_size 100276 is too small .* uses 100277 ids"):
        plan_recipe(load("model.vocab_size=100276"), 2)


def test_hardware_that_is_not_known_is_refused():
    with pytest.raises(UserError, match="'V100' is not known; give one of H100 PCIe, "):
        plan_recipe(load(), 2, "V100")


def test_memory_is_judged_by_the_hardware_named():
    assert plan_recipe(load(), 1, "H200").warnings == ()


def test_useless_recomputation_is_said_to_be_so():
    warnings = plan_recipe(load("recompute.granularity=selective"), 2).warnings
    assert any("saves little" in warning for warning in warnings)


@pytest.mark.parametrize("width", [80, 120])
def test_no_table_is_cut_off(width):
    recipe = load("parallel.tensor=4", "parallel.context=2", "parallel.sequence_parallel=true")
    text = printed(plan_recipe(recipe, 64), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_a_tied_output_layer_is_said_to_be_tied():
    assert "tied to embedding" in printed(plan_recipe(load(path=LARGE)))


def test_warnings_are_printed():
    plan = plan_recipe(load())
    assert f"warning: {plan.warnings[0]}" in printed(plan)


def test_json_has_everything_and_adds_up(capsys):
    run([load("parallel.pipeline=2")], 8, as_json=True)
    values = json.loads(capsys.readouterr().out)
    assert values["parameters"]["total"] == plan_recipe(load(), 2).parameters.total
    assert values["layout"]["data"] == 4
    assert [stage["stage"] for stage in values["memory"]] == [0, 1]
    for stage in values["memory"]:
        held = sum(stage[name] for name in ("weights", "gradients", "optimizer", "communication"))
        backward = stage["activations"] + max(stage["logits"], stage["layer"])
        assert held + max(backward, stage["update"]) == stage["total"]
    assert values["total_flops"] == values["tokens"] * values["flops_per_token"]["training"]


def test_no_torch_is_needed():
    """A plan is arithmetic: it starts fast, on a machine without torch too."""
    code = (
        "import sys; from diffmegatron.config.load import load_recipe; "
        f"from diffmegatron.plan import run; run([load_recipe({str(LARGE)!r})]); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
